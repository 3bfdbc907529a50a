"""The page about the paper's tables: a pure function of what `research.paper_tables` measured.

Every sentence about an outcome is chosen by the figures, so that the page is true however a run
ends. A difference between two regimes is paired over the same test images: images that both get
right or both get wrong cancel out, and the interval is much tighter than those of the two alone.
"""

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from engram_server.model.heads.lda import Z, wilson

Floats = npt.NDArray[np.float64]
Results = Mapping[str, Any]
NAMES: Final = {"cifar100": "CIFAR-100", "flowers102": "Flowers-102"}


class Regime(NamedTuple):
    """A row of the tables."""

    kind: str  # full fine-tuning, head, class, memory, full attention
    memory: int = 0

    @property
    def title(self) -> str:
        tokens = _with_noun(self.memory, "memory token")
        titles = {"head": "head only", "class": "head + class token", "memory": tokens}
        titles["full attention"] = f"{tokens}, full attention"
        return titles.get(self.kind, self.kind)


def _place(regime: Regime) -> tuple[int, int]:
    """Where a regime stands in a table: as in the paper's."""
    kinds = ("full fine-tuning", "head", "class", "memory", "full attention")
    return kinds.index(regime.kind), regime.memory


HEAD = Regime("head")
WHOLE = Regime("full fine-tuning")

# Table 2 of the paper, read from the picture of it in the README of the public reproduction,
# necrashter/transformers-learnable-memory (images/results_from_paper.png). Its first row is headed
# "Sun-297" there.
PAPER_ROWS: Final = (WHOLE, HEAD, Regime("class"), *(Regime("memory", m) for m in (1, 5, 10, 20)))
PAPER: Final[Mapping[str, tuple[float, ...]]] = {
    "SUN-397": (76.9, 75.9, 76.4, 77.0, 76.8, 76.9, 76.9),
    "iNaturalist": (54.0, 46.3, 48.7, 49.4, 50.1, 50.0, 50.0),
    "CIFAR-100": (91.8, 85.8, 88.6, 90.9, 91.0, 91.1, 90.9),
    "Places-365": (55.9, 50.9, 52.4, 53.3, 53.8, 53.9, 54.1),
}
PAPER_CIFAR: Final = dict(zip(PAPER_ROWS, PAPER["CIFAR-100"], strict=True))


@dataclass(frozen=True, slots=True)
class Row:
    """One regime on one data set, at the rate that validation chose."""

    regime: Regime
    rate: float
    seeds: int
    validation: float  # mean accuracy over the seeds
    loss: float
    right: Floats  # (n,): of each test image, the share of the seeds that got it right

    @property
    def accuracy(self) -> float:
        return float(self.right.mean())

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson, of as many answers as there are images: the seeds share them."""
        return wilson(round(float(self.right.sum())), len(self.right))


Tables = Mapping[str, Mapping[Regime, Row]]  # by data set


@dataclass(frozen=True, slots=True)
class Difference:
    """In accuracy on the same images, with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_signed(self.value)} ({_signed(self.low)} to {_signed(self.high)})"


def difference(one: Row, other: Row) -> Difference:
    """Paired: the adjusted Wald interval of Agresti and Min, of the starts' mean on each image.

    It counts one more image that only the first got right and one that only the other did, by half
    each, and so stays sensible where the two hardly ever differ.
    """
    each = one.right - other.right
    count = len(each) + 2
    middle = float(each.sum()) / count
    spread = (float(np.square(each).sum()) + 1) / count - middle**2
    half = Z * math.sqrt(spread / count)
    return Difference(float(each.mean()), max(-1.0, middle - half), min(1.0, middle + half))


def rows_of(results: Results, table: str, data: str) -> dict[Regime, Row]:
    """The rows of one table on one data set, as the tables list them."""
    by_rate: dict[Regime, dict[float, list[Mapping[str, Any]]]] = {}
    for stage in results["stages"].values():
        if (stage["table"], stage["data"]) == (table, data):
            for run in stage["runs"]:
                regime = Regime(run["regime"], run["memory"])
                rates = by_rate.setdefault(regime, defaultdict(list))
                rates[run["rate"]].append(run)
    return {regime: _chosen(regime, by_rate[regime]) for regime in sorted(by_rate, key=_place)}


