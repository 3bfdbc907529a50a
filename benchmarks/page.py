"""Writes docs/reference/performance.md from the results of the last runs.

    python -m benchmarks.page

A benchmark that was not run has no section: nothing on the page is older than its own date says.
"""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.front_end import STAGES
from benchmarks.measure import RESULTS
from benchmarks.peers.disturbed import disturbed

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "performance.md"
Row = Mapping[str, object]

WIDTH = 120  # of prose, as on the other pages

_HEAD = (
    "Written by `make bench`, which measures all of it. Run it with nothing else "
    "on the machine. Figures are medians, and ratios are those of contenders that took turns "
    "within one run; [Benchmarks](../explanation/benchmarks.md) says how each is measured and what "
    "it means."
)

_CURVES = {
    "tasks": "tasks requested (0: one plain forward of Hugging Face)",
    "batch": "images in the batch",
    "classes": "classes of each task",
    "memory tokens": "memory tokens of each task",
    "adapter rank": "LoRA rank of each task (0: none)",
    "tasks loaded": "tasks loaded, one of them requested (embedded backbone)",
    "adapters loaded": "tasks with LoRA of rank 8 loaded, four of them requested (embedded "
    "backbone)",
    "start-up": "tasks in the store, until `engram serve` is ready",
}


def number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Markdown; all columns but the first `left` are numbers."""
    rules = "".join(["|---"] * left + ["|---:"] * (len(columns) - left)) + "|"
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, *rows)]
    return "\n".join([lines[0], rules, *lines[1:]])


def short(value: float) -> str:
    """Three digits that mean something."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# --- sections -------------------------------------------------------------------------------------


def one_pass(rows: Sequence[Row]) -> str:
    names = ("over_one_forward", "over_dense_mask", "over_n_models", "adapters_over_none")
    cells = [
        [str(row["shape"]), str(row["batch"]), str(row["tasks"])]
        + [f"{number(row[name]):.3f}" for name in names]
        for row in rows
        if "shape" in row
    ]
    columns = ["shape", "batch", "tasks", "over one HF forward", "over the dense mask"]
    return table([*columns, "over N models", "with LoRA, over none"], cells)


def precisions(rows: Sequence[Row]) -> str:
    forms = ("plain", "packed", "int8")
    cells = [
        [str(row["shape"]), str(row["batch"]), str(row["tasks"])]
        + [f"{number(row[form]):.3f}" for form in forms]
        for row in rows
        if "batch" in row
    ]
    cells += [
        [f"{row['shape']}, cold over warm", "1", str(row["warm_tasks"])]
        + [f"{number(row[form]):.2f}" for form in forms]
        for row in rows
        if "warm_tasks" in row
    ]
    columns = ["shape", "images", "tasks", "plain matrices", "float32, as served", "int8"]
    return table(columns, cells)


def scale(rows: Sequence[Row]) -> str:
    parts = []
    for curve, meaning in _CURVES.items():
        found = [row for row in rows if row.get("curve") == curve]
        if found:
            cells = [
                [
                    f"{row['at']:,}",
                    short(1e3 * number(row["seconds"])),
                    f"{number(row['ratio']):.2f}",
                ]
                for row in found
            ]
            parts.append(table([meaning, "ms", "over the first"], cells))
    sizes = [
        [str(row["size"]), f"{number(row['bytes']) / 1e3:,.0f}"] for row in rows if "size" in row
    ]
    if sizes:
        parts.append(table(["in memory, ViT-B/32", "kB"], sizes))
    return "\n\n".join(parts)


def serving(rows: Sequence[Row]) -> str:
    cells = [
        [str(row["backbone"]), str(row["measure"]), f"{number(row['ratio']):.3f}"] for row in rows
    ]
    return table(["backbone", "measure", "ratio"], cells, left=2)


def front_end(rows: Sequence[Row]) -> str:
    cells = [
        [
            str(row["contender"]),
            str(row["shape"]),
            f"{number(row['requests_per_second']):,.0f}",
            f"{number(row['cpu_ms']):.2f}",
        ]
        for row in rows
    ]
    stages = [
        [str(row["shape"]), *(f"{row['stages_us'].get(stage, 0):.0f}" for stage in STAGES)]
        for row in rows
        if isinstance(row["stages_us"], dict) and row["stages_us"]
    ]
    rates = table(["server", "request", "requests/s", "CPU ms"], cells, left=2)
    return f"{rates}\n\n{table(['µs of CPU', *STAGES], stages)}"


