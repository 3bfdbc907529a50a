"""Draws the pictures of docs/explanation/architecture.md.

python scripts/draw_architecture.py docs/images

The map of packages is made from the import graph: what is in a room, and which room uses which. The
ways of a request are written down here, as steps: the thread, the file, and what it does there.
"""

import argparse
import itertools
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import grimp

PACKAGES = ("server", "task_store", "training", "engram_client")
INK, PALE, LINE, PAPER = "#1f2933", "#52606d", "#7b8794", "#ffffff"
COLOURS = {
    "server": "#e3f0fb",
    "model": "#d9f2e6",
    "store": "#fdf0d5",
    "training": "#efe5fa",
    "client": "#fbe4e6",
}
STYLE = 'font-family="system-ui, sans-serif" font-size="13"'


# --- the map of packages --------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """A part of the code that is understood alone. `modules` are those, and all below them."""

    title: str
    purpose: str
    modules: tuple[str, ...]
    colour: str
    column: int
    row: int


ROOMS = (
    Room(
        "server: start",
        "From settings to a running server.",
        (
            "server.cli",
            "server.audit_cli",
            "server.backbone_cli",
            "server.keys_cli",
            "server.zero_shot_cli",
            "server.connections",
            "server.app",
            "server.ray_app",
        ),
        "server",
        0,
        0,
    ),
    Room(
        "server/api/",
        "HTTP: one module a resource. Parse, call the engine, format.",
        ("server.api",),
        "server",
        0,
        1,
    ),
    Room(
        "server: state",
        "What all parts of one running server share.",
        (
            "server.runtime",
            "server.settings",
            "server.keys",
            "server.identity",
            "server.quota",
            "server.metrics",
            "server.tracing",
            "server.logs",
            "server.audit",
            "server.addresses",
            "server.oidc",
        ),
        "server",
        0,
        2,
    ),
    Room(
        "server/engine/",
        "Admission, queue, workers; which tasks are served. No HTTP.",
        ("server.engine",),
        "server",
        0,
        3,
    ),
    Room(
        "server/model/",
        "The backbone, the tasks and the masked pass. Torch, and no store.",
        ("server.model",),
        "model",
        0,
        4,
    ),
    Room(
        "training/",
        "From a folder of images to a bundle and a report.",
        ("training",),
        "training",
        1,
        0,
    ),
    Room(
        "clients/python/engram_client/",
        "The client and the engram command. Stands alone.",
        ("engram_client",),
        "client",
        1,
        1,
    ),
    Room(
        "server/embedded/",
        "The embedded backbone and the demo tasks.",
        ("server.embedded",),
        "server",
        1,
        2,
    ),
    Room(
        "task_store/",
        "Bundles, versions, labels and the log, on any object store. No torch.",
        ("task_store",),
        "store",
        1,
        3,
    ),
)
# Every room may use these, so they are in no room and have no arrows.
KNOWN_TO_ALL = ("server.errors",)


def import_graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)


def room_of(module: str) -> Room | None:
    """None for the packages themselves, and for what every room may use."""
    for room in ROOMS:
        if any(module == part or module.startswith(f"{part}.") for part in room.modules):
            return room
    return None


def uses(graph: grimp.ImportGraph) -> set[tuple[Room, Room]]:
    """Which room imports which."""
    pairs = set()
    for module in graph.modules:
        source = room_of(module)
        for imported in graph.find_modules_directly_imported_by(module):
            target = room_of(imported)
            if source is not None and target is not None and source != target:
                pairs.add((source, target))
    return pairs


def without_detours(pairs: set[tuple[Room, Room]]) -> set[tuple[Room, Room]]:
    """Only the pairs that do not follow from others: a map of all would be a tangle."""

    def reaches(start: Room, end: Room, without: tuple[Room, Room]) -> bool:
        following = [pair[1] for pair in pairs if pair[0] == start and pair != without]
        return any(one == end or reaches(one, end, without) for one in following)

    return {pair for pair in pairs if not reaches(*pair, without=pair)}


def contents(graph: grimp.ImportGraph, room: Room) -> str:
    """The files of a room: `engine, queue, tasks/ (follower, loader), worker`."""
    modules = sorted(module for module in graph.modules if room_of(module) == room)
    return ", ".join(_entries(modules, room.modules))


