"""Draws the README's picture from the last run of `benchmarks.one_pass`.

python -m benchmarks.figure docs/images/one-pass.svg
"""

import argparse
import json
import math
from pathlib import Path

from benchmarks.measure import RESULTS

WIDTH, HEIGHT = 748, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 228, 48, 52
INK, FAINT = "#39424e", "#c9d1d9"
COLOURS = {"N models, computed": "#b3541e", "dense mask": "#8a6d00", "Engram": "#1f6feb"}


def read_series(shape: str, batch: int) -> tuple[list[int], dict[str, list[float]]]:
    """Task counts, and for each way to serve them the cost in plain forwards."""
    rows = json.loads((RESULTS / "one_pass.json").read_text())["rows"]
    rows = [row for row in rows if row.get("shape") == shape and row["batch"] == batch]
    counts = [int(row["tasks"]) for row in rows]
    ours = [float(row["over_one_forward"]) for row in rows]
    dense = [cost / float(row["over_dense_mask"]) for cost, row in zip(ours, rows, strict=True)]
    series = {
        "N models, computed": [float(count) for count in counts],
        "dense mask": dense,
        "Engram": ours,
    }
    return counts, series


def x_of(count: int, counts: list[int]) -> float:
    span = math.log2(max(counts)) or 1
    return LEFT + math.log2(count) / span * (WIDTH - LEFT - RIGHT)


def y_of(cost: float, most: float) -> float:
    low, high = math.log2(0.8), math.log2(most)
    return HEIGHT - BOTTOM - (math.log2(cost) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def draw(shape: str, batch: int) -> str:
    counts, series = read_series(shape, batch)
    most = max(counts)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{INK}">',
        f"<title>Cost of serving tasks together, {shape}, batch {batch}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="15" font-weight="600">'
        f"Cost of all tasks, in plain forwards ({shape}, batch {batch}, CPU)</text>",
    ]
    for cost in (1, 2, 4, 8, 16, 32, 64):
        y = y_of(cost, most)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{FAINT}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{cost}×</text>'
        )
    for count in counts:
        x, word = x_of(count, counts), "task" if count == 1 else "tasks"
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 24}" text-anchor="middle">'
            f"{count} {word}</text>"
        )
    for name, costs in series.items():
        points = [
            (x_of(count, counts), y_of(cost, most))
            for count, cost in zip(counts, costs, strict=True)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = COLOURS[name]
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in points]
        x, y = points[-1]
        parts.append(
            f'<text x="{x + 10:.1f}" y="{y + 4:.1f}" fill="{colour}" font-weight="600">'
            f"{name} {costs[-1]:.1f}×</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="ViT-B/32")
    parser.add_argument("--batch", type=int, default=8)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(draw(given.shape, given.batch))
    print(f"written to {given.out}")


if __name__ == "__main__":
    main()
