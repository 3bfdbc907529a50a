"""The options of a training run, each declared once.

The command `engram train` and its documentation are generated from the fields of `TrainOptions`
(`commands.options`). To add an option, add a field here and use it.
"""

# ruff: noqa: RUF009 - each call in a default makes a dataclass field

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from engram_bundle.limits import DEFAULT_LIMITS

from engram_training.data.augment import AUGMENTATIONS, Augmentation
from engram_training.data.dataset import TASK_TYPES, Corrections, Fractions, TaskType
from engram_training.errors import SettingsConflict
from engram_training.fitting.variants import (
    AUTO_REGIMES,
    REGIMES,
    STARTS,
    TRAINED_REGIMES,
    Regime,
    Start,
    Variant,
    parts_of,
    sweep,
)

AUTO: Final = "auto"  # on the command line; None in `TrainOptions`
DEFAULT_EPOCHS: Final = 15
T = TypeVar("T")
N = TypeVar("N", int, float)
Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, slots=True)
class Flag:
    help: str
    name: str | None = None  # if it differs from the field
    metavar: str | None = None
    minimum: int | None = None
    choices: Sequence[str] | None = None  # besides `auto`
    text: str | None = None  # the default, converted by `parse`
    parse: Callable[[str], Any] | None = None
    repeated: bool = False  # several occurrences are joined with commas
    recorded: bool = False  # stored in the manifest, and reused by --like


def _option(default: T, help: str, **flag: Any) -> T:  # noqa: ANN401 - fields of Flag
    return field(default=default, metadata={"flag": Flag(help, **flag)})


def _parsed(text: str, parse: Callable[[str], T], help: str, **flag: Any) -> T:  # noqa: ANN401
    return _option(parse(text), help, text=text, parse=parse, recorded=True, **flag)


def _numbers(kind: type[N]) -> Callable[[str], tuple[N, ...]]:
    def parse(text: str) -> tuple[N, ...]:
        try:
            return tuple(kind(part) for part in text.split(",") if part.strip())
        except ValueError:
            raise ValueError("Use numbers separated by commas.") from None

    return parse


def _words(valid: Sequence[Word]) -> Callable[[str], tuple[Word, ...]]:
    def parse(text: str) -> tuple[Word, ...]:
        names = {name.strip() for name in text.split(",")}
        if not names <= set(valid):
            raise ValueError(f"Valid values: {', '.join(valid)}.")
        return tuple(word for word in valid if word in names)

    return parse


def _or_auto(parse: Callable[[str], T]) -> Callable[[str], T | None]:
    return lambda text: None if text == AUTO else parse(text)


