"""Turns in which something else used the machine: our server, which ran in all, was slower."""

from collections.abc import Mapping, Sequence

LEAST = 0.75  # of the best rate of the same server under the same workload, beside any peer

Row = Mapping[str, object]


def disturbed(rows: Sequence[Row]) -> set[tuple[str, int]]:
    """Peers and task counts whose turns were not alone on the machine."""
    best: dict[tuple[str, int], float] = {}
    ours = [row for row in rows if "error" not in row and row["name"] != row["beside"]]
    for row in ours:
        workload = (str(row["name"]), int(str(row["tasks"])))
        best[workload] = max(best.get(workload, 0.0), float(str(row["rate"])))
    return {
        (str(row["beside"]), int(str(row["tasks"])))
        for row in ours
        if float(str(row["rate"])) < LEAST * best[(str(row["name"]), int(str(row["tasks"])))]
    }
