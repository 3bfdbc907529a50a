"""Converts the backbone for OpenVINO, in fp32 and in int8 calibrated with NNCF.

    python -m benchmarks.peers.servers.openvino_model MODEL OUT PHOTO…

Writes OUT/float32.xml and OUT/int8.xml. int8 is NNCF's preset for transformers, which also smooths
activations; calibrated on crops of the photos.
"""

import sys
from pathlib import Path

import nncf
import numpy as np
import openvino
import torch
from openvino.preprocess import PrePostProcessor
from torch import Tensor, nn
from transformers import ViTModel

from benchmarks.peers.servers.classifiers import open_photo

CROPS = 300  # NNCF's own number of samples


class ClassToken(nn.Module):
    """The backbone, answering what heads read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.network = ViTModel.from_pretrained(
            folder, add_pooling_layer=False, attn_implementation="sdpa"
        )
        self.train(False)

    def forward(self, pixel_values: Tensor) -> Tensor:
        tokens: Tensor = self.network(pixel_values).last_hidden_state
        return tokens[:, 0]


def from_bytes(model: openvino.Model) -> openvino.Model:
    """The same with normalising in front: takes (B, 224, 224, 3) bytes."""
    steps = PrePostProcessor(model)
    steps.input().tensor().set_element_type(openvino.Type.u8).set_layout(openvino.Layout("NHWC"))
    steps.input().model().set_layout(openvino.Layout("NCHW"))
    steps.input().preprocess().convert_element_type(openvino.Type.f32).mean(127.5).scale(127.5)
    return steps.build()


def crops(photos: list[Path]) -> list[np.ndarray]:
    """Batches of one, as bytes."""
    random = np.random.default_rng(0)
    opened = [open_photo(photo.read_bytes()) for photo in photos]
    found = []
    for number in range(CROPS):
        photo = opened[number % len(opened)]
        side = int(random.integers(min(photo.size) // 2, min(photo.size) + 1))
        left = int(random.integers(photo.width - side + 1))
        top = int(random.integers(photo.height - side + 1))
        cut = photo.crop((left, top, left + side, top + side)).resize((224, 224))
        found.append(np.array(cut)[None])
    return found


def main(folder: Path, out: Path, photos: list[Path]) -> None:
    example = torch.zeros(1, 3, 224, 224)
    plain = openvino.convert_model(ClassToken(folder), example_input=example)
    plain.reshape([-1, 3, 224, 224])
    model = from_bytes(plain)
    out.mkdir(parents=True, exist_ok=True)
    openvino.save_model(model, out / "float32.xml", compress_to_fp16=False)
    quantised = nncf.quantize(
        model, nncf.Dataset(crops(photos)), model_type=nncf.ModelType.TRANSFORMER
    )
    openvino.save_model(quantised, out / "int8.xml", compress_to_fp16=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), [Path(photo) for photo in sys.argv[3:]])
