"""Contexts of the images of a run, computed once and kept if they fit.

Kept contexts are in half precision. All contexts of a set are rounded to half precision, kept or
not, and computed in the same batches, so that the result does not depend on how many fit or on
interruptions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from engram_server.model import Backbone, ContextBatch
from torch import Tensor

from engram_training.data.images import ImageSet, KeptImageSet, encode
from engram_training.data.workspace import OnProgress, Scratch, Slot


@dataclass(eq=False)
class KeptContexts:
    """The contexts of the first images of a set, as many as fit."""

    backbone: Backbone
    images: ImageSet
    scratch: Scratch
    rows: bool = field(kw_only=True)  # False: only readouts
    readouts: list[Tensor] = field(default_factory=list)  # of the kept images, in half precision
    _states: list[Slot | None] = field(default_factory=list)

    def __len__(self) -> int:
        """Return the number of kept images."""
        return len(self.readouts)

    def fill(
        self,
        batch: int,
        on_progress: OnProgress | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Encode images until all are kept or no more fit."""
        if isinstance(self.images, KeptImageSet):
            return  # in their folder
        for start in range(0, len(self.images), batch):
            indices = range(start, min(start + batch, len(self.images)))
            if stop() or not self.keep(encode(self.backbone, self.images.batch(indices))):
                return
            if on_progress is not None:
                on_progress(len(self), len(self.images))

    def batch(self, indices: Sequence[int]) -> tuple[ContextBatch, list[int]]:
        """Return the contexts of these images, and their order as positions in `indices`."""
        cold = [i for i, index in enumerate(indices) if index >= len(self)]
        warm = [i for i, index in enumerate(indices) if index < len(self)]
        parts = []
        if cold:
            inputs = self.images.inputs([indices[i] for i in cold], rows=self.rows)
            made = encode(self.backbone, inputs, rows=self.rows)
            states = tuple(layer.half().to(layer.dtype) for layer in made.states)
            parts.append(ContextBatch(states, made.readout.half().float()))
        if warm:
            parts.append(self._read([indices[i] for i in warm]))
        joined = parts[0] if len(parts) == 1 else parts[0].join(parts[1])
        return joined, cold + warm

    def keep(self, contexts: ContextBatch) -> bool:
        """Keep the contexts of the next images; False if no more fit."""
        readout = contexts.readout.cpu().half()
        layers = [layer.half() for layer in contexts.states] if self.rows else []
        for index in range(len(contexts)):
            slot = None
            if self.rows:
                states = torch.stack([layer[:, index] for layer in layers])
                slot = self.scratch.put(states.cpu().numpy())
                if slot is None:
                    return False
            self._states.append(slot)
            self.readouts.append(readout[index])
        return True

    def _read(self, indices: Sequence[int]) -> ContextBatch:
        device, dtype = self.backbone.device, self.backbone.dtype
        readout = torch.stack([self.readouts[index] for index in indices]).to(device).float()
        if not self.rows:
            return ContextBatch((), readout)
        kept = [slot for index in indices if (slot := self._states[index]) is not None]
        images = [torch.from_numpy(self.scratch.get(slot)) for slot in kept]
        layers, _, *shape = images[0].shape
        states = []
        for layer in range(layers):
            # Copied from the file directly into the layout of a pass.
            whole = torch.empty(2, len(indices), *shape, dtype=dtype)
            for position, image in enumerate(images):
                whole[:, position].copy_(image[layer])
            states.append(whole.to(device))
        return ContextBatch(tuple(states), readout)