def _entries(modules: Sequence[str], parents: Sequence[str]) -> Iterator[str]:
    single = [module for module in parents if not _below(modules, module)]
    yield from (module.rpartition(".")[2] for module in single)
    for parent in (module for module in parents if module not in single):
        for module in _children(modules, parent):
            name = module.rpartition(".")[2]
            inner = [child.rpartition(".")[2] for child in _children(modules, module)]
            yield f"{name}/ ({', '.join(inner)})" if inner else name


def _below(modules: Iterable[str], parent: str) -> bool:
    return any(module.startswith(f"{parent}.") for module in modules)


def _children(modules: Iterable[str], parent: str) -> list[str]:
    return [module for module in modules if module.rpartition(".")[0] == parent]


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


WIDTHS, GUTTER, MARGIN, GAP = (430, 400), 110, 16, 34


def draw_packages(graph: grimp.ImportGraph) -> str:
    lines = {room: _room_lines(graph, room) for room in ROOMS}
    boxes = _place(lines)
    width = MARGIN * 2 + sum(WIDTHS) + GUTTER
    height = max(box.y + box.height for box in boxes.values()) + MARGIN
    parts = [*_arrows(boxes, without_detours(uses(graph)))]
    for room, box in boxes.items():
        parts += _draw_box(box, COLOURS[room.colour], lines[room])
    return _svg("The packages, and which of them uses which", width, height, parts)


def _room_lines(graph: grimp.ImportGraph, room: Room) -> list[tuple[str, str]]:
    """Kind and text of each line in a room's box."""
    columns = WIDTHS[room.column] * 10 // 68
    return [
        ("title", room.title),
        *(("purpose", line) for line in textwrap.wrap(room.purpose, columns)),
        *(("files", line) for line in textwrap.wrap(contents(graph, room), columns)),
    ]


def _place(lines: Mapping[Room, Sequence[object]]) -> dict[Room, Box]:
    boxes = {}
    tops: list[float] = [MARGIN, MARGIN]
    heights = {room: 20 + 17 * len(text) for room, text in lines.items()}
    tallest = max(
        sum(heights[room] + GAP for room in ROOMS if room.column == column) for column in (0, 1)
    )
    for column in (0, 1):
        rooms = [room for room in ROOMS if room.column == column]
        spare = tallest - sum(heights[room] + GAP for room in rooms)
        gap = GAP + spare / max(len(rooms) - 1, 1)
        for room in sorted(rooms, key=lambda each: each.row):
            x = MARGIN + (WIDTHS[0] + GUTTER) * column
            boxes[room] = Box(x, tops[column], WIDTHS[column], heights[room])
            tops[column] += heights[room] + gap
    return boxes


def _arrows(boxes: Mapping[Room, Box], pairs: set[tuple[Room, Room]]) -> Iterator[str]:
    ordered = sorted(pairs, key=lambda pair: (pair[0].title, pair[1].title))
    through_gutter = [pair for pair in ordered if not _neighbours(*pair)]
    for source, target in ordered:
        start, end = boxes[source], boxes[target]
        if _neighbours(source, target):
            yield _arrow([(start.middle, start.y + start.height), (start.middle, end.y)])
            continue
        lane = through_gutter.index((source, target))
        x = MARGIN + WIDTHS[0] + GUTTER * (lane + 1) / (len(through_gutter) + 1)
        yield _arrow(
            [
                (_edge(start, x), _port(start, lane)),
                (x, _port(start, lane)),
                (x, _port(end, lane)),
                (_edge(end, x), _port(end, lane)),
            ]
        )


def _neighbours(source: Room, target: Room) -> bool:
    return source.column == target.column and target.row == source.row + 1


def _edge(box: Box, x: float) -> float:
    return box.x + box.width if x > box.middle else box.x


def _port(box: Box, lane: int) -> float:
    return box.y + 20 + (11 * lane) % (box.height - 30)


# --- the way of a request -------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    lane: int
    file: str  # a path, or what is no file of ours
    text: str


@dataclass(frozen=True)
class Flow:
    title: str
    lanes: tuple[str, ...]
    steps: tuple[Step, ...]


