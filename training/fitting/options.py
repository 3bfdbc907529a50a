"""How to train: everything a run can be told, checked before it begins."""

from dataclasses import dataclass

from task_store.limits import DEFAULT_LIMITS
from training.data.augment import Augmentation
from training.data.dataset import Problem
from training.data.splits import DEFAULT_FRACTIONS, Fractions
from training.errors import SettingsConflict
from training.fitting.variants import AUTO_RATES, Regime, Variant, sweep

DEFAULT_EPOCHS = 20
DEFAULT_KEEP_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True)
class Options:
    """The defaults are the paper's recipe."""

    memory: tuple[int, ...] = (1, 5, 10)
    rates: tuple[float, ...] = AUTO_RATES
    regimes: tuple[Regime, ...] = ("memory",)
    seeds: int = 1
    seed: int = 0
    epochs: int | None = None
    minutes: float | None = None
    batch: int = 32
    augment: Augmentation | None = None  # None: by the size of the images
    split: Fractions = DEFAULT_FRACTIONS
    problem: Problem | None = None  # None: by the labels
    keep_bytes: int = DEFAULT_KEEP_BYTES
    description: str = ""
    license: str | None = None

    def __post_init__(self) -> None:
        if self.epochs is not None and self.minutes is not None:
            raise SettingsConflict("give epochs or minutes, not both")
        if self.epochs is not None and self.epochs < 1:
            raise SettingsConflict(f"{self.epochs} epochs are too few; train for one or more")
        if self.minutes is not None and not self.minutes > 0:
            raise SettingsConflict(f"{self.minutes:g} minutes are too few")
        if self.batch < 1 or self.seeds < 1:
            raise SettingsConflict("a batch has one image or more, and a sweep one seed or more")
        if min(self.split) < 0 or self.split[0] <= 0:
            raise SettingsConflict("the shares of a split are not negative, and training has one")
        # The manifest's limits, checked now and not when the trained bundle is written.
        _check_length("description", self.description, DEFAULT_LIMITS.max_description_chars)
        _check_length("license", self.license or "", DEFAULT_LIMITS.max_text_chars)

    def variants(self) -> list[Variant]:
        seeds = range(self.seed, self.seed + self.seeds)
        return sweep(self.regimes, self.memory, self.rates, list(seeds))


def _check_length(what: str, text: str, most: int) -> None:
    if len(text) > most:
        raise SettingsConflict(f"the {what} has {len(text)} characters, and {most} are allowed")
