"""The report of a run: one self-contained HTML page next to the bundle (`report.html`)."""

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from engram_bundle import TaskBundle
from jinja2 import Environment, FileSystemLoader
from torch import Tensor

from engram_training.data.images import ImageSet, Unreadable
from engram_training.data.issues import Issue, IssueKind
from engram_training.fitting.losses import SCORE_NAMES
from engram_training.fitting.stopping import Epoch, last_figures, smoothed_scores
from engram_training.fitting.variants import Variant
from engram_training.judging import charts
from engram_training.judging.data_check import thumbnail
from engram_training.judging.metrics import Cost, Figures

MISTAKES_SHOWN = 24
CONFUSED_SHOWN = 15
SKIPPED_SHOWN = 200
Rows = list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Mistake:
    file: str
    thumbnail: bytes  # JPEG; empty if the photo is gone
    true: str
    predicted: str
    confidence: float


@dataclass(frozen=True, slots=True)
class Fitted:
    """The result of a run. The report shows all of it."""

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
    issues: list[Issue]
    notes: list[str]
    interrupted: bool
    seconds: float
    path: Path | None = None
    report: Path | None = None


def most_confident_mistakes(
    images: ImageSet, logits: Tensor, targets: Tensor, labels: Sequence[str]
) -> list[Mistake]:
    """Return the wrong predictions with the highest confidence, in that order."""
    confidence, predicted = torch.softmax(logits, dim=1).max(dim=1)
    wrong = torch.nonzero(predicted != targets).flatten()
    order = wrong[torch.argsort(confidence[wrong], descending=True, stable=True)]
    return [
        Mistake(
            images.paths[index].name,
            thumbnail(images, index),
            labels[int(targets[index])],
            labels[int(predicted[index])],
            float(confidence[index]),
        )
        for index in order[:MISTAKES_SHOWN].tolist()
    ]


def render(report: Fitted) -> str:
    folder = FileSystemLoader(Path(__file__).parent)
    template = Environment(loader=folder, autoescape=True).get_template("report.html")
    return template.render(
        report=report,
        splits=list(reversed(report.figures.items())),
        score=SCORE_NAMES[report.bundle.task_type],
        selected_on="validation" if report.epochs[-1].val_score else "training",
        curves=_curves(report),
        variants=_variants(report),
        skipped=[(str(one.path), one.reason) for one in report.skipped[:SKIPPED_SHOWN]],
        charts=charts,
        legend=charts.legend([one.name for one in report.variants], _best(report)),
        issue_groups=_issue_groups(report.issues),
        base64=lambda data: base64.b64encode(data).decode(),
        percent=percent,
        shown_figure=shown_figure,
        named_values=_named_values,
        confused_pairs=_confused_pairs,
        worst_classes=_worst_classes,
    )


def percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f} %"


def shown_figure(name: str, value: float) -> str:
    """Format a figure: shares as percentages."""
    shares = ("accuracy", "f1", "precision", "match", "calibration_error")
    return percent(value) if name.endswith(shares) else f"{value:.4g}"


def _best(report: Fitted) -> int:
    return report.variants.index(report.variant)


def _issue_groups(issues: Sequence[Issue]) -> list[tuple[str, list[Issue]]]:
    """The issues of each kind that has some, under a heading."""
    headings: dict[IssueKind, str] = {
        "label error": "Suspected label errors",
        "duplicate": "Held-out images that are nearly training images",
        "outlier": "Outliers",
    }
    groups = (
        (text, [one for one in issues if one.kind == kind]) for kind, text in headings.items()
    )
    return [(text, found) for text, found in groups if found]


def _curves(report: Fitted) -> list[str]:
    steps = [epoch.step for epoch in report.epochs]
    if len(steps) < 2:
        return []  # a closed form: nothing was trained
    best = _best(report)
    score = SCORE_NAMES[report.bundle.task_type]
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
            (variant.name, [line[index] for line in lines])
            for index, variant in enumerate(report.variants)
        ]
        drawings.append(charts.curves(title, steps, series, best))
    return drawings


def _variants(report: Fitted) -> Rows:
    """Return one row per variant, the best smoothed score first."""
    rows = []
    epochs = report.epochs
    losses = [loss for _, loss in last_figures(epochs)]
    smoothed = [smoothed_scores(epochs[: index + 1]) for index in range(len(epochs))]
    for index, variant in enumerate(report.variants):
        scores = [_rank(scores[index]) for scores in smoothed]
        top = scores.index(max(scores))
        cells = (
            variant.regime,
            ", ".join(str(size) for size in (variant.memory, variant.rank) if size),
            variant.optimiser,
            variant.start,
            f"{variant.rate:g}",
            str(variant.seed),
            f"{smoothed[top][index]:.4f}",
            str(epochs[top].step),
            f"{losses[index]:.4f}",
            f"{report.parameters[index]:,}",
            "best" if variant == report.variant else "",
        )
        rows.append((scores[top], cells))
    return [cells for _, cells in sorted(rows, key=lambda row: -row[0])]


def _rank(value: float) -> float:
    return value if math.isfinite(value) else -math.inf


def _named_values(figures: Figures) -> Rows:
    values = figures.values.items()
    return [(name.replace("_", " "), shown_figure(name, value)) for name, value in values]


def _confused_pairs(figures: Figures) -> Rows:
    assert figures.confusion is not None
    table, labels = figures.confusion.copy(), figures.labels
    for index in range(len(table)):
        table[index, index] = 0
    order = table.flatten().argsort(kind="stable")[::-1][:CONFUSED_SHOWN]
    return [
        (labels[index // len(table)], labels[index % len(table)], str(table.flat[index]))
        for index in order.tolist()
        if table.flat[index]
    ]


def _worst_classes(figures: Figures) -> Rows:
    return [
        (one.label, str(one.images), percent(one.recall), percent(one.precision))
        for one in sorted(figures.classes, key=lambda one: (_rank(one.recall), one.label))
    ]
