"""FastAPI and the `adapters` library: one backbone, T adapters and heads side by side (Parallel).

    python -m benchmarks.peers.servers.adapters_server MODEL PORT

`Parallel` repeats the batch for each adapter at the first layer that has one.
"""

import json
import sys

import torch
from adapters import ViTAdapterModel
from adapters.composition import Parallel
from torch import Tensor

from benchmarks.peers.servers.classifiers import best, read_photo
from benchmarks.peers.servers.waiting import serve

CLASSES = 100


class Adapted:
    def __init__(self, model: str) -> None:
        self._network = ViTAdapterModel.from_pretrained(model)
        self._names: list[str] = []

    @torch.inference_mode()
    def answer(self, photos: list[Tensor], tasks: int) -> list[str]:
        while len(self._names) < tasks:
            name = f"task{len(self._names)}"
            self._network.add_adapter(name, config="seq_bn")
            self._network.add_image_classification_head(name, num_labels=CLASSES)
            self._names.append(name)
            self._network.train(False)
        names = self._names[:tasks]
        self._network.active_adapters = Parallel(*names) if tasks > 1 else names[0]
        self._network.active_head = names if tasks > 1 else names[0]
        outputs = self._network(torch.stack(photos))
        logits = [each.logits.numpy() for each in (outputs if tasks > 1 else [outputs])]
        return [json.dumps([best(rows[place]) for rows in logits]) for place in range(len(photos))]


if __name__ == "__main__":
    serve(read_photo, Adapted(sys.argv[1]).answer, int(sys.argv[2]))
