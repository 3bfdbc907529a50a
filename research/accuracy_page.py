"""The page of the accuracy study and its chart, from the results of its cells."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from engram_training.fitting.variants import Regime

from research.accuracy_sets import ImageCollection

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "explanation" / "accuracy.md"
TEMPLATE = Path(__file__).with_suffix(".template")
CHART_LINK: Final = "![Accuracy of four methods on every set](../images/accuracy.svg)"
CHART = REPOSITORY / "docs" / "images" / "accuracy.svg"

CLASS_TOKEN: Final = "class token"
REGRESSION: Final = "logistic regression"
LAYERS: Final = "layers"
FINE_TUNING: Final = "full fine-tuning"
DEFAULT: Final = "`engram train`"
ROWS: Final[Mapping[Regime, str]] = {
    "memory": "memory",
    "lora": "LoRA row",
    "lora+layers": "LoRA row + layers",
}
METHODS: Final = (CLASS_TOKEN, REGRESSION, LAYERS, *ROWS.values(), FINE_TUNING, DEFAULT)
PAIRS: Final = (
    (LAYERS, CLASS_TOKEN),
    (LAYERS, REGRESSION),
    (DEFAULT, REGRESSION),
    (DEFAULT, LAYERS),
    (FINE_TUNING, DEFAULT),
)
# The chart shows what a reader chooses between.
COLOURS: Final = {
    REGRESSION: "#8a8f98",
    LAYERS: "#1f77b4",
    DEFAULT: "#d1495b",
    FINE_TUNING: "#edae49",
}
INK, FAINT = "#1f2430", "#e3e6ea"
WIDTH, LEFT, RIGHT, TOP, LINE = 860, 220, 190, 60, 34
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
    """One set with one number of photos."""

    name: str
    photos: int | None  # a class; None: 1,000 in all
    right: Mapping[str, Mapping[int, Bits]]  # by method and seed, of every test image

    @property
    def seeds(self) -> list[int]:
        """Those that all methods have, so that their accuracies can be compared.

        Fine-tuning takes longest and may have fewer.
        """
        methods = self.right.keys() - {FINE_TUNING} or self.right.keys()
        return sorted(frozenset.intersection(*(frozenset(self.right[one]) for one in methods)))

    def seeds_of(self, method: str) -> list[int]:
        return [seed for seed in self.seeds if seed in self.right.get(method, {})]

    def accuracy(self, method: str) -> float | None:
        if not (seeds := self.seeds_of(method)):
            return None
        right = np.concatenate([self.right[method][seed] for seed in seeds])
        return 100 * float(right.mean())

    def over(self, one: str, other: str) -> Difference | None:
        """Over the seeds that both have."""
        seeds = sorted(self.right.get(one, {}).keys() & self.right.get(other, {}).keys())
        if not seeds:
            return None
        first, second = (
            np.concatenate([self.right[method][seed] for seed in seeds]) for method in (one, other)
        )
        return Difference.of(first, second)


def read(results: Path) -> list[Row]:
    right: dict[tuple[str, int | None], dict[str, dict[int, Bits]]] = {}
    for path in sorted(results.glob("*.json")):
        cell = json.loads(path.read_text())
        row = right.setdefault((cell["set"], cell["photos"]), {})
        for run in cell["runs"]:
            packed = np.frombuffer(bytes.fromhex(run["test"]), dtype=np.uint8)
            bits = np.unpackbits(packed, count=cell["images"]["test"]).astype(np.float64)
            row.setdefault(run["method"], {})[cell["seed"]] = bits
    return [Row(name, photos, of) for (name, photos), of in right.items()]


def write(results: Path, known: Mapping[str, ImageCollection]) -> None:
    rows = read(results)
    PAGE.write_text(render(rows, known))
    CHART.write_text(draw(_of(rows, known, None), known))


def _of(rows: Sequence[Row], known: Mapping[str, ImageCollection], photos: int | None) -> list[Row]:
    """The rows of one number of photos, in the order of the sets."""
    by_name = {row.name: row for row in rows if row.photos == photos}
    return [by_name[name] for name in known if name in by_name]


def render(rows: Sequence[Row], known: Mapping[str, ImageCollection]) -> str:
    parts = []
    for photos, title in ((None, "1,000 photos"), (10, "10 photos a class"), (5, "5 a class")):
        if chosen := _of(rows, known, photos):
            parts += [f"## {title}", _draws(chosen), _table(chosen, known)]
            parts += [CHART_LINK] if photos is None else []
            parts.append(_differences(chosen, known))
    return TEMPLATE.read_text().replace("{results}", "\n\n".join(parts))


def _draws(rows: Sequence[Row]) -> str:
    draws = min(len(row.seeds) for row in rows)
    if draws == 1:
        return "One draw of the photos."
    text = f"Means of {draws} draws of the photos."
    fewer = [len(seeds) for row in rows if (seeds := row.seeds_of(FINE_TUNING))]
    if fewer and min(fewer) < draws:
        one_or_more = "one draw" if min(fewer) == 1 else f"{min(fewer)} draws"
        text += (
            f" Full fine-tuning: {one_or_more}, so compare it by the differences below the table."
        )
    return text


def _table(rows: Sequence[Row], known: Mapping[str, ImageCollection]) -> str:
    methods = [method for method in METHODS if any(method in row.right for row in rows)]
    lines = [[known[row.name].title, *(_cell(row, method) for method in methods)] for row in rows]
    means = []
    for method in methods:
        values = [row.accuracy(method) for row in rows]
        whole = all(value is not None for value in values)
        means.append(f"{np.mean([v for v in values if v is not None]):.1f}" if whole else "")
    return _markdown(["accuracy, %", *methods], [*lines, ["**mean**", *means]])


def _cell(row: Row, method: str) -> str:
    value = row.accuracy(method)
    return "" if value is None else f"{value:.1f}"


def _differences(rows: Sequence[Row], known: Mapping[str, ImageCollection]) -> str:
    pairs = [pair for pair in PAIRS if any(row.over(*pair) for row in rows)]
    lines = [
        [known[row.name].title, *(str(row.over(*pair) or "") for pair in pairs)] for row in rows
    ]
    return _markdown(["points", *(f"{one} over {other}" for one, other in pairs)], lines)


def _markdown(names: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(names) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rule, *lines))


# --- the chart ------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], known: Mapping[str, ImageCollection]) -> str:
    """A line for every set, and on it a dot for every method."""
    title, bottom = "Accuracy with 1,000 training photos, %", TOP + LINE * len(rows)
    height = bottom + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{INK}">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="26" font-size="15" font-weight="600">{title}</text>',
    ]
    parts += [
        f'<line x1="{_x(tick):.1f}" x2="{_x(tick):.1f}" y1="{TOP - 10}" y2="{bottom}" '
        f'stroke="{FAINT}"/>'
        f'<text x="{_x(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{tick}</text>'
        for tick in range(20, 101, 20)
    ]
    for number, row in enumerate(rows):
        y = TOP + LINE * number + LINE / 2
        name = escape(known[row.name].title)
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
        shown = {m: value for m in COLOURS if (value := row.accuracy(m)) is not None}
        ends = [_x(value) for value in (min(shown.values()), max(shown.values()))]
        parts.append(
            f'<line x1="{ends[0]:.1f}" x2="{ends[1]:.1f}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{FAINT}" stroke-width="3"/>'
        )
        parts += [_dot(_x(value), y, method, f"{value:.1f}") for method, value in shown.items()]
    drawn = [method for method in COLOURS if any(method in row.right for row in rows)]
    for number, method in enumerate(drawn):
        x, y = WIDTH - RIGHT + 24, TOP + 20 * number + 6
        name = escape(method.strip("`"))
        parts += [_dot(x, y, method, ""), f'<text x="{x + 12}" y="{y + 4}">{name}</text>']
    return "\n".join([*parts, "</svg>", ""])


def _dot(x: float, y: float, method: str, value: str) -> str:
    label = escape(f"{method.strip('`')} {value}".strip())
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="{COLOURS[method]}" fill-opacity=".9">'
        f"<title>{label}</title></circle>"
    )


def _x(percent: float) -> float:
    return LEFT + percent / 100 * (WIDTH - LEFT - RIGHT)
