"""How much one server does, and how many it takes: `python -m benchmarks.capacity --help`.

Measures what things cost on this machine, with the embedded backbone and a ViT-B/32 of random
weights, and simulates a fleet on those costs. The settings of the simulated servers are those of
the server: the same ENGRAM_ variables are read. On a machine of another kind:

    python -m benchmarks.capacity --device cuda:0 --backbone NAME --write-costs costs.json
    python -m benchmarks.capacity --costs costs.json --rate 10000 --tasks 10000 --p99-ms 100
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from benchmarks.capacity import report, sizing
from benchmarks.capacity.costs import CatalogCosts, Costs, as_json, read_costs, write_costs
from benchmarks.capacity.fleet import Model, Outcome
from benchmarks.capacity.many_tasks import measure_many_tasks
from benchmarks.capacity.measuring import PHOTOS, USUAL, measure, open_bench, run_engine
from benchmarks.capacity.sizing import Question
from benchmarks.capacity.traffic import Mix
from benchmarks.capacity.validation import Compared, model_of_engine, validate
from benchmarks.measure import write_results
from benchmarks.serving import random_vit
from server.embedded import BACKBONE
from server.model import Backbone, load_backbone
from server.settings import Settings, load_settings

RANDOM = "ViT-B/32"
Json = dict[str, object]


def main(arguments: Sequence[str] | None = None) -> None:
    given = options().parse_args(arguments)
    console = Console()
    settings = load_settings(devices=given.device)
    question = question_of(given)
    measured: list[tuple[Costs, list[Compared]]]
    if given.costs is None:
        measured = measure_all(given, settings)
    else:
        measured = [(costs, []) for costs in read_costs(given.costs)]
    if given.write_costs is not None:
        write_costs(given.write_costs, [costs for costs, _ in measured])
    rows = []
    for costs, compared in measured:
        rows.append(answer(costs, compared, settings, question, console))
    name = "capacity" if given.costs is None else f"capacity_{given.costs.stem}"
    device = measured[0][0].device
    console.print(f"written to {write_results(name, rows, device=device).name}")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--backbone", action="append", help=f"a folder or name; {RANDOM} has random weights")
    add("--device", help="where to measure: cpu, cuda:0")
    add("--seconds", type=float, default=12.0, help="of each load that the engine is given")
    add("--costs", type=Path, help="simulate on these costs and measure nothing")
    add("--write-costs", type=Path, help="where to write the costs measured")
    add("--rate", type=float, default=10_000.0, help="requests a second of the fleet")
    add("--p99-ms", type=float, default=250.0, help="99 of 100 requests are to be quicker")
    add("--tasks", type=int, default=10_000, help="tasks in the store")
    add("--tasks-per-request", type=float, default=4.0, help="on average, at least 1")
    add("--task-skew", type=float, default=1.0, help="exponent of their popularity (Zipf)")
    add("--images", type=int, default=1_000_000, help="different images that are sent")
    add("--image-skew", type=float, default=0.8, help="exponent of their popularity (Zipf)")
    add("--hit-rate", type=float, help="share of images with a context, whatever the cache")
    add("--photo", choices=list(PHOTOS), default=USUAL, help="size of the images")
    add("--routing", choices=("least", "image"), default="least", help="of the proxy")
    add("--dead", type=int, default=1, help="replicas that may be lost at once")
    add("--publishes", type=float, default=60.0, help="publishes an hour")
    add("--requests", type=int, default=16_000, help="in each simulation")
    add("--seed", type=int, default=0)
    return parser


def question_of(given: argparse.Namespace) -> Question:
    mix = Mix(
        tasks=given.tasks,
        task_skew=given.task_skew,
        tasks_per_request=given.tasks_per_request,
        images=given.images,
        image_skew=given.image_skew,
        hit_rate=given.hit_rate,
    )
    return Question(
        rate=given.rate,
        mix=mix,
        p99=given.p99_ms / 1000,
        photo=given.photo,
        routing=given.routing,
        dead=given.dead,
        publishes=given.publishes,
        requests=given.requests,
        seed=given.seed,
    )


# --- measuring ------------------------------------------------------------------------------------


def measure_all(
    given: argparse.Namespace, settings: Settings
) -> list[tuple[Costs, list[Compared]]]:
    catalog = measure_many_tasks(load_backbone(BACKBONE), given.tasks, 0.2 * given.seconds)
    names = given.backbone or [str(BACKBONE), RANDOM]
    return [measure_one(named(name), settings, catalog, given) for name in names]


def named(name: str) -> Backbone:
    if name != RANDOM:
        return load_backbone(name)
    with tempfile.TemporaryDirectory() as folder:
        return replace(load_backbone(random_vit(Path(folder))), name=f"{RANDOM}, random weights")


def measure_one(
    backbone: Backbone, settings: Settings, catalog: CatalogCosts, given: argparse.Namespace
) -> tuple[Costs, list[Compared]]:
    with run_engine(backbone, settings) as running, open_bench(running) as bench:
        costs = measure(running, settings, catalog, 0.2 * given.seconds)
        model = model_of_engine(sizing.model_of(costs, settings, USUAL), costs, running)
        compared, passes = validate(running, bench, model, given.seconds, given.seed)
        return replace(costs, passes=passes), compared


# --- answering ------------------------------------------------------------------------------------


def answer(
    costs: Costs,
    compared: Sequence[Compared],
    settings: Settings,
    question: Question,
    console: Console,
) -> Json:
    """Print the tables of one backbone; the same figures for the file."""
    name = costs.backbone
    model = sizing.model_of(costs, settings, question.photo)
    console.print(report.costs_table(costs), report.sizes_table(costs))
    if compared:
        console.print(report.validation_table(name, compared))
    traffic = sizing.traffic_for(model, question, 1)
    most = sizing.saturation(model, traffic)
    curve = sizing.load_curve(model, traffic, most)
    console.print(report.curve_table(name, curve, most))
    contexts = sizing.context_hits(model, question.mix, question.seed)
    tasks = sizing.task_hits(model, question.mix, question.requests, question.seed)
    console.print(report.hits_table(name, "contexts by cache", contexts, "contexts"))
    console.print(report.hits_table(name, "tasks by device memory", tasks, "tasks"))
    return {
        "backbone": name,
        "question": asdict(question),
        "costs": as_json(costs),
        "validation": [{**asdict(each), "deviation": each.deviation} for each in compared],
        "saturation": most,
        "curve": [{"share": share, **outcome_json(outcome)} for share, outcome in curve],
        "contexts": [dict(zip(("bytes", "held", "hits"), row, strict=True)) for row in contexts],
        "tasks": [dict(zip(("bytes", "held", "hits"), row, strict=True)) for row in tasks],
        **fleet_answer(costs, settings, question, model, most, console),
    }


def fleet_answer(
    costs: Costs,
    settings: Settings,
    question: Question,
    model: Model,
    most: float,
    console: Console,
) -> Json:
    name = costs.backbone
    rates = rates_by_hits(model, question)
    found = sizing.plan(model, question, most)
    label = "as drawn" if question.mix.hit_rate is None else f"{question.mix.hit_rate:.0%}"
    rates.append((label, most, None if found is None else found.each))
    console.print(report.rates_table(name, question, rates))
    answers: Json = {"rates": rates}
    if found is None:
        console.print(f"{name}: p99 is above {1000 * question.p99:.0f} ms even without load.")
        return answers
    memory = sizing.held(costs, settings, question.mix.tasks)
    store = sizing.store_load(costs, settings, found.replicas)
    start = sizing.start_of(costs, question.mix.tasks)
    limits = sizing.limits(costs, settings, question, model, found)
    console.print(
        report.plan_table(name, question, found, memory, start),
        report.store_table(name, store, found.replicas),
        report.limits_table(name, limits),
    )
    after = outcome_json(found.with_dead, since=found.died_at)
    return {
        **answers,
        "plan": {
            "replicas": found.replicas,
            "simulated": found.simulated,
            "each": found.each,
            **outcome_json(found.steady),
        },
        "death": {"dead": found.dead, **after},
        "start": asdict(start),
        "memory": [asdict(thing) for thing in memory],
        "store": [asdict(load) for load in store],
        "limits": [asdict(limit) for limit in limits],
    }


def rates_by_hits(model: Model, question: Question) -> list[tuple[str, float, float | None]]:
    """What one replica can do, by the share of images whose context is there."""
    found: list[tuple[str, float, float | None]] = []
    for hits in sizing.HIT_RATES:
        asked = replace(question, mix=replace(question.mix, hit_rate=hits))
        most = sizing.saturation(model, sizing.traffic_for(model, asked, 1))
        traffic = sizing.traffic_for(model, asked, sizing.CELL)
        each = sizing.best_rate(model, traffic, question.p99, most, sizing.CELL, question.routing)
        found.append((f"{hits:.0%}", most, each))
    return found


def outcome_json(outcome: Outcome, since: float = 0.0) -> Json:
    """An outcome without its single requests; percentiles of those that came since a time."""
    left_out = ("times", "seconds")
    plain = {name: getattr(outcome, name) for name in Outcome.__slots__ if name not in left_out}
    return {**plain, **{f"p{one}": outcome.percentile(one, since) for one in (50, 95, 99)}}


if __name__ == "__main__":
    main()
