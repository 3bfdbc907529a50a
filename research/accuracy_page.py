"""docs/explanation/accuracy.md and its chart, from the results of `research.accuracy`."""

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from research.accuracy_sets import ImageCollection
from server import embedded
from server.model import load_backbone
from training.bundles import write_whole
from training.fitting.variants import Variant, Variants
from training.judging.cost import cost_of

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "explanation" / "accuracy.md"
CHART = REPOSITORY / "docs" / "images" / "accuracy.svg"

# In the order of the tables. Of the two heads and the two optimisers of memory the better is taken.
METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "head": ("head", "LDA"),
    "logistic regression": ("logistic regression", "logistic regression, class token"),
    "attentive probe": ("attentive probe",),
    "memory": ("memory",),
    "adapter": ("adapter",),
    "memory and adapter": ("memory and adapter",),
    "full fine-tuning": ("full fine-tuning",),
}
DEFAULT = "default"
COMPETING = ("head", "memory", "adapter")  # what `engram train` compares unless told
OPTIMISERS: Final = (("memory", "memory, AdamW"), ("adapter, SGD", "adapter"))
Bits = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two methods on the same test images, in points, with its 95 % interval."""

    points: float
    margin: float

    @classmethod
    def of(cls, one: Bits, other: Bits) -> "Difference":
        """The adjusted Wald interval: as if one more image was right with each of them alone."""
        apart = one - other
        count = len(apart) + 2
        spread = (float(np.square(apart).sum()) + 2) / count - (float(apart.sum()) / count) ** 2
        return cls(100 * float(apart.mean()), 100 * 1.96 * math.sqrt(spread / count))

    def __str__(self) -> str:
        return f"{self.points:+.1f} ± {self.margin:.1f}"


@dataclass(frozen=True, slots=True)
class Row:
    """One set at one number of training images: all seeds, test images side by side."""

    name: str
    train: int
    classes: int
    seeds: tuple[int, ...]
    right: dict[str, Bits]  # by method
    chosen: tuple[str, ...]  # what the default chose, by seed

    def accuracy(self, method: str) -> float | None:
        return 100 * float(self.right[method].mean()) if method in self.right else None

    def over(self, one: str, other: str) -> Difference | None:
        if one not in self.right or other not in self.right:
            return None
        if len(self.right[one]) != len(self.right[other]):
            return None  # not of the same seeds
        return Difference.of(self.right[one], self.right[other])


def read(results: Path) -> list[Row]:
    cells = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    found: dict[tuple[str, int], dict[int, list[dict[str, Any]]]] = {}
    classes: dict[str, int] = {}
    for cell in cells:
        classes[cell["set"]] = cell["classes"]
        seeds = found.setdefault((cell["set"], cell["train"]), {})
        seeds.setdefault(cell["seed"], []).extend(cell["runs"])
    return [
        _row(name, train, classes[name], seeds) for (name, train), seeds in sorted(found.items())
    ]


def _row(name: str, train: int, classes: int, seeds: Mapping[int, Sequence[dict[str, Any]]]) -> Row:
    right: dict[str, list[Bits]] = {}
    chosen: list[str] = []
    for _, runs in sorted(seeds.items()):
        best: dict[str, dict[str, Any]] = {}
        names = {method for pair in OPTIMISERS for method in pair}
        for method, members in [*METHODS.items(), *((one, (one,)) for one in sorted(names))]:
            candidates = [run for run in runs if run["method"] in members]
            if candidates:
                best[method] = max(candidates, key=_rank)
        if all(method in best for method in COMPETING):
            competing = [run for run in runs if run["method"] in COMPETING]
            best[DEFAULT] = max(competing, key=_rank)
            chosen.append(best[DEFAULT]["method"])
        for method, run in best.items():
            right.setdefault(method, []).append(np.array([float(bit) for bit in run["test"]]))
    joined = {method: np.concatenate(parts) for method, parts in right.items()}
    return Row(name, train, classes, tuple(sorted(seeds)), joined, tuple(chosen))


def _rank(run: Mapping[str, Any]) -> tuple[float, float]:
    return run["val_accuracy"], -run["val_loss"]


def write(results: Path, known: Mapping[str, ImageCollection]) -> None:
    rows = read(results)
    rows.sort(key=lambda row: (list(known).index(row.name) if row.name in known else 99, row.train))
    if rows:
        write_whole(PAGE, render(rows, known).encode())
        write_whole(CHART, draw(rows, known).encode())


def render(rows: Sequence[Row], known: Mapping[str, ImageCollection]) -> str:
    parts = [_INTRODUCTION, _table(rows, known), _CHART, _differences(rows, known)]
    parts += [_closed(rows, known), _optimisers(rows, known), _costs(), _METHOD]
    paragraphs = [each for part in parts for each in part.split("\n\n") if each]
    return "\n\n".join(map(_filled, paragraphs)) + "\n"


def _filled(paragraph: str) -> str:
    """Lines of 120 characters, unless it is a table or a picture."""
    if paragraph.startswith(("|", "!")):
        return paragraph
    return textwrap.fill(" ".join(paragraph.split()), 120, break_on_hyphens=False)


def _title(row: Row, known: Mapping[str, ImageCollection]) -> str:
    title = known[row.name].title if row.name in known else row.name
    seeds = "one seed" if len(row.seeds) == 1 else f"{len(row.seeds)} seeds"
    return f"{title}, {row.train} a class, {seeds}"


def _markdown(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = "|---|" + "---:|" * (len(names) - 1)
    return "\n".join([_line(names), rule, *map(_line, lines)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _table(rows: Sequence[Row], known: Mapping[str, ImageCollection]) -> str:
    names = ["accuracy, %", *METHODS, "`engram train`"]
    lines = []
    for row in rows:
        cells = [_shown(row.accuracy(method)) for method in (*METHODS, DEFAULT)]
        lines.append([_title(row, known), *cells])
    return _markdown(names, lines)


def _differences(rows: Sequence[Row], known: Mapping[str, ImageCollection]) -> str:
    pairs = [
        ("adapter", "head"),
        ("adapter", "logistic regression"),
        ("adapter", "memory"),
        ("memory", "head"),
        (DEFAULT, "head"),
    ]
    names = ["points, in pairs", *(f"{one} over {other}" for one, other in pairs), "chose"]
    lines = []
    for row in rows:
        cells = [str(row.over(one, other) or "") for one, other in pairs]
        lines.append([_title(row, known), *cells, ", ".join(row.chosen)])
    return "## Differences\n\n" + _markdown(names, lines)


def _closed(rows: Sequence[Row], known: Mapping[str, ImageCollection]) -> str:
    """How much of the way from a head to a model of its own each goes."""
    lines = []
    for row in rows:
        head, whole = row.accuracy("head"), row.accuracy("full fine-tuning")
        if head is None or whole is None or whole - head < 1:
            continue
        shares = [
            f"{100 * (value - head) / (whole - head):.0f} %"
            for method in ("memory", "adapter", "memory and adapter")
            if (value := row.accuracy(method)) is not None
        ]
        lines.append([_title(row, known), f"{whole - head:.1f}", *shares])
    names = ["of the way from head to full fine-tuning", "points", "memory", "adapter", "both"]
    return _markdown(names, lines) if lines else ""


def _optimisers(rows: Sequence[Row], known: Mapping[str, ImageCollection]) -> str:
    names = ["accuracy, %", "memory, SGD", "memory, AdamW", "adapter, SGD", "adapter, AdamW"]
    lines = [
        [_title(row, known), *(_shown(row.accuracy(one)) for pair in OPTIMISERS for one in pair)]
        for row in rows
    ]
    return "## SGD or AdamW\n\n" + _markdown(names, lines)


def _costs() -> str:
    """Of one task of 100 outputs, as the paper's Table 5 counts."""
    backbone = load_backbone(embedded.BACKBONE)
    chosen = {
        "head": Variant("head", 0, 1.0, 0),
        "memory of 10": Variant("memory", 10, 1.0, 0),
        "adapter of rank 8": Variant("adapter", 0, 1.0, 0, 8, "AdamW"),
        "memory and adapter": Variant("adapter", 10, 1.0, 0, 8, "AdamW"),
    }
    variants = Variants(backbone, list(chosen.values()), 100)
    lines = []
    for place, name in enumerate(chosen):
        weights = variants.weights(place)
        cost = cost_of(backbone, weights)
        values = sum(change.a.numel() + change.b.numel() for change in weights.adapter.values())
        size = 4 * (cost.parameters - values) + 2 * values
        flops = f"{cost.task_flops / 1e6:.1f}"
        lines.append([name, f"{cost.parameters:,}", f"{size:,}", flops, f"{100 * cost.share:.2f}"])
    names = ["100 outputs", "parameters", "bytes", "million FLOPs", "% of the backbone's pass"]
    return "## What each costs\n\n" + _markdown(names, lines)