PREDICTION = Flow(
    "One prediction",
    ("event loop", "decoding threads", "worker thread of the device"),
    (
        Step(0, "server/api/middleware.py", "request id, access log, metrics, trace"),
        Step(0, "server/api/auth.py", "the key"),
        Step(0, "server/api/predict.py", "query, headers and body become a PredictRequest"),
        Step(0, "server/engine/engine.py", "admission: room for the images, or 429 at once"),
        Step(0, "server/engine/tasks/snapshot.py", "references to versions, of one generation"),
        Step(0, "server/engine/tasks/loader.py", "versions to tasks on the device"),
        Step(1, "server/model/preprocessing/pipeline.py", "decode, resize, crop; or it is cached"),
        Step(0, "server/engine/queue.py", "the image waits for a batch"),
        Step(2, "server/engine/worker.py", "takes a batch, cached images and new ones mixed"),
        Step(2, "server/model/rows.py", "one row for each image token and (image, task) pair"),
        Step(2, "server/model/masked_pass.py", "one pass for all rows; contexts to the cache"),
        Step(0, "server/engine/engine.py", "logits of each image and task, timings"),
        Step(0, "server/engine/types.py", "logits to scores, the best first"),
        Step(0, "server/api/predict.py", "the answer as JSON"),
    ),
)

PUBLISH = Flow(
    "One publish",
    ("event loop", "change thread, one at a time", "worker thread of the device"),
    (
        Step(0, "server/api/tasks.py", "PUT /tasks/{task}: key, If-Match, body to a file"),
        Step(1, "task_store/bundle.py", "parsed and checked, once"),
        Step(1, "server/engine/tasks/changes.py", "does it fit this backbone and its parents?"),
        Step(1, "server/engine/tasks/loader.py", "prepared, once: keys and values of memory"),
        Step(2, "server/engine/worker.py", "its golden examples, among the traffic"),
        Step(1, "task_store/changes.py", "Publish.plan(catalog) under the condition: an event"),
        Step(1, "task_store/store.py", "puts the blob, creates the log entry only if absent"),
        Step(1, "server/engine/tasks/follower.py", "reads the log up to it"),
        Step(1, "server/engine/tasks/loader.py", "takes what was prepared"),
        Step(1, "server/engine/tasks/snapshot.py", "the new snapshot replaces the old one"),
        Step(0, "server/api/tasks.py", "201: it is being served"),
    ),
)

POLL = Flow(
    "One poll",
    ("follower thread", "loading threads", "worker thread of the device"),
    (
        Step(0, "server/engine/tasks/follower.py", "every ENGRAM_POLL_SECONDS"),
        Step(0, "task_store/store.py", "reads log/<generation + 1>.json; usually there is none"),
        Step(0, "task_store/events.py", "the entry, by its kind"),
        Step(0, "task_store/catalog.py", "a new catalog, with the entry applied"),
        Step(0, "server/engine/tasks/follower.py", "a slot for each bundle, by its digest"),
        Step(1, "server/engine/tasks/loader.py", "reads the bundle, or marks it as failed"),
        Step(1, "server/engine/tasks/loader.py", "binds it to the backbone on every device"),
        Step(2, "server/engine/worker.py", "its golden examples, among the traffic"),
        Step(1, "server/engine/tasks/slots.py", "within the memory for tasks"),
        Step(0, "server/engine/tasks/snapshot.py", "the new snapshot replaces the old one"),
        Step(0, "server/engine/replicas.py", "wakes the heartbeat thread: others see it at once"),
    ),
)

TRAINING = Flow(
    "One training run",
    ("main thread", "reading threads", "files written"),
    (
        Step(0, "training/commands/train.py", "options of the command line"),
        Step(0, "training/run.py", "fit: read, train, judge, write"),
        Step(0, "training/data/dataset.py", "folders or tables: paths and labels"),
        Step(0, "training/data/dataset.py", "train, val, test"),
        Step(1, "training/data/images.py", "every image decoded once"),
        Step(0, "training/fitting/variants.py", "all candidates as tasks of one pass"),
        Step(0, "training/data/contexts.py", "contexts, kept where images do not vary"),
        Step(0, "training/fitting/loop.py", "steps, validation after each epoch"),
        Step(0, "server/model/masked_pass.py", "the pass that the server runs"),
        Step(2, "training/fitting/checkpoint.py", "every 20 seconds"),
        Step(0, "training/judging/evaluation.py", "the best variant, on test images"),
        Step(0, "training/bundles.py", "tensors, manifest, golden examples"),
        Step(0, "training/judging/report.py", "the page"),
        Step(2, "training/run.py", "bundle and report, whole or not at all"),
    ),
)

