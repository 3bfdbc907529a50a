"""T fine-tuned classifiers, one whole network each, and how all peers read a photo."""

import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import ViTForImageClassification

BATCH = 8  # as many as there are clients: more never wait
WAIT_SECONDS = 0.05  # for a batch to fill: little beside a pass


def open_photo(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def square(data: bytes) -> Image.Image:
    return open_photo(data).resize((224, 224), Image.Resampling.BILINEAR)


def read_photo(data: bytes) -> Tensor:
    """A photo as these networks take it: (3, 224, 224), from -1 to 1."""
    pixels = torch.from_numpy(np.array(square(data)))
    return pixels.permute(2, 0, 1).float().div_(127.5).sub_(1.0)


def best(logits: np.ndarray) -> dict[str, float]:
    """The best class of one task."""
    index = int(logits.argmax())
    exponents = np.exp(logits - logits[index])
    return {"index": index, "score": float(1 / exponents.sum())}


def own_weights(network: nn.Module) -> nn.Module:
    """With memory of its own: T loads of one file would share its pages, T fine-tuned ones not."""
    for parameter in network.parameters():
        parameter.data = parameter.data.clone()
    return network


class Classifiers:
    """Networks are loaded when a request first wants so many: one start serves every T."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._networks: list[nn.Module] = []

    def _first(self, count: int) -> list[nn.Module]:
        while len(self._networks) < count:
            network = ViTForImageClassification.from_pretrained(
                self._folder, attn_implementation="sdpa"
            )
            network.train(False)
            self._networks.append(own_weights(network))
        return self._networks[:count]

    @torch.inference_mode()
    def answer(self, photos: list[Tensor], tasks: int) -> list[str]:
        """For each photo, what the first `tasks` networks say, as JSON."""
        pixels = torch.stack(photos)
        logits = [network(pixels).logits.numpy() for network in self._first(tasks)]
        return [json.dumps([best(rows[place]) for rows in logits]) for place in range(len(photos))]