_SPOILT = (
    "† Something else was using the machine: ours reached less than three quarters of its rate "
    "beside another peer. These figures count for little, also as ratios."
)


def peers(rows: Sequence[Row]) -> str:
    """Each peer, and ours beside it."""
    cells, failed = [], []
    spoilt = disturbed(rows)
    for row in rows:
        if "error" in row:
            failed.append(f"{row['beside']} could not be measured: {row['error']}.")
            continue
        itself = row["name"] == row["beside"]
        cells.append(
            [
                str(row["name"]) if itself else f"**{row['name']}**",
                f"{row['tasks']}{' †' * ((row['beside'], row['tasks']) in spoilt)}",
                short(number(row["rate"])),
                "" if itself else f"**{short(number(row['ratio']))}×**",
                short(1e3 * number(row["p50"])),
                short(1e3 * number(row["p99"])),
                "–" if row["memory"] is None else f"{number(row['memory']) / 1e9:.1f}",
                str(row["requests"]),
            ]
        )
    columns = ["server", "T", "requests/s", "over the peer", "p50 ms", "p99 ms", "memory GB"]
    notes = [textwrap.fill(_SPOILT, WIDTH)] if spoilt else []
    return "\n\n".join([table([*columns, "requests"], cells), *notes, *failed])


_SECTIONS: dict[str, tuple[str, str, Callable[[Sequence[Row]], str]]] = {
    "peers": (
        "Beside other servers (`benchmarks.peers`)",
        "T classifiers of a ViT-B/32 shape, every photo answered by all of them, eight clients "
        "over HTTP. Each peer is followed by ours, which took turns with it. *Memory* is that of "
        "the process and all its children, with shared memory counted once. With few requests the "
        "p99 is the slowest of them.",
        peers,
    ),
    "one_pass": (
        "One pass (`benchmarks.one_pass`)",
        "ViT-B shapes with random weights, five memory tokens a task, 224 px, float32.",
        one_pass,
    ),
    "precisions": (
        "Precisions (`benchmarks.one_pass --precisions`)",
        "The pass as a server on a CPU runs it, over one forward of Hugging Face in float32; "
        "below, how many times quicker one image is whose context is kept. "
        "[Precision](../explanation/precision.md) says what it means.",
        precisions,
    ),
    "scale": (
        "What grows with what (`benchmarks.scale`)",
        "ViT-B/32 shape, float32; 16 tasks of 5 memory tokens and 100 classes, 8 images, but for "
        "what a table varies.",
        scale,
    ),
    "serving": (
        "Serving (`benchmarks.serving`)",
        "`engram serve` and eight keep-alive clients on the same cores, JPEG bodies of 640×480, "
        "four tasks.",
        serving,
    ),
    "front_end": (
        "The front end (`benchmarks.front_end`)",
        "One process whose pass returns at once, and `wrk` with 16 connections on the same cores: "
        "the rest is HTTP, authentication, admission, decoding, queue and JSON. *CPU ms* is that "
        "of the server per request under load. Below, one request at a time by stage: the event "
        "loop's, and the threads *decode* and *worker*; reading the clocks is in it.",
        front_end,
    ),
}


def machine_line(machine: Mapping[str, object]) -> str:
    gigabytes = number(machine["memory"]) / 2**30
    return (
        f"*{machine['date']}, {machine['processor']}, {machine['cores']} cores, "
        f"{gigabytes:.0f} GiB, {machine['threads']} threads of torch on {machine['device']}; "
        f"Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}.*"
    )


def page(results: Mapping[str, Mapping[str, object]]) -> str:
    """The page of these results, by the name of their benchmark."""
    parts = ["# Performance", textwrap.fill(_HEAD, WIDTH)]
    for name, (title, meaning, section) in _SECTIONS.items():
        if name in results:
            machine, rows = results[name]["machine"], results[name]["rows"]
            assert isinstance(machine, Mapping)
            assert isinstance(rows, Sequence)
            parts += [
                f"## {title}",
                textwrap.fill(meaning, WIDTH),
                textwrap.fill(machine_line(machine), WIDTH),
                section(rows),
            ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    found = {
        name: json.loads(path.read_text())
        for name in _SECTIONS
        if (path := RESULTS / f"{name}.json").exists()
    }
    PAGE.write_text(page(found))
    print(f"written to {PAGE.name}: {', '.join(found)}")


if __name__ == "__main__":
    main()