def _chosen(regime: Regime, rates: Mapping[float, Sequence[Mapping[str, Any]]]) -> Row:
    """The rate of the highest validation accuracy; of equal ones that of the lowest loss."""
    rows = []
    for rate, runs in rates.items():
        right = np.mean([[int(sign) for sign in run["test"]] for run in runs], axis=0)
        accuracy = float(np.mean([run["val_accuracy"] for run in runs]))
        loss = float(np.mean([run["val_loss"] for run in runs]))
        rows.append(Row(regime, rate, len(runs), accuracy, loss, right))
    return max(rows, key=lambda row: (row.validation, -row.loss))


def best_memory(rows: Mapping[Regime, Row]) -> Row:
    """The memory size of the masked rows that validation prefers; test images have no say."""
    masked = [row for row in rows.values() if row.regime.kind == "memory"]
    return max(masked, key=lambda row: (row.validation, -row.loss))


# --- the page -------------------------------------------------------------------------------------


def render(results: Results) -> str:
    a, b = (
        {data: rows_of(results, table, data) for data in results["data"]} for table in ("a", "b")
    )
    parts = [
        *_opening(results),
        *_in_short(a, b),
        *_table_a(results, a),
        *_table_b(results, b),
        *_costs(results),
        *_papers_figures(),
        *_where_they_differ(results, a["cifar100"], b["cifar100"]),
        *_reproduce(),
    ]
    return "\n\n".join(parts) + "\n"


def _opening(results: Results) -> list[str]:
    machine, backbone = results["machine"], results["backbone"]
    minutes = sum(stage["seconds"] for stage in results["stages"].values()) / 60
    threads = _with_noun(machine["threads"], "thread")
    return [
        "# The paper's tables, measured here",
        _text(
            "[*Fine-tuning Image Transformers using Learnable Memory*](#the-paper) (Sandler, "
            "Zhmoginov, Vladymyrov and Jackson, CVPR 2022) compares ways to adapt one Vision "
            "Transformer to a new task. Engram implements its method; its results are not "
            "reproduced at its scale. This page has the rows of its Table 2 on "
            f"`{backbone['name']}` ({backbone['layers']} layers, width {backbone['width']}, "
            f"{backbone['parameters']:,} parameters), masked against full attention, and the costs "
            "as its Table 5 counts them. It is written by"
        ),
        f"```sh\n{results['command']}\n```",
        _text(
            f"which trained for {minutes:.0f} minutes (CPU, {threads}, torch {machine['torch']}) "
            "and chose the words by the figures. Every run is judged after its last epoch. "
            "Accuracies are in per cent of the test images, with a 95 % interval (Wilson). "
            "Differences are in points, taken image by image over the same test images, with a "
            "95 % interval for pairs (Agresti and Min). The intervals speak for new images "
            "of the same kind; they know nothing of other training images."
        ),
    ]


def _in_short(a: Tables, b: Tables) -> list[str]:
    found = []
    for data, rows in a.items():
        best = best_memory(rows)
        verdict = _verdict(difference(best, rows[HEAD]), "head only")
        which = f"{best.regime.title}, the size that validation prefers,"
        found.append(f"{NAMES[data]}, Table A: {which} {verdict}")
    for data, rows in b.items():
        for row in rows.values():
            if row.regime.kind == "full attention":
                masked = rows[Regime("memory", row.regime.memory)]
                verdict = _verdict(difference(row, masked), "the same memory under the mask")
                found.append(f"{NAMES[data]}, Table B: {row.regime.title}, {verdict}")
        best = best_memory(rows)
        other = f"{best.regime.title} under the mask"
        verdict = _verdict(difference(rows[WHOLE], best), other)
        found.append(f"{NAMES[data]}, Table B: full fine-tuning {verdict}")
    return ["## In short", "\n".join(_text(f"- {line}.", indent="  ") for line in found)]


def _table_a(results: Results, tables: Tables) -> list[str]:
    scale = results["settings"]["tables"]["a"]
    return [
        "## Table A: the regimes that are served",
        _text(
            _images(results, "a"),
            f"All variants are trained in one pass over kept contexts: {_recipe(results, scale)}.",
        ),
        _accuracies(tables),
    ]


def _table_b(results: Results, tables: Tables) -> list[str]:
    scale = results["settings"]["tables"]["b"]
    return [
        "## Table B: all regimes",
        _text(
            "Full fine-tuning and full attention need gradients through the whole sequence and "
            "cannot share a pass, so this table is of fewer images, the same for every row.",
            _images(results, "b"),
            f"Every row: {_recipe(results, scale)}. Compare its rows with one another, not with "
            "those of Table A.",
        ),
        _accuracies(tables),
    ]


