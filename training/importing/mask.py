"""The attention mask saved in a checkpoint of the public reproduction: who extends whom.

Queries are CLS, the patches and the tasks' class tokens C_1 … C_T; keys are the same, then the
memories M_1 … M_T. The mask is added to the scores: 0 lets a query attend, -inf does not. All that
a mask can choose is which C_j a C_k attends to; everything else follows and is checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training.errors import InconsistentCheckpoint

Ancestors = tuple[frozenset[int], ...]  # of each task, by position from 0


@dataclass(frozen=True, slots=True)
class MaskLayout:
    """How many tokens of each sort there are."""

    base: int  # CLS and patches
    memory: tuple[int, ...]  # memory tokens of each task

    @property
    def tasks(self) -> int:
        return len(self.memory)

    @property
    def shape(self) -> tuple[int, int, int]:
        queries = self.base + self.tasks
        return 1, queries, queries + sum(self.memory)

    def token(self, index: int) -> str:
        """The name of a query or a key, for messages."""
        if index < self.base:
            return "CLS" if index == 0 else f"patch {index}"
        index -= self.base
        if index < self.tasks:
            return f"C_{index + 1}"
        index -= self.tasks
        for position, count in enumerate(self.memory, start=1):
            if index < count:
                return f"M_{position}"
            index -= count
        raise IndexError(index)


def read_ancestors(masks: Sequence[Tensor], layout: MaskLayout) -> Ancestors:
    """The tasks each task extends, directly or not, from the masks of all layers."""
    allowed = [_allowed(mask, layer, layout) for layer, mask in enumerate(masks)]
    first = allowed[0]
    for layer, other in enumerate(allowed):
        if (place := _first_difference(first, other)) is not None:
            query, key = map(layout.token, place)
            raise InconsistentCheckpoint(
                f"the attention masks of layers 0 and {layer} disagree on whether {query} attends "
                f"to {key}; the public reproduction has one mask for all layers"
            )
    seen = first[layout.base :, layout.base : layout.base + layout.tasks]  # (T, T)
    if (place := _first_difference(_expected(seen, layout), first)) is not None:
        query, key = map(layout.token, place)
        verb = "attends" if first[place] else "does not attend"
        raise InconsistentCheckpoint(
            "the attention mask is none that the public reproduction makes: "
            f"{query} {verb} to {key}"
        )
    return _ancestors(seen)


def direct_parents(ancestors: Ancestors, position: int) -> tuple[int, ...]:
    """The fewest ancestors that bring all the others along."""
    mine = ancestors[position]
    return tuple(sorted(mine - {old for parent in mine for old in ancestors[parent]}))


def _allowed(mask: Tensor, layer: int, layout: MaskLayout) -> Tensor:
    """True where a query may attend to a key, (queries, keys)."""
    if tuple(mask.shape) != layout.shape:
        raise InconsistentCheckpoint(
            f"the attention mask of layer {layer} is {tuple(mask.shape)}, but {layout.base} base "
            f"tokens, {layout.tasks} tasks and {sum(layout.memory)} memory tokens make it "
            f"{layout.shape}"
        )
    mask = mask[0]
    allowed = mask == 0
    if (place := _first_difference(allowed, mask != -torch.inf)) is not None:
        query, key = map(layout.token, place)
        raise InconsistentCheckpoint(
            f"the attention mask of layer {layer} is {float(mask[place]):g} for {query} and {key}; "
            "only 0 and -inf have a meaning"
        )
    return allowed


def _expected(seen: Tensor, layout: MaskLayout) -> Tensor:
    """The whole mask, as it follows from which class tokens see which.

    Base rows see base columns alone; class tokens see all of those, themselves, and a memory
    exactly where they see its class token.
    """
    _, queries, keys = layout.shape
    base, tasks = layout.base, layout.tasks
    expected = torch.zeros(queries, keys, dtype=torch.bool)
    expected[:, :base] = True
    own = seen | torch.eye(tasks, dtype=torch.bool)
    expected[base:, base : base + tasks] = own
    expected[base:, base + tasks :] = own.repeat_interleave(torch.tensor(layout.memory), dim=1)
    return expected


def _ancestors(seen: Tensor) -> Ancestors:
    rows = seen.tolist()
    ancestors = tuple(
        frozenset(j for j, sees in enumerate(row) if sees and j != k) for k, row in enumerate(rows)
    )
    for k, mine in enumerate(ancestors):
        for j in sorted(mine):
            if k in ancestors[j]:
                raise InconsistentCheckpoint(
                    f"the attention mask lets C_{k + 1} and C_{j + 1} attend to each other, and "
                    "tasks cannot extend each other in a circle"
                )
            if missing := ancestors[j] - mine:
                raise InconsistentCheckpoint(
                    f"the attention mask lets C_{k + 1} attend to C_{j + 1} but not to "
                    f"C_{min(missing) + 1}, which C_{j + 1} attends to; a task extends all that "
                    "its parents extend"
                )
    return ancestors


def _first_difference(one: Tensor, other: Tensor) -> tuple[int, int] | None:
    places = (one != other).nonzero()
    if not len(places):
        return None
    query, key = places[0].tolist()
    return query, key
