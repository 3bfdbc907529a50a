"""The servers that people run, beside ours: `python -m benchmarks.peers --help`.

T = 1, 4, 16 classifiers of a ViT-B/32 shape with random weights, over HTTP, the same photos from
the same load generator. Each peer runs alone beside our server, and their phases take turns. The
first run makes an environment for each peer and calibrates OpenVINO's int8 model: some minutes.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from benchmarks.measure import write_results
from benchmarks.peers.contenders import PEERS
from benchmarks.peers.environments import python_of
from benchmarks.peers.measuring import Plan, Row, measure
from benchmarks.peers.prepared import prepare


def main(arguments: Sequence[str] | None = None) -> None:
    args = options().parse_args(arguments)
    # So that a run which is cut short ends the servers that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    peers = [peer for peer in PEERS if not args.only or peer.environment in args.only]
    for peer in peers:
        python_of(peer.environment)
    prepared = prepare()
    if args.prepare:
        return
    plan = Plan(rounds=1, seconds=0.0) if args.quick else Plan(rounds=2, seconds=args.seconds)
    console = Console()
    rows: list[dict[str, object]] = []
    for peer, result in zip(peers, measure(prepared, peers, plan), strict=True):
        if isinstance(result, str):
            console.print(f"{peer.name} could not be measured: {result}")
            rows.append({"beside": peer.name, "error": result})
        else:
            console.print(show(result))
            rows += [asdict(row) for row in result]
        write_results("peers", rows)  # after each: what was measured is not lost


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="one round, one photo of each client")
    add("--prepare", action="store_true", help="make environments and models, measure nothing")
    add("--seconds", type=float, default=2.0, help="of a phase")
    names = sorted({peer.environment for peer in PEERS})
    add("--only", action="append", choices=names, help="these peers alone")
    return parser


def show(rows: Sequence[Row]) -> Table:
    table = Table(title=f"Beside {rows[0].beside}")
    for column in ("server", "T", "requests/s", "p50 s", "p99 s", "memory GB", "over the peer"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.tasks),
            f"{row.rate:.2f}",
            f"{row.p50:.2f}",
            f"{row.p99:.2f}",
            f"{row.memory / 1e9:.1f}",
            f"{row.ratio:.2f}",
        )
    return table


if __name__ == "__main__":
    main()
