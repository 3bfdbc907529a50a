"""Rules for automatic rollback: `errors>0.05`, `not_finite>0`, `out_of_distribution>0.5`.

A rule applies to the newest version of a task while it is the default, so a rollback is never
followed by another. It is checked for every window of images that a server has answered.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Figure = Literal["errors", "not_finite", "out_of_distribution"]

WINDOW_IMAGES: Final = 200
_RULE = re.compile(r"\s*(\w+)\s*>\s*([0-9.]+)\s*")


@dataclass(frozen=True, slots=True)
class Rule:
    """Roll back if a share of the images of a window is above a limit."""

    figure: Figure
    limit: float

    @classmethod
    def parse(cls, text: str) -> "Rule":
        """Read a rule, or raise ValueError."""
        match = _RULE.fullmatch(text)
        known = get_args(Figure)
        if match is None or match[1] not in known or not 0 <= float(match[2]) < 1:
            raise ValueError(
                f"'{text}' is not a rule. Examples: errors>0.05, out_of_distribution>0.5. Figures: "
                f"{', '.join(known)}"
            )
        return cls(match[1], float(match[2]))  # type: ignore[arg-type]  # checked above


@dataclass(slots=True)
class Window:
    """The images that a version has answered since its last check."""

    images: int = 0
    counts: dict[Figure, int] = field(default_factory=dict)

    def add(self, images: int, counts: Mapping[Figure, int]) -> None:
        self.images += images
        for figure, count in counts.items():
            self.counts[figure] = self.counts.get(figure, 0) + count

    def broken(self, rules: Sequence[Rule]) -> str | None:
        """Return which rule a full window breaks, for the log."""
        for rule in rules:
            share = self.counts.get(rule.figure, 0) / max(1, self.images)
            if share > rule.limit:
                return (
                    f"rolled back automatically: {rule.figure} {share:.3g} > {rule.limit:g} on "
                    f"{self.images} images"
                )
        return None
