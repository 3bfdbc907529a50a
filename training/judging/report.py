"""The report of a run: one page that needs nothing else, to be kept or sent with the bundle."""

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from task_store import TaskBundle
from training.data.images import ImageSet, Unreadable
from training.fitting.loop import Epoch, smoothed_scores
from training.fitting.losses import SCORE_NAMES
from training.fitting.variants import Variant
from training.judging import charts
from training.judging.cost import Cost
from training.judging.metrics import Figures

THUMBNAIL_EDGE = 112
MISTAKES_SHOWN = 24
CONFUSED_SHOWN = 15
SKIPPED_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Mistake:
    file: str
    thumbnail: bytes  # JPEG
    true: str
    predicted: str
    confidence: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """What a run gave. The report shows all of it."""

    name: str
    bundle: TaskBundle
    backbone: str
    variant: Variant  # the best
    variants: list[Variant]
    parameters: list[int]  # of each variant
    epochs: list[Epoch]
    figures: dict[str, Figures]  # by split: val, test
    cost: Cost
    mistakes: list[Mistake]
    skipped: list[Unreadable]
    notes: list[str]
    interrupted: bool
    seconds: float
    path: Path | None = None
    report: Path | None = None


def most_confident_mistakes(
    images: ImageSet, logits: Tensor, targets: Tensor, labels: Sequence[str]
) -> list[Mistake]:
    """The wrong answers that were given with the most confidence, in that order."""
    confidence, predicted = torch.softmax(logits, dim=1).max(dim=1)
    wrong = torch.nonzero(predicted != targets).flatten()
    order = wrong[torch.argsort(confidence[wrong], descending=True, stable=True)]
    return [
        Mistake(
            images.paths[place].name,
            _thumbnail(images, place),
            labels[int(targets[place])],
            labels[int(predicted[place])],
            float(confidence[place]),
        )
        for place in order[:MISTAKES_SHOWN].tolist()
    ]


