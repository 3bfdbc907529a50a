"""What class names say, as a head: the prior of classes that photos are given of, too.

`server.model.text` makes it, and `server.model.closed_form` mixes it with photos. It reads features
divided by their length: that of their projection into the space which images share with texts.

Shapes: n examples, K classes, D width, E the width of the shared space.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# The paper of CLIP finds its names about as good as a linear head of four photos a class.
TEXT_PULL: Final = 4.0  # what a name says counts like so many photos of the class


@dataclass(frozen=True, slots=True)
class TextHead:
    """A normalised head made of class names, some of which it may not have read."""

    labels: tuple[str, ...]  # (K,)
    weight: npt.NDArray[np.float32]  # (K, D); zero where there is no text
    bias: npt.NDArray[np.float32] | None  # (K,)
    projection: npt.NDArray[np.float32] | None  # (E, D); None where D is the space of texts
    templates: tuple[str, ...] = ()  # in which the names were read

    @property
    def named(self) -> npt.NDArray[np.bool_]:
        """(K,): whether a text was read for the class."""
        return np.asarray(self.weight.any(axis=1))

    @property
    def biases(self) -> Floats:
        """(K,), also where there is none."""
        return np.zeros(len(self.labels)) if self.bias is None else self.bias.astype(np.float64)

    def over(self, labels: tuple[str, ...]) -> "TextHead":
        """The same for other classes in another order."""
        place = {label: k for k, label in enumerate(self.labels)}
        weight = np.zeros((len(labels), self.weight.shape[1]), np.float32)
        bias, biases = np.zeros(len(labels), np.float32), self.biases
        for k, label in enumerate(labels):
            if label in place:
                weight[k] = self.weight[place[label]]
                bias[k] = biases[place[label]]
        return replace(self, labels=labels, weight=weight, bias=None if self.bias is None else bias)

    def joined(self, newer: "TextHead") -> "TextHead":
        """The classes of both; what the newer one says of a class replaces what was said."""
        labels = tuple(sorted({*self.labels, *newer.labels}))
        old, new = self.over(labels), newer.over(labels)
        bias = None if newer.bias is None else np.where(new.named, new.biases, old.biases)
        weight = np.where(new.named[:, None], new.weight, old.weight)
        return replace(new, weight=weight, bias=None if bias is None else bias.astype(np.float32))

    def centred(self) -> "TextHead":
        """Named classes around their mean, where those without a text are: the same softmax."""
        named = self.named[:, None]
        weight = np.where(named, self.weight - self.weight[self.named].mean(axis=0), 0)
        return replace(self, weight=weight.astype(np.float32), bias=None)

    def units(self, features: npt.NDArray[np.floating]) -> Floats:
        """What the head reads of features (n, D): each divided by its length."""
        wide = features.astype(np.float64)
        measured = wide if self.projection is None else wide @ self.projection.T
        units: Floats = wide / np.linalg.norm(measured, axis=1, keepdims=True)
        return units

    def share(self, counts: npt.ArrayLike) -> Floats:
        """How much the text of a class counts beside so many photos; all, where it has none."""
        return np.asarray(TEXT_PULL / (np.asarray(counts, np.float64) + TEXT_PULL))

    def said_without_each(self, units: Floats, targets: npt.NDArray[np.bool_]) -> Floats:
        """What the text adds to the logits (n, K) of examples, each not counted itself."""
        shares = self.share(targets.sum(axis=0) - targets)
        said: Floats = shares * (units @ self.weight.T + self.biases)
        return said
