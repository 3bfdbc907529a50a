"""Draws charts for the documentation from the last runs of the benchmarks.

    python -m benchmarks.figure docs/images

The latency chart is drawn from the published table, docs/reference/performance.md.
"""

import argparse
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import RESULTS
from benchmarks.page import PAGE
from benchmarks.peers.disturbed import disturbed

WIDTH, HEIGHT = 776, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 256, 48, 52
INK, FAINT = "#39424e", "#c9d1d9"
LINE = 16  # least distance of two names
RUST, OCHRE, BLUE, GREEN = "#b3541e", "#8a6d00", "#1f6feb", "#1a7f37"
GREY, VIOLET, ROSE, TEAL = "#6e7781", "#8250df", "#bf3989", "#0f7d86"


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over task counts, both axes logarithmic."""

    title: str
    counts: Sequence[int]
    series: Mapping[str, Sequence[float]]
    colours: Mapping[str, str]
    ticks: Sequence[float]
    unit: str  # behind a value

    def x(self, count: int) -> float:
        span = math.log2(max(self.counts)) or 1
        return LEFT + math.log2(count) / span * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        values = [each for line in self.series.values() for each in line]
        low, high = math.log2(0.8 * min(values)), math.log2(max(values))
        return HEIGHT - BOTTOM - (math.log2(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def one_pass(shape: str = "ViT-B/32", batch: int = 8) -> Chart:
    """For each way to serve tasks together its cost in plain forwards."""
    rows = json.loads((RESULTS / "one_pass.json").read_text())["rows"]
    rows = [row for row in rows if row.get("shape") == shape and row["batch"] == batch]
    counts = [int(row["tasks"]) for row in rows]
    ours = [float(row["over_one_forward"]) for row in rows]
    dense = [cost / float(row["over_dense_mask"]) for cost, row in zip(ours, rows, strict=True)]
    return Chart(
        f"Cost of all tasks, in plain forwards ({shape}, batch {batch}, CPU)",
        counts,
        {
            "N models, computed": [float(count) for count in counts],
            "dense mask": dense,
            "Engram": ours,
        },
        {"N models, computed": RUST, "dense mask": OCHRE, "Engram": BLUE},
        (1, 2, 4, 8, 16, 32, 64),
        "×",
    )


def peers() -> Chart:
    """Photos a second that get all T answers, of every server that was measured."""
    rows = json.loads((RESULTS / "peers.json").read_text())["rows"]
    return peers_chart([row for row in rows if "error" not in row])


def peers_chart(rows: Sequence[Mapping[str, object]]) -> Chart:
    counts = sorted({int(str(row["tasks"])) for row in rows})
    spoilt = disturbed(rows)
    rows = [row for row in rows if (row["beside"], row["tasks"]) not in spoilt]
    found: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        by_count = found.setdefault(str(row["name"]), {})
        by_count.setdefault(int(str(row["tasks"])), []).append(float(str(row["rate"])))
    # Ours took turns with several peers: the mean of those turns.
    series = {
        name: [sum(by_count[count]) / len(by_count[count]) for count in counts]
        for name, by_count in found.items()
        if len(by_count) == len(counts)
    }
    colours = (GREY, OCHRE, VIOLET, RUST, ROSE, GREEN, TEAL)
    ours = [name for name in series if name.startswith("Engram")]
    others = [name for name in series if name not in ours]
    return Chart(
        "Photos a second, each answered by all tasks (ViT-B/32, 2 cores, HTTP)",
        counts,
        series,
        {**dict(zip(others, colours, strict=False)), **dict.fromkeys(ours, BLUE)},
        (0.5, 1, 2, 5, 10, 20, 50, 100),
        "/s",
    )


def latency() -> Chart:
    """The median latency of a request for T answers, of every server on the published page."""
    return latency_chart(PAGE.read_text(encoding="utf-8"))


def latency_chart(page: str) -> Chart:
    row = r"^\| (?:\*\*)?([\w ,]+?)(?:\*\*)? \| (\d+) \|[^|]*\|[^|]*\| ([\d,]+) \|"
    section = page.partition("(`benchmarks.peers`)")[2].partition("\n## ")[0]
    found: dict[str, dict[int, list[float]]] = {}
    for name, tasks, p50 in re.findall(row, section, re.MULTILINE):
        by_count = found.setdefault(name, {})
        by_count.setdefault(int(tasks), []).append(float(p50.replace(",", "")) / 1e3)
    counts = sorted({count for by_count in found.values() for count in by_count})
    # The page marks pairs that were disturbed, so `adapters` lacks a count and is left out.
    series = {
        name: [sum(by_count[count]) / len(by_count[count]) for count in counts]
        for name, by_count in found.items()
        if by_count.keys() == set(counts) and "int8" not in name and "heads" not in name
    }
    colours = (GREY, OCHRE, VIOLET, RUST, ROSE, GREEN, TEAL)
    others = [name for name in series if name != "Engram"]
    return Chart(
        "Median latency of a request, 8 clients (ViT-B/32, 2 cores, HTTP)",
        counts,
        series,
        {**dict(zip(others, colours, strict=False)), "Engram": BLUE},
        (0.5, 1, 2, 4, 8),
        " s",
    )


def spread(places: Sequence[float]) -> list[float]:
    """The same places, moved apart until no two names overlap, and above the axis."""
    order = sorted(range(len(places)), key=lambda one: places[one])
    moved = list(places)
    for before, after in itertools.pairwise(order):
        moved[after] = max(moved[after], moved[before] + LINE)
    lowest = float(HEIGHT - BOTTOM + 8)
    for one in reversed(order):
        moved[one] = min(moved[one], lowest)
        lowest = moved[one] - LINE
    return moved


def draw(chart: Chart) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
        f"<title>{chart.title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">{chart.title}</text>',
    ]
    for tick in chart.ticks:
        y = chart.y(tick)
        if TOP - 1 <= y <= HEIGHT - BOTTOM + 1:
            parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
                f'stroke="{FAINT}"/>'
                f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}{chart.unit}'
                f"</text>"
            )
    for count in chart.counts:
        word = "task" if count == 1 else "tasks"
        parts.append(
            f'<text x="{chart.x(count):.1f}" y="{HEIGHT - BOTTOM + 24}" text-anchor="middle">'
            f"{count} {word}</text>"
        )
    labels = spread([chart.y(values[-1]) + 4 for values in chart.series.values()])
    for (name, values), label in zip(chart.series.items(), labels, strict=True):
        parts += _line(chart, name, values, label)
    return "\n".join([*parts, "</svg>", ""])


def _line(chart: Chart, name: str, values: Sequence[float], label: float) -> list[str]:
    points = [
        (chart.x(count), chart.y(value)) for count, value in zip(chart.counts, values, strict=True)
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    colour = chart.colours[name]
    last = f"{values[-1]:.1f}" if values[-1] < 100 else f"{values[-1]:.0f}"
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>',
        *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points),
        f'<text x="{points[-1][0] + 10:.1f}" y="{label:.1f}" fill="{colour}" font-weight="600">'
        f"{name} {last}{chart.unit}</text>",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    write_all(parser.parse_args().folder)


def write_all(folder: Path) -> None:
    """One picture of each run whose results are there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, chart in {"one-pass": one_pass, "peers": peers}.items():
        if (RESULTS / f"{name.replace('-', '_')}.json").exists():
            write(folder, name, chart())
    write(folder, "latency", latency())


def write(folder: Path, name: str, chart: Chart) -> None:
    (folder / f"{name}.svg").write_text(draw(chart))
    print(f"written to {folder / name}.svg")


if __name__ == "__main__":
    main()
