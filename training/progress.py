"""What a run reports while it runs."""

from collections.abc import Callable
from dataclasses import dataclass

OnProgress = Callable[[int, int], None]  # how many are done, of how many


@dataclass(frozen=True, slots=True)
class Tick:
    step: int
    steps: int
    loss: float  # of the variant with the lowest loss on this batch
    score: float  # the highest of this epoch so far
    images_per_second: float


class Watcher:
    """Ignores everything; override what is of interest."""

    def stage(self, name: str) -> OnProgress | None:
        """A stage begins; what it returns is called as it goes on."""
        return None

    def training(self, steps: int, score: str) -> Callable[[Tick], None] | None:
        """Training begins; what it returns is called after every step. `score` names the score."""
        return None

    def note(self, text: str) -> None:
        """Something that a person should know."""