def _images(results: Results, table: str) -> str:
    lines = []
    for data, about in results["data"].items():
        counts = about["tables"][table]
        lines.append(
            f"{NAMES[data]}: {counts['classes']} classes, {counts['train']:,} training, "
            f"{counts['val']:,} validation and {counts['test']:,} test images"
        )
    return "; ".join(lines) + "."


def _recipe(results: Results, scale: Mapping[str, int]) -> str:
    rates = [f"{rate:g}" for rate in results["settings"]["rates"]]
    choice = f"the learning rate of {', '.join(rates)} that validates best"
    starts = f"the mean of {scale['seeds']} starts of memory, where there is memory"
    return ", ".join(
        [
            f"{_with_noun(scale['epochs'], 'epoch')} of batches of {scale['batch']}",
            choice if len(rates) > 1 else f"the learning rate {rates[0]}",
            starts if scale["seeds"] > 1 else "one start of memory",
        ]
    )


def _accuracies(tables: Tables) -> str:
    """Accuracy, gain over head only and chosen rate, beside the paper's CIFAR-100."""
    titles = ["", "the paper, CIFAR-100"]
    for data in tables:
        titles += [NAMES[data], "over head only", "rate"]
    lines = []
    for regime in next(iter(tables.values())):
        cells = [regime.title, f"{PAPER_CIFAR[regime]:.1f}" if regime in PAPER_CIFAR else ""]
        for rows in tables.values():
            row = rows[regime]
            low, high = row.interval
            gain = "" if regime == HEAD else str(difference(row, rows[HEAD]))
            accuracy = f"{100 * row.accuracy:.1f} ({100 * low:.1f} to {100 * high:.1f})"
            cells += [accuracy, gain, f"{row.rate:g}"]
        lines.append(cells)
    return _table(titles, lines)


def _costs(results: Results) -> list[str]:
    costs, backbone = results["costs"], results["backbone"]
    found = {Regime(cost["regime"], cost["memory"]): cost for cost in costs["rows"]}
    lines = [
        [
            regime.title,
            f"{cost['parameters']:,}",
            _share(cost["parameters"] / backbone["parameters"]),
            f"{cost['flops'] / 1e6:,.2f} M",
            _share(cost["flops"] / backbone["flops"]),
        ]
        for regime, cost in sorted(found.items(), key=lambda pair: _place(pair[0]))
    ]
    return [
        "## Costs",
        _text(
            "Counted as the paper's Table 5 does: D·L·m + D + D·K parameters for a task, here with "
            f"D = {backbone['width']}, L = {backbone['layers']} and K = {costs['outputs']}. A "
            "multiplication with its addition is two FLOPs; the backbone's own pass over an image "
            f"has {backbone['flops'] / 1e6:,.0f} M."
        ),
        _table(["", "parameters", "of the backbone's", "FLOPs added", "of the pass"], lines),
        _text(
            "Under the mask a task adds one row to the pass that all tasks share. Full attention "
            "and full fine-tuning need separate passes."
        ),
    ]


def _papers_figures() -> list[str]:
    lines = [
        [regime.title, *(f"{row[place]:.1f}" for row in PAPER.values())]
        for place, regime in enumerate(PAPER_ROWS)
    ]
    return [
        "## The paper's figures",
        _text(
            "Its Table 2, validation accuracy in per cent of a ViT-B/32 pre-trained on "
            "ImageNet-21k, as the README of the public reproduction "
            "(`necrashter/transformers-learnable-memory` on GitHub) shows it; that source does not "
            "say whether the memory tokens were masked. The paper's figures for masked against "
            "full attention and those of its Table 5 were in no source available here, so they "
            "are missing."
        ),
        _table(["", *PAPER], lines),
    ]