FLOWS = {"predict": PREDICTION, "publish": PUBLISH, "poll": POLL, "train": TRAINING}

LANE, BETWEEN, TOP, PAD, TEXT_WIDTH = 304, 24, 62, 8, 42


def draw_flow(flow: Flow) -> str:
    boxes = _stack(flow.steps)
    width = MARGIN * 2 + LANE * len(flow.lanes)
    height = boxes[-1].y + boxes[-1].height + MARGIN
    parts = [_text(MARGIN, 18, flow.title, "heading")]
    for number, lane in enumerate(flow.lanes):
        x = MARGIN + LANE * number
        parts.append(
            f'<rect x="{x + 2}" y="28" width="{LANE - 4}" height="{height - 34:g}" rx="6" '
            f'fill="#f5f7fa"/>'
        )
        parts.append(_text(x + LANE / 2, 47, lane, "lane", "middle"))
    for start, end in itertools.pairwise(boxes):
        parts.append(_arrow(_between(start, end)))
    for box, step in zip(boxes, flow.steps, strict=True):
        parts += _draw_box(box, COLOURS[_kind(step.file)], _step_lines(step))
    return _svg(flow.title, width, height, parts)


def _step_lines(step: Step) -> list[tuple[str, str]]:
    text = textwrap.wrap(step.text, TEXT_WIDTH)
    return [("file", step.file), *(("text", line) for line in text)]


def _stack(steps: Sequence[Step]) -> list[Box]:
    """One below the other, each in its lane."""
    boxes: list[Box] = []
    y = float(TOP)
    for step in steps:
        height = 8 + 15 * len(_step_lines(step))
        boxes.append(Box(MARGIN + LANE * step.lane + PAD, y, LANE - 2 * PAD, height))
        y += height + BETWEEN
    return boxes


def _between(start: Box, end: Box) -> list[tuple[float, float]]:
    if start.x == end.x:
        return [(start.middle, start.y + start.height), (end.middle, end.y)]
    side = start.x + start.width if end.x > start.x else start.x
    y = start.y + start.height / 2
    return [(side, y), (end.middle, y), (end.middle, end.y)]


def _kind(file: str) -> str:
    for start, kind in (
        ("server/model/", "model"),
        ("task_store/", "store"),
        ("training/", "training"),
        ("clients/", "client"),
    ):
        if file.startswith(start):
            return kind
    return "server"


# --- SVG ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Type:
    """How a line of text looks."""

    weight: int = 400
    size: int = 13
    fill: str = INK


TYPES = {
    "title": Type(weight=600, size=14),
    "purpose": Type(),
    "files": Type(size=12, fill=PALE),
    "file": Type(weight=600, size=12),
    "text": Type(size=12, fill=PALE),
    "lane": Type(weight=600, fill=PALE),
    "heading": Type(weight=600, size=15),
}


def _draw_box(box: Box, colour: str, lines: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield (
        f'<rect x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="6" '
        f'fill="{colour}" stroke="{LINE}"/>'
    )
    step = 17 if lines[0][0] == "title" else 15
    for number, (kind, text) in enumerate(lines):
        y = box.y + (22 if step == 17 else 16) + step * number
        yield _text(box.x + 10, y, text, kind)


def _arrow(points: Sequence[tuple[float, float]]) -> str:
    path = " L".join(f"{x:g} {y:g}" for x, y in points)
    return (
        f'<path d="M{path}" fill="none" stroke="{LINE}" stroke-width="1.5" marker-end="url(#a)"/>'
    )


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    look = TYPES[kind]
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{look.size}" font-weight="{look.weight}" '
        f'fill="{look.fill}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _svg(title: str, width: float, height: float, parts: Iterable[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img" {STYLE} fill="{INK}">\n'
        f"<title>{escape(title)}</title>\n"
        f'<defs><marker id="a" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker>'
        f'</defs>\n<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def draw_all() -> dict[str, str]:
    """All pictures, by the name of their file."""
    pictures = {f"architecture-{name}.svg": draw_flow(flow) for name, flow in FLOWS.items()}
    return {"architecture-packages.svg": draw_packages(import_graph()), **pictures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where to write the pictures: docs/images")
    folder = parser.parse_args().folder
    for name, picture in draw_all().items():
        (folder / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
