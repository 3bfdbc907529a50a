"""Heads from class names, which also serve as the prior of classes with few images.

`families.text_tower` creates them and `heads.lda` combines them with images. The head reads
features divided by their length, measured in the space that images share with texts.

Shapes: n examples, K classes, D width, E the width of the shared space.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# In the CLIP paper, class names are about as good as a linear head trained on four images per
# class.
TEXT_PRIOR_COUNT: Final = 4.0  # a class name counts like this many images of the class


@dataclass(frozen=True, slots=True)
class TextHead:
    """A normalised head computed from class names; a class may have no text."""

    labels: tuple[str, ...]  # (K,)
    weight: npt.NDArray[np.float32]  # (K, D); zero for a class without text
    bias: npt.NDArray[np.float32] | None  # (K,)
    projection: npt.NDArray[np.float32] | None  # (E, D); None if features are in the text space
    templates: tuple[str, ...] = ()  # the prompts in which the names were read

    @property
    def named(self) -> npt.NDArray[np.bool_]:
        """Which classes have a text, (K,)."""
        return np.asarray(self.weight.any(axis=1))

    @property
    def biases(self) -> Floats:
        """The bias, or zeros, (K,)."""
        return np.zeros(len(self.labels)) if self.bias is None else self.bias.astype(np.float64)

    def reindexed(self, labels: tuple[str, ...]) -> "TextHead":
        """Return the head for other classes in another order; new classes have no text."""
        index = {label: k for k, label in enumerate(self.labels)}
        weight = np.zeros((len(labels), self.weight.shape[1]), np.float32)
        bias, biases = np.zeros(len(labels), np.float32), self.biases
        for k, label in enumerate(labels):
            if label in index:
                weight[k] = self.weight[index[label]]
                bias[k] = biases[index[label]]
        return replace(self, labels=labels, weight=weight, bias=None if self.bias is None else bias)

    def merged_with(self, newer: "TextHead") -> "TextHead":
        """Return the classes of both; the newer head wins for a class that both have."""
        labels = tuple(sorted({*self.labels, *newer.labels}))
        old, new = self.reindexed(labels), newer.reindexed(labels)
        bias = None if newer.bias is None else np.where(new.named, new.biases, old.biases)
        weight = np.where(new.named[:, None], new.weight, old.weight)
        return replace(new, weight=weight, bias=None if bias is None else bias.astype(np.float32))

    def centred(self) -> "TextHead":
        """Subtract the mean of the named classes, where classes without text lie: same softmax."""
        named = self.named[:, None]
        weight = np.where(named, self.weight - self.weight[self.named].mean(axis=0), 0)
        return replace(self, weight=weight.astype(np.float32), bias=None)

    def normalised(self, features: npt.NDArray[np.floating]) -> Floats:
        """Divide features (n, D) by their length in the text space."""
        wide = features.astype(np.float64)
        projected = wide if self.projection is None else wide @ self.projection.T
        return np.asarray(wide / np.linalg.norm(projected, axis=1, keepdims=True))

    def share(self, counts: npt.ArrayLike) -> Floats:
        """Return the weight of a class's text beside this many images: 1 for none."""
        return np.asarray(TEXT_PRIOR_COUNT / (np.asarray(counts, np.float64) + TEXT_PRIOR_COUNT))

    def leave_one_out_logits(self, units: Floats, targets: npt.NDArray[np.bool_]) -> Floats:
        """Return the text's part of the logits (n, K), each example not counted itself."""
        shares = self.share(targets.sum(axis=0) - targets)
        return np.asarray(shares * (units @ self.weight.T + self.biases))