# --- the chart ------------------------------------------------------------------------------------

COLOURS = {
    "head": "#8b949e",
    "logistic regression": "#6e7681",
    "attentive probe": "#8a6d00",
    "memory": "#b3541e",
    "adapter": "#1f6feb",
    "full fine-tuning": "#2da44e",
}
WIDTH, LINE, LEFT, RIGHT, TOP = 780, 30, 250, 170, 56
INK, FAINT = "#39424e", "#d0d7de"


def draw(rows: Sequence[Row], known: Mapping[str, ImageCollection]) -> str:
    """A dot for every method on a line for every set."""
    height = TOP + LINE * len(rows) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
        "<title>Accuracy of every method on every set</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="26" font-size="15" font-weight="600">Accuracy on test images, %</text>',
    ]
    bottom = TOP + LINE * len(rows)
    for tick in range(0, 101, 20):
        x = _x(tick)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 10}" y2="{bottom}" stroke="{FAINT}"/>'
            f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick}</text>'
        )
    for number, row in enumerate(rows):
        y = TOP + LINE * number + LINE / 2
        title = escape(_title(row, known).rpartition(", ")[0])
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{title}</text>')
        for method, colour in COLOURS.items():
            value = row.accuracy(method)
            if value is not None:
                parts.append(
                    f'<circle cx="{_x(value):.1f}" cy="{y:.1f}" r="5" fill="{colour}" '
                    f'fill-opacity=".85"><title>{method} {value:.1f}</title></circle>'
                )
    for number, (method, colour) in enumerate(COLOURS.items()):
        y = TOP + 20 * number + 6
        x = WIDTH - RIGHT + 24
        parts.append(
            f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>'
            f'<text x="{x + 12}" y="{y + 4}">{method}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _x(percent: float) -> float:
    return LEFT + percent / 100 * (WIDTH - LEFT - RIGHT)


_INTRODUCTION = """# How accurate tasks are

Why not embed the images and fit a logistic regression for each task? Sometimes that is as good,
and this page says where. Every method below leaves the backbone as it is and can share a pass,
but for full fine-tuning, which needs a model for each task. All of them learn from the same
images, are tuned on the same validation images and are tested on the same test images; *head* is
the better of a trained and a solved one, *logistic regression* is on the class token or on it and
the mean patch, whichever validates better. `engram train` is what it chooses without options: the
best of head, memory and adapter by validation."""

_CHART = "![Accuracy of every method on every set](../images/accuracy.svg)"

_METHOD = """## How it was measured

`python -m research.accuracy` runs what is missing, cell by cell (a set, a seed, a stage), and
writes this page; its first lines say where the images come from. Counting, angle and distance are
drawn by `research/accuracy_sets.py` from the seed. The backbone is the embedded `engram-mini`, a
ViT-Ti/16 at 176 px; images are not augmented, so that contexts are kept. Memory has 10 cells, an
adapter rank 8 on all four maps, stored in float16 before it is tested. Variants start from the
solved head and take 15 epochs, full fine-tuning takes 8. Accuracies are means over the seeds, each
with another draw of all its images. A difference is the mean over all test images of all seeds,
with its adjusted Wald interval of 95 %; it knows nothing of how another draw of the training
images would have turned out,
which the seeds show."""
