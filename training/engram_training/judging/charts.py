"""Charts as inline SVG: curves, reliability diagram, confusion matrix."""

from collections.abc import Sequence
from html import escape
from unicodedata import east_asian_width

import numpy as np
import numpy.typing as npt

from engram_training.judging.metrics import Calibration

WIDTH, HEIGHT, MARGIN = 420, 240, 40
GAP = 5  # between a label and its axis
LABEL_CHARS = 24  # longer class names are truncated


def text_width(text: str) -> int:
    """Return the maximum width in pixels of a label with a height of 11 pixels."""
    wide = {c: 12 for c in text if c in "mwMW@%…" or east_asian_width(c) in "WF"}
    return sum(wide.get(c, 9 if c.isupper() else 7) for c in text)


def curves(
    title: str, steps: Sequence[int], series: Sequence[tuple[str, Sequence[float]]], best: int
) -> str:
    """Draw lines over steps; line `best` is highlighted, and every line has a tooltip."""
    values = [v for _, line in series for v in line if np.isfinite(v)]
    if not values or not steps:
        return ""
    low, high = min(values), max(values)
    # A diverging variant must not flatten the others.
    if high - low > 20 * (np.median(values) - low + 1e-9):
        high = float(np.quantile(values, 0.95))
    high = high if high > low else low + 1

    def point(step: int, value: float) -> str:
        x = MARGIN + (WIDTH - MARGIN - 10) * step / max(steps)
        share = (min(value, high) - low) / (high - low)
        return f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - MARGIN - 20) * share:.1f}"

    lines = []
    for i in sorted(range(len(series)), key=lambda i: i == best):
        name, line = series[i]
        points = " ".join(point(s, v) for s, v in zip(steps, line, strict=True) if np.isfinite(v))
        kind = "best" if i == best else "other"
        hue = 360 * i // max(1, len(series))
        style = "" if i == best else f' style="stroke:hsl({hue} 45% 55%)"'
        lines.append(
            f'<polyline class="{kind}" points="{points}"{style}>'
            f"<title>{escape(name)}</title></polyline>"
        )
    return _frame(title, "step", f"{max(steps)}", f"{low:.3g}", f"{high:.3g}", "".join(lines))


def reliability(calibration: Calibration) -> str:
    """Draw accuracy over confidence; the diagonal is perfect calibration."""
    count = calibration.count
    left, bottom = MARGIN, HEIGHT - MARGIN
    wide, tall = WIDTH - MARGIN - 10, HEIGHT - MARGIN - 20
    total, bins = max(1, sum(count)), len(count)
    parts = [f'<line class="guide" x1="{left}" y1="{bottom}" x2="{left + wide}" y2="20"/>']
    for index, images in enumerate(count):
        if not images:
            continue
        confidence, accuracy = calibration.confidence[index], calibration.accuracy[index]
        x, bar = left + wide * index / bins, tall * accuracy
        opacity = 0.25 + 0.75 * images / total
        parts.append(
            f'<rect class="bar" x="{x + 1:.1f}" y="{bottom - bar:.1f}" opacity="{opacity:.2f}" '
            f'width="{wide / bins - 2:.1f}" height="{max(bar, 1):.1f}"><title>{images} images: '
            f"confidence {confidence:.1%}, accuracy {accuracy:.1%}</title></rect>"
        )
    return _frame("accuracy by confidence", "confidence", "1", "0", "1", "".join(parts))


def confusion(table: npt.NDArray[np.int64], labels: Sequence[str], most: int = 120) -> str:
    """Draw true classes as rows and predictions as columns; opacity is the share of the row."""
    count = len(table)
    if count > most:
        return ""
    cell = max(4, min(28, 560 // count))
    named = cell >= 11
    short = [
        label if len(label) <= LABEL_CHARS else label[: LABEL_CHARS - 1] + "…" for label in labels
    ]
    space = max(map(text_width, short)) + 2 * GAP if named else 6
    shares = table / np.maximum(1, table.sum(axis=1, keepdims=True))
    parts = []
    for row, column in zip(*np.nonzero(table), strict=True):
        kind = "right" if row == column else "wrong"
        text = f"{labels[row]} → {labels[column]}: {table[row, column]}"
        parts.append(
            f'<rect class="{kind}" x="{space + column * cell}" y="{row * cell}" width="{cell - 1}" '
            f'height="{cell - 1}" opacity="{0.15 + 0.85 * shares[row, column]:.2f}">'
            f"<title>{escape(text)}</title></rect>"
        )
    if named:
        for row, label in enumerate(short):
            x, y = space - GAP, row * cell + cell * 0.75
            parts.append(f'<text x="{x}" y="{y:.0f}" text-anchor="end">{escape(label)}</text>')
    edge = count * cell
    frame = f'<rect class="frame" x="{space}" y="0" width="{edge}" height="{edge}"/>'
    size = f'width="{space + edge}" height="{edge}" viewBox="0 0 {space + edge} {edge}"'
    return f'<svg class="confusion" {size}>{frame}{"".join(parts)}</svg>'


def _frame(title: str, axis: str, right: str, low: str, high: str, inside: str) -> str:
    bottom = HEIGHT - MARGIN
    axes = f'<path class="axis" d="M{MARGIN} 20V{bottom}H{WIDTH - 10}"/>'
    texts = (
        f'<text x="{MARGIN}" y="12">{escape(title)}</text>'
        f'<text x="{MARGIN - GAP}" y="24" text-anchor="end">{high}</text>'
        f'<text x="{MARGIN - GAP}" y="{bottom}" text-anchor="end">{low}</text>'
        f'<text x="{WIDTH - 10}" y="{bottom + 16}" text-anchor="end">{right}</text>'
        f'<text x="{MARGIN}" y="{bottom + 16}">{escape(axis)}</text>'
    )
    # Long numbers need a wider margin on the left.
    more = max(0, max(text_width(low), text_width(high)) + 2 * GAP - MARGIN)
    wide = WIDTH + more
    size = f'width="{wide}" height="{HEIGHT}" viewBox="{-more} 0 {wide} {HEIGHT}"'
    return f"<svg {size}>{axes}{inside}{texts}</svg>"
