"""The tables of a run. Each says what was measured and what was computed from it."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from benchmarks.capacity.costs import Costs
from benchmarks.capacity.fleet import Outcome
from benchmarks.capacity.sizing import Held, Limit, Plan, Question, Start, StoreLoad
from benchmarks.capacity.validation import Compared

MIB = 2**20
Row = Sequence[str]


def table(title: str, columns: Sequence[str], rows: Iterable[Row]) -> Table:
    """The first column is words, the others are figures."""
    found = Table(title=title)
    for number, column in enumerate(columns):
        found.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        found.add_row(*row)
    return found


def milliseconds(seconds: float) -> str:
    """Or seconds, where there are several."""
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def mebibytes(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f} MiB"


def share(value: float) -> str:
    return f"{100 * value:.1f} %"


def costs_table(costs: Costs) -> Table:
    passes, catalog = costs.passes, costs.catalog
    many = f"{catalog.tasks:,} tasks"
    rows = [
        ("a batch, whatever it holds", milliseconds(passes.batch)),
        ("+ if any image is cold", milliseconds(passes.cold)),
        (f"+ each cold image ({costs.shape.tokens} rows)", _of_image(costs)),
        ("rows a second of a batch that is all cold images", f"{1 / passes.base_row:,.0f}"),
        ("+ each warm image", milliseconds(passes.warm_image)),
        ("+ each task row (image and task)", milliseconds(passes.task_row)),
        ("+ each distinct task", milliseconds(passes.task)),
        ("error of that sum, half of the batches", f"≤ {share(passes.typical_error)}"),
        ("error of that sum, worst batch", share(passes.worst_error)),
        *((f"decode and resize {name}", milliseconds(s)) for name, s in costs.decode.items()),
        ("name an image by its bytes", milliseconds(costs.look_up)),
        ("event loop, a request over HTTP", milliseconds(costs.request)),
        ("event loop, a request without HTTP", milliseconds(costs.engine_request)),
        ("load a bundle at a start", milliseconds(costs.load)),
        ("bring a task back to the device", milliseconds(costs.reload)),
        (f"open a store of {many}, from a checkpoint", milliseconds(catalog.open_checkpoint)),
        (f"open a store of {many}, from the log", milliseconds(catalog.open_log)),
        (f"a poll that finds nothing, {many}", milliseconds(catalog.poll)),
        (f"take over a change, {many}", milliseconds(catalog.change)),
        (f"resolve the names of a request, {many}", milliseconds(catalog.resolve)),
        (f"choose whom to evict, {many}, half resident", milliseconds(catalog.evict)),
        (f"keep a bundle on the disk beside {many}", milliseconds(catalog.cache_put)),
        ("a version in the catalog in memory", f"{catalog.version_bytes:,.0f} B"),
        ("a bundle's file", mebibytes(costs.bundle_bytes)),
    ]
    title = (
        f"{costs.backbone}: measured on {costs.cores} cores of {costs.processor}, {costs.device}"
    )
    return table(title, ("", "measured"), rows)


def _of_image(costs: Costs) -> str:
    return milliseconds(costs.passes.base_row * costs.shape.tokens)


def sizes_table(costs: Costs) -> Table:
    rows = [
        (size.what, f"{size.measured:,} B", f"{size.computed:,} B")
        for size in (costs.task, costs.context, *costs.sizes)
    ]
    return table(f"{costs.backbone}: sizes in memory", ("", "measured", "computed"), rows)


def validation_table(name: str, compared: Sequence[Compared]) -> Table:
    rows = [
        (
            f"{each.rate:.0f} requests a second ({each.share:.0%}): {each.figure}",
            f"{each.measured:.3g}",
            f"{each.simulated:.3g}",
            f"{100 * each.deviation:+.0f} %",
        )
        for each in compared
    ]
    columns = ("one engine, open loop", "measured", "simulated", "deviation")
    return table(f"{name}: the simulation beside the real engine", columns, rows)


def curve_table(name: str, curve: Sequence[tuple[float, Outcome]], most: float) -> Table:
    rows = [
        (
            f"{each:.0%}: {each * most:.0f} requests a second",
            f"{outcome.rate:.0f}",
            milliseconds(outcome.percentile(50)),
            milliseconds(outcome.percentile(99)),
            share(outcome.refused_share),
            f"{outcome.batch_images:.1f}",
            share(outcome.busy),
        )
        for each, outcome in curve
    ]
    columns = ("computed", "answered", "p50", "p99", "429", "images a batch", "worker busy")
    return table(f"{name}: one replica, by load", columns, rows)


def rates_table(
    name: str, question: Question, rows: Sequence[tuple[str, float, float | None]]
) -> Table:
    p99 = milliseconds(question.p99)
    cells = [
        (
            label,
            f"{most:.0f}",
            "never" if each is None else f"{each:.0f}",
            "" if each is None else f"{-(-question.rate // each):.0f}",
        )
        for label, most, each in rows
    ]
    columns = (
        "computed: contexts that are there",
        "at most, a second",
        f"p99 ≤ {p99}, a second",
        f"replicas for {question.rate:,.0f}",
    )
    return table(f"{name}: requests a second of one replica", columns, cells)


def plan_table(
    name: str, question: Question, plan: Plan, memory: Sequence[Held], start: Start
) -> Table:
    steady, after = plan.steady, plan.with_dead
    rows = [
        (f"replicas for {question.rate:,.0f} requests a second", f"{plan.replicas}"),
        ("requests a second each", f"{question.rate / plan.replicas:.0f}"),
        ("simulated here", f"{plan.simulated} of them"),
        ("p50, p99", f"{_ms(steady, 50)}, {_ms(steady, 99)}"),
        ("429", share(steady.refused_share)),
        ("contexts that are there", share(steady.hit_rate)),
        ("images and rows a batch", f"{steady.batch_images:.1f}, {steady.batch_rows:.0f}"),
        ("worker busy", share(steady.busy)),
        ("cores busy", share(steady.cores_busy)),
        (f"with {plan.dead} more, of which {plan.dead} die: requests lost", f"{after.lost}"),
        ("p99 after that", milliseconds(after.percentile(99, plan.died_at))),
        ("429 after that", share(after.refused_share)),
        *((f"memory of a replica: {thing.what}", mebibytes(thing.nbytes)) for thing in memory),
        ("a start: reading the store and loading all tasks", f"{start.seconds:.0f} s"),
        ("the first start with a bucket: filling the folder of bundles", f"{start.filling:.0f} s"),
    ]
    return table(f"{name}: the fleet", ("", "computed"), rows)


def _ms(outcome: Outcome, which: float) -> str:
    return milliseconds(outcome.percentile(which))


def hits_table(name: str, what: str, rows: Sequence[tuple[int, int, float]], plural: str) -> Table:
    cells = [(mebibytes(size), f"{count:,}", share(hits)) for size, count, hits in rows]
    return table(f"{name}: {what}", ("computed", plural, "hits"), cells)


def store_table(name: str, loads: Sequence[StoreLoad], replicas: int) -> Table:
    cells = [
        (
            load.what,
            f"{load.requests:,.0f} {load.unit}",
            "" if load.most_replicas is None else f"{load.most_replicas:,.0f}",
        )
        for load in loads
    ]
    columns = ("computed", "requests", "replicas that S3's least promise allows")
    return table(f"{name}: what {replicas} replicas ask of the store", columns, cells)


def limits_table(name: str, limits: Sequence[Limit]) -> Table:
    cells = [(limit.what, share(limit.used), limit.metric, limit.setting) for limit in limits]
    columns = ("computed: what ends", "used", "seen by", "then")
    return table(f"{name}: what breaks first", columns, cells)
