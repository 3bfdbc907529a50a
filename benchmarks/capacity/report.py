"""The tables of a run. Each says what was measured and what was computed from it."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from benchmarks.capacity.costs import Costs
from benchmarks.capacity.sizing import Held, Limit, Plan, Start, StoreLoad, Workload

MIB = 2**20
Row = Sequence[str]


def table(title: str, columns: Sequence[str], rows: Iterable[Row]) -> Table:
    """The first column is words, the others are figures."""
    result = Table(title=title)
    for number, column in enumerate(columns):
        result.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        result.add_row(*row)
    return result


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
        (f"choose what to evict, {many}, half resident", milliseconds(catalog.evict)),
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


def rates_table(name: str, workload: Workload, rows: Sequence[tuple[float, Plan]]) -> Table:
    cells = [
        (share(hits), f"{plan.most:.0f}", f"{plan.each:.0f}", f"{plan.replicas}")
        for hits, plan in rows
    ]
    columns = (
        "computed: contexts that are cached",
        "at most, a second",
        "planned, a second",
        f"replicas for {workload.rate:,.0f}, {workload.dead} to spare",
    )
    return table(f"{name}: requests a second of one replica", columns, cells)


def replica_table(name: str, memory: Sequence[Held], start: Start) -> Table:
    rows = [
        *((f"memory: {thing.what}", mebibytes(thing.nbytes)) for thing in memory),
        ("a start: reading the store and loading all tasks", f"{start.seconds:.0f} s"),
        ("the first start with a bucket: filling the folder of bundles", f"{start.filling:.0f} s"),
    ]
    return table(f"{name}: one replica", ("", "computed"), rows)


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