def _fractions(text: str) -> Fractions:
    shares = _numbers(float)(text)
    total = sum(shares)
    if len(shares) != 3 or min(shares) < 0 or total <= 0:
        raise ValueError("Use three shares, for train, val and test.")
    return shares[0] / total, shares[1] / total, shares[2] / total


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """How to train; validated on creation."""

    memory: tuple[int, ...] = _parsed(
        "10", _numbers(int), "Memory tokens per layer to try.", metavar="M,…"
    )
    ranks: tuple[int, ...] = _parsed(
        "8", _numbers(int), "LoRA ranks to try.", name="rank", metavar="R,…"
    )
    rates: tuple[float, ...] | None = _parsed(
        AUTO,
        _or_auto(_numbers(float)),
        "Learning rates to try. auto: two per regime.",
        name="lr",
        metavar="auto|R,…",
    )
    regimes: tuple[Regime, ...] | None = _parsed(
        AUTO,
        _or_auto(_words(REGIMES)),
        f"What to train: {', '.join(REGIMES)}. Several are compared. auto: "
        f"{', '.join(AUTO_REGIMES)}.",
        name="regime",
        metavar="auto|R,…",
        repeated=True,
    )
    starts: tuple[Start, ...] | None = _parsed(
        AUTO,
        _or_auto(_words(STARTS)),
        "Initial head of regimes without layers: zero, or solved, the closed-form head. "
        "auto: both for the regime head, zero for the others.",
        name="start",
        metavar="auto|S,…",
    )
    fast: bool = _option(
        False, "Stop after the closed form on every layer, without training.", recorded=True
    )
    seeds: int = _option(
        1, "Number of random initialisations of memory and LoRA to try.", minimum=1, recorded=True
    )
    seed: int = _option(
        0, "Seed of the split, the order and the initialisation.", minimum=0, recorded=True
    )
    epochs: int | None = _option(
        None,
        f"Number of epochs at most (default: {DEFAULT_EPOCHS}). Training ends earlier if "
        "validation stops improving.",
        minimum=1,
        recorded=True,
    )
    minutes: float | None = _option(
        None, "Time limit in minutes, including reading and evaluation, instead of --epochs."
    )
    batch: int = _option(32, "Images per step.", minimum=1, recorded=True)
    augment: Augmentation | None = _option(
        "none",
        "Data augmentation. auto: by the size of the images.",
        choices=AUGMENTATIONS,
        recorded=True,
    )
    split: Fractions = _parsed(
        "80,10,10",
        _fractions,
        "Shares of train, val and test, for data without splits.",
        metavar="T,V,T",
    )
    task_type: TaskType | None = _option(
        None, "What the labels mean. auto: by the labels.", choices=TASK_TYPES, recorded=True
    )
    any_image: bool = _option(
        False, "The task applies to any image: fit no out-of-distribution detector.", recorded=True
    )
    exclude: Path | None = _option(
        None,
        "CSV file with a column `path`: images to leave out, such as the issues of an earlier run.",
        metavar="F.csv",
    )
    strict: bool = _option(False, "Stop before training if an image cannot be read.")
    keep_gb: float = _option(
        8.0, "Disk space in GB for decoded images and contexts during the run.", minimum=0
    )
    description: str = _option("", "What the task is about, shown in task lists.", metavar="TEXT")
    license: str | None = _option(None, "License of the bundle.", metavar="NAME")
    corrections: Corrections | None = None
    like: str | None = None  # digest of the bundle whose training is repeated

    def __post_init__(self) -> None:
        if self.epochs is not None and self.minutes is not None:
            raise SettingsConflict("Use either epochs or minutes, not both.")
        if self.fast and self.regimes is not None:
            raise SettingsConflict("Use either fast or regimes, not both.")
        if self.epochs is not None and self.epochs < 1:
            raise SettingsConflict(f"epochs is {self.epochs}, but must be at least 1.")
        if self.minutes is not None and not self.minutes > 0:
            raise SettingsConflict(f"minutes is {self.minutes:g}, but must be positive.")
        if self.batch < 1 or self.seeds < 1:
            raise SettingsConflict(
                f"batch is {self.batch} and seeds is {self.seeds}; both must be at least 1."
            )
        if min(self.split) < 0 or self.split[0] <= 0:
            raise SettingsConflict(
                f"split is {self.split}. Shares must not be negative, and train must have one."
            )
        # The limits of the manifest, checked before training and not when the bundle is written.
        _check_length("description", self.description, DEFAULT_LIMITS.max_description_chars)
        _check_length("license", self.license or "", DEFAULT_LIMITS.max_text_chars)

    def to_manifest(self, epochs: int) -> dict[str, Any]:
        """Return the recorded options that are set, with the number of epochs that were run.

        Minutes are not recorded: they are another number of epochs on another machine.
        """
        values = {name: getattr(self, name) for name in recorded_options()} | {"epochs": epochs}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
            if value is not None
        }

    def variants(
        self, task_type: TaskType = "single_label", *, extends: bool = False
    ) -> list[Variant]:
        """Return the variants to train.

        Regression, and tasks that extend others, have no closed form on every layer.
        """
        closed_form = not extends and task_type != "regression"
        regimes: Sequence[Regime] | None = ("layers",) if self.fast else self.regimes
        if regimes is None:
            # A head-only task cannot extend another.
            regimes = AUTO_REGIMES if closed_form else TRAINED_REGIMES[extends:]
        if not closed_form and any("layers" in parts_of(regime) for regime in regimes):
            raise SettingsConflict(
                "There is no closed form on every layer for regression, or for a task that extends "
                "others. Omit --fast and regimes with 'layers'."
            )
        starts: Sequence[Start] | None = ("zero",) if task_type == "regression" else self.starts
        seeds = range(self.seed, self.seed + self.seeds)
        return sweep(regimes, self.memory, self.rates, list(seeds), self.ranks, starts)


def flags() -> dict[str, Flag]:
    """Return the command-line options of `TrainOptions` by field name."""
    return {one.name: flag for one in fields(TrainOptions) if (flag := one.metadata.get("flag"))}


def recorded_options() -> list[str]:
    """Return the options that a manifest stores: all that determine the result of a run."""
    return [name for name, flag in flags().items() if flag.recorded]


def _check_length(name: str, text: str, limit: int) -> None:
    if len(text) > limit:
        raise SettingsConflict(f"The {name} has {len(text)} characters (limit {limit}).")
