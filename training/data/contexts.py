"""Contexts of the images of a run: made by the backbone once, and kept where that is possible.

Kept contexts are in half precision. So that a result never depends on how many fit, or on where a
run was interrupted, all contexts of a set that may be kept are rounded to half precision, kept or
not, and are made in the same batches every time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from server.model import Backbone, ContextBatch
from server.model.masked_pass import encode as encode_images
from training.data.images import ImageSet
from training.data.workspace import Scratch, Slot
from training.progress import OnProgress


def encode(backbone: Backbone, pixels: Tensor, *, rows: bool = True) -> ContextBatch:
    """What the backbone makes of uint8 images (B, H, W, 3); without `rows`, only the readout."""
    view = backbone.preprocessing.normalise(pixels.to(backbone.device), backbone.dtype)
    contexts = encode_images(backbone, view)
    return contexts if rows else ContextBatch((), contexts.readout)


@dataclass(eq=False)
class KeptContexts:
    """The contexts of a set of images, in its order, as far as they fit."""

    backbone: Backbone
    images: ImageSet
    scratch: Scratch
    rows: bool = field(kw_only=True)  # False: the readouts alone
    _readouts: list[Tensor] = field(default_factory=list)
    _states: list[Slot | None] = field(default_factory=list)

    def __len__(self) -> int:
        """How many images, from the first on, are kept."""
        return len(self._readouts)

    def fill(
        self,
        batch: int,
        on_progress: OnProgress | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Runs the backbone over the images until all are kept or no more fit."""
        for start in range(0, len(self.images), batch):
            places = range(start, min(start + batch, len(self.images)))
            if stop() or not self.keep(encode(self.backbone, self.images.batch(places))):
                return
            if on_progress is not None:
                on_progress(len(self), len(self.images))

    @property
    def readouts(self) -> list[Tensor]:
        """What is kept of every image, from the first on: (n · D,) each."""
        return self._readouts

    def batch(self, places: Sequence[int]) -> tuple[ContextBatch, list[int]]:
        """Contexts of these images, and the order they are in: positions in `places`."""
        cold = [i for i, place in enumerate(places) if place >= len(self)]
        warm = [i for i, place in enumerate(places) if place < len(self)]
        parts = []
        if cold:
            pixels = self.images.batch([places[i] for i in cold])
            made = encode(self.backbone, pixels, rows=self.rows)
            states = tuple(layer.half().to(layer.dtype) for layer in made.states)
            parts.append(ContextBatch(states, made.readout.half().float()))
        if warm:
            parts.append(self._read([places[i] for i in warm]))
        joined = parts[0] if len(parts) == 1 else parts[0].join(parts[1])
        return joined, cold + warm

    def keep(self, contexts: ContextBatch) -> bool:
        """Those of the next images; False where no more fit."""
        readout = contexts.readout.cpu()
        layers = [layer.half() for layer in contexts.states] if self.rows else []
        for place in range(len(contexts)):
            slot = None
            if self.rows:
                states = torch.stack([layer[:, place] for layer in layers])
                slot = self.scratch.put(states.cpu().numpy())
                if slot is None:
                    return False
            self._states.append(slot)
            self._readouts.append(readout[place].half().float())
        return True

    def _read(self, places: Sequence[int]) -> ContextBatch:
        device, dtype = self.backbone.device, self.backbone.dtype
        readout = torch.stack([self._readouts[place] for place in places]).to(device)
        if not self.rows:
            return ContextBatch((), readout)
        kept = [slot for place in places if (slot := self._states[place]) is not None]
        images = [torch.from_numpy(self.scratch.get(slot)) for slot in kept]
        layers, _, *shape = images[0].shape
        states = []
        for layer in range(layers):
            # Straight from the file into the layout of a pass, turned to floats on the way.
            whole = torch.empty(2, len(places), *shape, dtype=dtype)
            for position, image in enumerate(images):
                whole[:, position].copy_(image[layer])
            states.append(whole.to(device))
        return ContextBatch(tuple(states), readout)