def _thumbnail(images: ImageSet, place: int) -> bytes:
    picture = Image.fromarray(images.pixels(place))
    picture.thumbnail((THUMBNAIL_EDGE, THUMBNAIL_EDGE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80)
    return file.getvalue()


def render(report: Fitted) -> str:
    sections = [
        _summary(report),
        _notes(report),
        _section("Training", _curves(report)),
        _section("Variants", _variants(report)),
        *(_answers(split, one) for split, one in reversed(list(report.figures.items()))),
        _section("Most confident mistakes", _mistakes(report.mistakes)),
        _section("Cost", _cost(report)),
        _section("Skipped images", _skipped(report.skipped)),
    ]
    title = escape(report.name)
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    view = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    body = "".join(sections)
    return f'<!doctype html><html lang="en"><head>{head}{view}</head><body>{body}</body></html>\n'


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{inside}</section>" if inside else ""


def _table(names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    rows_and_head = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="wide"><table>{rows_and_head}</table></div>'


def percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def shown_figure(name: str, value: float) -> str:
    """A figure as people read it: shares in per cent."""
    shares = ("accuracy", "f1", "precision", "match", "calibration_error")
    return percent(value) if name.endswith(shares) else f"{value:.4g}"


def _summary(report: Fitted) -> str:
    bundle = report.bundle
    lines = []
    for split, one in reversed(list(report.figures.items())):
        name, value = one.headline
        text = f"{name.replace('_', ' ')} {shown_figure(name, value)}"
        if one.interval is not None:
            text += f" (95 % interval {percent(one.interval[0])} to {percent(one.interval[1])})"
        lines.append(
            f"<p class='headline'><b>{escape(text)}</b> on {one.images} {split} images</p>"
        )
    if "test" not in report.figures and "val" in report.figures:
        lines.append(
            "<p>There are no test images: the variant was chosen on the images above, so the "
            "figure is a little too good.</p>"
        )
    facts = (
        f"{bundle.problem.replace('_', ' ')}, {bundle.classes} outputs · "
        f"{report.variant.name} of {len(report.variants)} variants · backbone {report.backbone} · "
        f"trained in {report.seconds:.0f} s · {bundle.digest}"
    )
    return f"<h1>{escape(report.name)}</h1>{''.join(lines)}<p class='facts'>{escape(facts)}</p>"


def _notes(report: Fitted) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def _curves(report: Fitted) -> str:
    steps = [epoch.step for epoch in report.epochs]
    best = report.variants.index(report.variant)
    score = SCORE_NAMES[report.bundle.problem]
    drawings = []
    for title, name in (
        ("training loss", "train_loss"),
        (f"training {score}", "train_score"),
        ("validation loss", "val_loss"),
        (f"validation {score}", "val_score"),
    ):
        lines = [getattr(epoch, name) for epoch in report.epochs]
        if any(line is None for line in lines):
            continue
        series = [
            (variant.name, [line[place] for line in lines])
            for place, variant in enumerate(report.variants)
        ]
        drawings.append(charts.curves(title, steps, series, best))
    return f'<div class="row">{"".join(drawings)}</div>'


def _variants(report: Fitted) -> str:
    bundle, rows = report.bundle, []
    epochs, last = report.epochs, report.epochs[-1]
    smoothed = [smoothed_scores(epochs[: place + 1]) for place in range(len(epochs))]
    for place, variant in enumerate(report.variants):
        top = max(range(len(smoothed)), key=lambda i: _rank(smoothed[i][place]))
        losses = last.val_loss or last.train_loss
        rows.append(
            (
                _rank(smoothed[top][place]),
                [
                    variant.regime,
                    ", ".join(str(size) for size in (variant.memory, variant.rank) if size),
                    variant.optimiser,
                    variant.start,
                    f"{variant.rate:g}",
                    str(variant.seed),
                    f"{smoothed[top][place]:.4f}",
                    str(report.epochs[top].step),
                    f"{losses[place]:.4f}",
                    f"{report.parameters[place]:,}",
                    "best" if variant == report.variant else "",
                ],
            )
        )
    rows.sort(key=lambda row: -row[0])
    score = SCORE_NAMES[bundle.problem]
    names = [
        "regime",
        "cells, rank",
        "optimiser",
        "start",
        "rate",
        "seed",
        f"best {score}",
        "at step",
        "last loss",
    ]
    intro = (
        f"<p>Chosen by the mean {score} of three epochs on end, on "
        f"{'validation' if last.val_score else 'training'} images.</p>"
    )
    return intro + _table([*names, "parameters", ""], [row for _, row in rows])


def _rank(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _answers(split: str, one: Figures) -> str:
    named = [(name.replace("_", " "), shown_figure(name, v)) for name, v in one.values.items()]
    parts = [_table(["figure", "value"], named)]
    if one.calibration is not None:
        c = one.calibration
        drawing = charts.reliability(c.confidence, c.accuracy, c.count)
        parts = [f'<div class="row">{parts[0]}{drawing}</div>']
    if one.confusion is not None:
        labels = [figures.label for figures in one.classes]
        parts.append("<h3>What is taken for what</h3>")
        parts.append(charts.confusion(one.confusion, labels))
        parts.append(_confused(one, labels))
    if one.classes:
        rows = [
            (c.label, str(c.images), percent(c.recall), percent(c.precision))
            for c in sorted(one.classes, key=lambda c: (_rank(c.recall), c.label))
        ]
        inside = _table(["class", "images", "found (recall)", "right when said (precision)"], rows)
        parts.append(f"<details><summary>Every class, the worst first</summary>{inside}</details>")
    return _section(f"On {one.images} {split} images", "".join(parts))


def _confused(one: Figures, labels: Sequence[str]) -> str:
    assert one.confusion is not None
    table = one.confusion.copy()
    for place in range(len(table)):
        table[place, place] = 0
    order = table.flatten().argsort(kind="stable")[::-1][:CONFUSED_SHOWN]
    rows = [
        (labels[place // len(table)], labels[place % len(table)], str(table.flat[place]))
        for place in order.tolist()
        if table.flat[place]
    ]
    return _table(["true", "answered", "images"], rows) if rows else ""


def _mistakes(mistakes: Sequence[Mistake]) -> str:
    items = []
    for one in mistakes:
        data = base64.b64encode(one.thumbnail).decode()
        items.append(
            f'<figure><img alt="" src="data:image/jpeg;base64,{data}"><figcaption>'
            f"{escape(one.true)} taken for <b>{escape(one.predicted)}</b>, "
            f"{percent(one.confidence)}"
            f"<br><small>{escape(one.file)}</small></figcaption></figure>"
        )
    return f'<div class="row">{"".join(items)}</div>' if items else ""


def _cost(report: Fitted) -> str:
    cost, bundle = report.cost, report.bundle
    rows = [
        ("parameters, D·L·m + D + D·K and those of an adapter", f"{cost.parameters:,}"),
        ("FLOPs of the backbone, per image", f"{cost.backbone_flops:,}"),
        ("FLOPs added by this task, per image", f"{cost.task_flops:,} ({percent(cost.share)})"),
        ("file", f"{bundle.size_bytes:,} bytes"),
    ]
    return _table(["", "this task"], rows)


def _skipped(skipped: Sequence[Unreadable]) -> str:
    if not skipped:
        return ""
    rows = [(str(one.path), one.reason) for one in skipped[:SKIPPED_SHOWN]]
    more = len(skipped) - len(rows)
    tail = f"<p>and {more} more</p>" if more else ""
    return _table([f"{len(skipped)} files", "why"], rows) + tail


STYLE = """
:root{color-scheme:light dark;--line:#8884;--accent:#0a7d5a;--wrong:#c4442a}
body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}
h1{margin-bottom:.2rem}h2{margin-top:2.5rem;border-bottom:1px solid var(--line)}
.headline{font-size:1.15rem;margin:.2rem 0}.facts{color:#888;overflow-wrap:anywhere}
.notes{border-left:4px solid #d9a400;padding:.5rem 0 .5rem 2rem;overflow-wrap:anywhere}
.row{display:flex;flex-wrap:wrap;gap:1rem;align-items:flex-start}.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.15rem .8rem .15rem 0;border-bottom:1px solid var(--line)}
td{max-width:32rem;overflow-wrap:anywhere}
svg{max-width:100%;height:auto}svg text{font-size:11px;fill:currentColor}
polyline{fill:none;stroke-width:1.2;opacity:.7}
polyline.best{stroke:var(--accent);stroke-width:3;opacity:1}polyline:hover{stroke-width:4;opacity:1}
.axis,.frame{fill:none;stroke:var(--line)}.guide{stroke:#888;stroke-dasharray:4}
.bar,.right{fill:var(--accent)}.wrong{fill:var(--wrong)}
figure{margin:0;width:8.5rem;font-size:12px;overflow-wrap:anywhere}figure img{width:112px}
"""
