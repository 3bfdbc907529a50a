"""What needs no training: the head that is solved from class tokens, and what a task knows."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.model import Backbone, TaskWeights
from server.model.closed_form import Floats, solve_discriminant, solve_ridge
from server.model.known import Known, fit_known
from server.model.masked_pass import masked_pass
from server.model.tasks import StackCache, prepare
from training.data.contexts import encode
from training.data.dataset import Problem
from training.data.images import ImageSet
from training.fitting.parts import Part
from training.fitting.variants import SolvedHead

Row = TypeVar("Row", bound=np.generic)

# A label that no training image has starts this many nats below one that is in the middle of all.
ABSENT = 10.0
MOST_IMAGES = 20_000  # that a head is solved from, and that tell what a task knows


def class_tokens(backbone: Backbone, part: Part, batch: int) -> Floats:
    """The backbone's class token of each image as it is, (n, D), rounded as contexts are kept.

    In the same batches however many are kept, so that the result is the same.
    """
    kept = [] if part.kept is None else part.kept.readouts
    first = len(kept) // batch * batch
    tokens = [*kept[:first], *_read(backbone, part.images, first, batch)]
    return torch.stack(tokens)[:, : backbone.width].double().numpy()


def _read(backbone: Backbone, images: ImageSet, first: int, batch: int) -> Sequence[Tensor]:
    tokens: list[Tensor] = []
    for start in range(first, len(images), batch):
        places = range(start, min(start + batch, len(images)))
        readout = encode(backbone, images.batch(places), rows=False).readout
        tokens += readout.cpu().half().float().unbind(0)
    return tokens


@torch.no_grad()
def row_features(backbone: Backbone, part: Part, batch: int) -> Floats:
    """What the row of a new task reads of each image before it has learned anything, (n, D).

    That is about the backbone's class token where there is one, and something else where not.
    """
    blank = torch.zeros(1, backbone.width)
    task = prepare(backbone, TaskWeights(blank, class_token=backbone.first_token))
    features = torch.empty(len(part), backbone.width)
    for start in range(0, len(part), batch):
        places = range(start, min(start + batch, len(part)))
        if part.kept is None:
            contexts, order = encode(backbone, part.images.batch(places)), list(range(len(places)))
        else:
            contexts, order = part.kept.batch(places)
        result = masked_pass(backbone, None, contexts, [[task]] * len(places), StackCache())
        features[[places[place] for place in order]] = result.logits[0].features.cpu()
    return features.double().numpy()


def solved_head(
    tokens: Floats, targets: npt.NDArray[np.generic], problem: Problem, outputs: int
) -> SolvedHead | None:
    """None where training has fewer than two classes."""
    tokens, targets = _some(tokens), _some(targets)
    weight, bias = torch.zeros(outputs, tokens.shape[1]), torch.full((outputs,), -ABSENT)
    if problem == "single_label":
        present, classes = np.unique(targets, return_inverse=True)
        if len(present) < 2:
            return None
        solved = solve_discriminant(tokens, classes)
    elif problem == "multi_label":
        marks = targets.astype(np.bool_)
        (present,) = np.nonzero(marks.any(axis=0) & ~marks.all(axis=0))
        bias[torch.from_numpy(marks.all(axis=0))] = ABSENT
        if not len(present):
            return None
        solved = solve_ridge(tokens, marks[:, present])
    else:
        return None
    weight[present], bias[present] = torch.from_numpy(solved.weight), torch.from_numpy(solved.bias)
    return SolvedHead(weight, bias)


def what_is_known(
    tokens: Floats, targets: npt.NDArray[np.generic], problem: Problem
) -> Known | None:
    """Where the class tokens of the training images lie."""
    tokens, targets = _some(tokens), _some(targets)
    single = problem == "single_label"
    return fit_known(tokens, np.unique(targets, return_inverse=True)[1] if single else None)


def _some(rows: npt.NDArray[Row]) -> npt.NDArray[Row]:
    """Evenly spread, which takes of all classes: images lie in the order of their paths."""
    return rows[:: 1 + (len(rows) - 1) // MOST_IMAGES]
