"""How much one server does, and how many it takes: `python -m benchmarks.capacity --help`.

Measures what things cost on this machine, with the embedded backbone and a ViT-B/32 of random
weights, and sizes a fleet by arithmetic on those costs. The replicas have the settings of the
server: the same ENGRAM_ variables are read. On a machine of another kind:

    python -m benchmarks.capacity --device cuda:0 --backbone NAME --write-costs costs.json
    python -m benchmarks.capacity --costs costs.json --rate 10000 --tasks 10000
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from engram_server.embedded import BACKBONE
from engram_server.model import Backbone, load_backbone
from engram_server.settings import Settings, load_settings
from rich.console import Console

from benchmarks.capacity import report, sizing
from benchmarks.capacity.costs import CatalogCosts, Costs, as_json, read_costs, write_costs
from benchmarks.capacity.many_tasks import measure_many_tasks
from benchmarks.capacity.measuring import PHOTOS, USUAL, measure, open_bench, run_engine
from benchmarks.capacity.sizing import Workload
from benchmarks.measure import write_results
from benchmarks.serving import random_vit

RANDOM = "ViT-B/32"
Json = dict[str, object]


def main(arguments: Sequence[str] | None = None) -> None:
    args = options().parse_args(arguments)
    console = Console()
    settings = load_settings(devices=args.device)
    measured = measure_all(args, settings) if args.costs is None else read_costs(args.costs)
    if args.write_costs is not None:
        write_costs(args.write_costs, measured)
    rows = [answer(costs, settings, workload_of(args), console) for costs in measured]
    name = "capacity" if args.costs is None else f"capacity_{args.costs.stem}"
    console.print(f"written to {write_results(name, rows, device=measured[0].device).name}")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--backbone", action="append", help=f"a folder or name; {RANDOM} has random weights")
    add("--device", help="where to measure: cpu, cuda:0")
    add("--seconds", type=float, default=12.0, help="for measuring batches")
    add("--costs", type=Path, help="compute with these costs and measure nothing")
    add("--write-costs", type=Path, help="where to write the costs measured")
    add("--rate", type=float, default=10_000.0, help="requests a second of the fleet")
    add("--tasks", type=int, default=10_000, help="tasks in the store")
    add("--tasks-per-request", type=float, default=4.0, help="on average")
    add("--hit-rate", type=float, default=0.0, help="share of images whose context is cached")
    add("--photo", choices=list(PHOTOS), default=USUAL, help="size of the images")
    add("--dead", type=int, default=1, help="replicas that may be lost at once")
    add("--publishes", type=float, default=60.0, help="publishes an hour")
    return parser


def workload_of(args: argparse.Namespace) -> Workload:
    return Workload(
        rate=args.rate,
        tasks=args.tasks,
        tasks_per_request=args.tasks_per_request,
        hit_rate=args.hit_rate,
        photo=args.photo,
        dead=args.dead,
        publishes=args.publishes,
    )


# --- measuring ------------------------------------------------------------------------------------


def measure_all(args: argparse.Namespace, settings: Settings) -> list[Costs]:
    catalog = measure_many_tasks(load_backbone(BACKBONE), args.tasks, 0.2 * args.seconds)
    names = args.backbone or [str(BACKBONE), RANDOM]
    return [measure_one(named(name), settings, catalog, args.seconds) for name in names]


def named(name: str) -> Backbone:
    if name != RANDOM:
        return load_backbone(name)
    with tempfile.TemporaryDirectory() as folder:
        return replace(load_backbone(random_vit(Path(folder))), name=f"{RANDOM}, random weights")


def measure_one(
    backbone: Backbone, settings: Settings, catalog: CatalogCosts, seconds: float
) -> Costs:
    with run_engine(backbone, settings) as running, open_bench(running) as bench:
        costs = measure(running, settings, catalog, 0.2 * seconds)
        return replace(costs, passes=bench.fit([bench.measure(seconds)]))


# --- answering ------------------------------------------------------------------------------------


def answer(costs: Costs, settings: Settings, workload: Workload, console: Console) -> Json:
    """Print the tables of one backbone; the same figures for the file."""
    name = costs.backbone
    cost = sizing.request_cost(costs, settings, workload)
    plan = sizing.plan(cost, workload)
    rates = [
        (hits, sizing.plan(sizing.request_cost(costs, settings, other), other))
        for hits in sorted({*sizing.HIT_RATES, workload.hit_rate})
        for other in [replace(workload, hit_rate=hits)]
    ]
    memory = sizing.held(costs, settings, workload.tasks)
    start = sizing.start_of(costs, workload.tasks)
    store = sizing.store_load(costs, settings, plan.replicas)
    limits = sizing.limits(costs, settings, workload, cost, plan.replicas)
    console.print(
        report.costs_table(costs),
        report.sizes_table(costs),
        report.rates_table(name, workload, rates),
        report.replica_table(name, memory, start),
        report.store_table(name, store, plan.replicas),
        report.limits_table(name, limits),
    )
    return {
        "backbone": name,
        "workload": asdict(workload),
        "costs": as_json(costs),
        "request": asdict(cost),
        "plan": asdict(plan),
        "rates": [{"hit_rate": hits, **asdict(one)} for hits, one in rates],
        "start": asdict(start),
        "memory": [asdict(thing) for thing in memory],
        "store": [asdict(load) for load in store],
        "limits": [asdict(limit) for limit in limits],
    }


if __name__ == "__main__":
    main()
