"""What a run tells while it runs. The base class hears everything and says nothing."""

from collections.abc import Callable

from training.loop import Tick

Told = Callable[[int, int], None]  # how many of how many are done


class Watcher:
    """Override what is of interest."""

    def stage(self, name: str) -> Told | None:
        """A stage begins; what it returns is called as it goes on."""
        return None

    def training(self, steps: int, score: str) -> Callable[[Tick], None] | None:
        """Training begins; what it returns is called after every step. `score` names the score."""
        return None

    def note(self, text: str) -> None:
        """Something that a person should know."""
