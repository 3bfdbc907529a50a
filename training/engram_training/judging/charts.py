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
AXES = ("predicted →", "true ↓")  # of the confusion matrix


def text_width(text: str) -> int:
    """Return the maximum width in pixels of a label with a height of 11 pixels."""
    wide = {c: 12 for c in text if c in "mwMW@%…" or east_asian_width(c) in "WF"}
    return sum(wide.get(c, 9 if c.isupper() else 7) for c in text)


def colour(index: int, count: int, best: int) -> str:
    """The colour of a line; the best one has the accent of the page."""
    return "var(--accent)" if index == best else f"hsl({360 * index // max(1, count)} 45% 55%)"


def legend(names: Sequence[str], best: int) -> str:
    """Name the lines of all curves, the best one first."""
    order = sorted(range(len(names)), key=lambda index: index != best)
    items = [
        f'<li><i style="background:{colour(index, len(names), best)}"></i>{escape(names[index])}'
        f"{' (selected)' if index == best else ''}</li>"
        for index in order
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


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
        lines.append(
            f'<polyline class="{kind}" points="{points}" '
            f'style="stroke:{colour(i, len(series), best)}">'
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
    """Draw true classes as rows and predictions as columns; opacity is the share of the row.

    Above the matrix are the names of its columns, and in the corner those of its axes.
    """
    count = len(table)
    if count > most:
        return ""
    cell = max(4, min(28, 560 // count))
    named = cell >= 11
    short = [
        label if len(label) <= LABEL_CHARS else label[: LABEL_CHARS - 1] + "…" for label in labels
    ]
    space = max(*map(text_width, short), text_width(AXES[0]) + 12) + 2 * GAP if named else 6
    top = max(*map(text_width, short), 30) + 2 * GAP if named else 0
    shares = table / np.maximum(1, table.sum(axis=1, keepdims=True))
    parts = []
    for row, column in zip(*np.nonzero(table), strict=True):
        kind = "right" if row == column else "wrong"
        text = f"{labels[row]} → {labels[column]}: {table[row, column]}"
        parts.append(
            f'<rect class="{kind}" x="{space + column * cell}" y="{top + row * cell}" '
            f'width="{cell - 1}" height="{cell - 1}" '
            f'opacity="{0.15 + 0.85 * shares[row, column]:.2f}">'
            f"<title>{escape(text)}</title></rect>"
        )
    if named:
        for row, label in enumerate(short):
            x, y = space - GAP, top + row * cell + cell * 0.75
            parts.append(f'<text x="{x}" y="{y:.0f}" text-anchor="end">{escape(label)}</text>')
            at = f"translate({space + row * cell + cell * 0.75:.0f} {top - GAP}) rotate(-90)"
            parts.append(f'<text transform="{at}">{escape(label)}</text>')
        for line, axis in enumerate(AXES):
            parts.append(f'<text x="0" y="{top - 20 + 14 * line}">{axis}</text>')
    edge = count * cell
    frame = f'<rect class="frame" x="{space}" y="{top}" width="{edge}" height="{edge}"/>'
    wide, tall = space + edge, top + edge
    size = f'width="{wide}" height="{tall}" viewBox="0 0 {wide} {tall}"'
    name = 'role="img" aria-label="Confusion matrix: true classes by predicted classes"'
    return f'<svg class="confusion" {name} {size}>{frame}{"".join(parts)}</svg>'


def _frame(title: str, axis: str, right: str, low: str, high: str, inside: str) -> str:
    bottom = HEIGHT - MARGIN
    axes = f'<path class="axis" d="M{MARGIN} 20V{bottom}H{WIDTH - 10}"/>'
    texts = (
        f'<text x="{MARGIN}" y="12">{escape(title)}</text>'
        f'<text x="{MARGIN - GAP}" y="24" text-anchor="end">{high}</text>'
        f'<text x="{MARGIN - GAP}" y="{bottom}" text-anchor="end">{low}</text>'
        f'<text x="{WIDTH - 10}" y="{bottom + 16}" text-anchor="end">{right}</text>'
        f'<text x="{(MARGIN + WIDTH - 10) // 2}" y="{bottom + 16}" text-anchor="middle">'
        f"{escape(axis)} →</text>"
    )
    # Long numbers need a wider margin on the left.
    more = max(0, max(text_width(low), text_width(high)) + 2 * GAP - MARGIN)
    wide = WIDTH + more
    size = f'width="{wide}" height="{HEIGHT}" viewBox="{-more} 0 {wide} {HEIGHT}"'
    name = f'role="img" aria-label="{escape(title)} by {escape(axis)}"'
    return f"<svg {name} {size}>{axes}{inside}{texts}</svg>"