def _where_they_differ(
    results: Results, a: Mapping[Regime, Row], b: Mapping[Regime, Row]
) -> list[str]:
    """`a` and `b` are the rows of CIFAR-100, which the paper has too."""
    backbone = results["backbone"]
    setting = [
        ["backbone", "ViT-B/32", f"`{backbone['name']}`"],
        ["steps", "20,000 of 512 images", _steps(results)],
        ["augmentation", "random clipping on CIFAR-100, inception elsewhere", "none"],
    ]
    gains = []
    for regime, figure in PAPER_CIFAR.items():
        rows, letter = (a, "A") if regime in a else (b, "B")
        if regime != HEAD and regime in rows:
            gain = (figure - PAPER_CIFAR[HEAD]) / 100
            gap = difference(rows[regime], rows[HEAD])
            gains.append([regime.title, letter, _signed(gain), str(gap), _compared(gain, gap)])
    return [
        "## Where they differ",
        _text("What was done is alike in kind and not in size:"),
        _table(["", "the paper", "here"], setting),
        _text(
            "So the accuracies cannot be compared; what each regime gains over head only comes "
            "nearer to it. On CIFAR-100, in points:"
        ),
        _table(["", "table", "the paper", "here", ""], gains),
        _text("Flowers-102 is not among the paper's data sets."),
    ]


BIBTEX: Final = """\
@inproceedings{sandler2022learnable,
  author    = {Sandler, Mark and Zhmoginov, Andrey and Vladymyrov, Max and Jackson, Andrew},
  title     = {Fine-tuning Image Transformers using Learnable Memory},
  booktitle = {Proceedings of the IEEE/CVF Conference on Computer Vision and Pattern Recognition
               (CVPR)},
  pages     = {12155--12164},
  month     = {June},
  year      = {2022},
  eprint    = {2203.15243},
  archivePrefix = {arXiv}
}"""


def _reproduce() -> list[str]:
    return [
        "## Reproduce it",
        _text(
            "[The data manifest](../../research/DATA.md) says where to get each data set, under "
            "which licence, and how to arrange the folders. Then:"
        ),
        "```sh\n"
        "python -m research.paper_tables --data DATA --backbone BACKBONE\n"
        "python -m research.accuracy --data DATA\n"
        "```",
        _text(
            "The second command writes [How accurate tasks are](accuracy.md). Both continue where "
            "they were stopped, and write the results of every run to `research/results`."
        ),
        _text(
            "To come closer to the paper, use its kind of backbone "
            "(`google/vit-base-patch32-224-in21k`) and all images: `--a-train 450 --a-test 10000`. "
            "That was not run here, for lack of a GPU."
        ),
        "## The paper",
        _text(
            "Mark Sandler, Andrey Zhmoginov, Max Vladymyrov and Andrew Jackson: *Fine-tuning Image "
            "Transformers using Learnable Memory*. IEEE/CVF Conference on Computer Vision and "
            "Pattern Recognition (CVPR), 2022, pages 12155-12164. "
            "[arXiv 2203.15243](https://arxiv.org/abs/2203.15243)."
        ),
        f"```bibtex\n{BIBTEX}\n```",
        _text("To cite Engram, use [CITATION.cff](../../CITATION.cff)."),
    ]


def _steps(results: Results) -> str:
    lines = []
    for table, scale in results["settings"]["tables"].items():
        train = results["data"]["cifar100"]["tables"][table]["train"]
        steps = scale["epochs"] * -(-train // scale["batch"])
        lines.append(f"Table {table.upper()}, CIFAR-100: {steps:,} of {scale['batch']}")
    return "; ".join(lines)


# --- words and numbers ----------------------------------------------------------------------------


def _verdict(gap: Difference, other: str) -> str:
    """What a difference says about the first of two, as a predicate."""
    if gap.low > 0:
        return f"is more accurate than {other}: {gap}"
    if gap.high < 0:
        return f"is less accurate than {other}: {gap}"
    return f"does not differ significantly from {other} on these images: {gap}"


def _compared(gain: float, gap: Difference) -> str:
    if gap.low <= gain <= gap.high:
        return "the paper's is within the interval"
    if gain < gap.low:
        return "more here"
    return "less here" if gap.value >= 0 else "a loss here"


def _signed(share: float) -> str:
    points = round(100 * share, 1)
    sign = "+" if points > 0 else "−" if points < 0 else ""
    return f"{sign}{abs(points):.1f}"


def _share(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.1 else 2}f} %"


def _with_noun(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _text(*sentences: str, indent: str = "") -> str:
    whole = " ".join(sentences)
    return textwrap.fill(
        whole, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Words to the left, figures to the right."""
    columns = list(zip(*lines, strict=True))
    right = [all(cell[:1] in "+−0123456789" for cell in column) for column in columns[1:]]
    rule = ["---", *("---:" if figures else "---" for figures in right)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, rule, *lines))
