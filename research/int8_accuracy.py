"""What eight bits change in the answers of the demo tasks: `python -m research.int8_accuracy DATA`.

Every test image of every demo task is asked of the backbone in float32 and in int8, and the answers
are compared image by image. DATA is what `research.demo_data` made. Prints the table of
docs/explanation/precision.md: accuracy, top-1 agreement, calibration error, and by how much the
probability of the first label moves; below it the answers that changed most.

int8 is asked twice: with this processor's own kernels, and with the weights of processors that add
products in 32 bits, in floats that hold the same values.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from research.demo_limits import TASKS, read_task
from server import embedded
from server.model import Backbone, load_backbone
from server.model.linear import PackedWeight
from server.model.masked_pass import masked_pass
from server.model.multitask import weights_of
from server.model.tasks import StackCache, prepare
from task_store import TaskBundle
from training.judging.metrics import calibrate

BATCH: Final = 32
WORST: Final = 3  # changed answers listed for each task


class RoundedWeight(PackedWeight):
    """`Int8Weight` on a processor that adds products in 32 bits, computed in floats."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight)
        steps = weight.abs().amax(dim=1, keepdim=True).clamp_min(1e-30) / 127
        self._weight = (weight / steps).round() * steps
        self.nbytes = self._weight.nbytes

    def apply(self, rows: Tensor, bias: Tensor) -> Tensor:
        smallest, largest = rows.amin(dim=1, keepdim=True), rows.amax(dim=1, keepdim=True)
        steps = (largest - smallest).clamp_min(1e-30) / 255
        return F.linear(((rows - smallest) / steps).round() * steps + smallest, self._weight, bias)


def with_rounded_weights(backbone: Backbone) -> Backbone:
    return replace(backbone, blocks=tuple(block.packed(RoundedWeight) for block in backbone.blocks))


def answers(
    backbones: Mapping[str, Backbone], bundle: TaskBundle, paths: Sequence[Path]
) -> dict[str, Tensor]:
    """Logits (n, K) of the images, by precision."""
    tasks = {name: prepare(each, weights_of(bundle)) for name, each in backbones.items()}
    stacks = {name: StackCache() for name in backbones}
    logits: dict[str, list[Tensor]] = {name: [] for name in backbones}
    preprocessing = next(iter(backbones.values())).preprocessing
    for start in range(0, len(paths), BATCH):
        files = [path.read_bytes() for path in paths[start : start + BATCH]]
        views = np.stack([preprocessing(file, max_pixels=None) for file in files])
        pixels = preprocessing.normalise(torch.from_numpy(views))
        for name, backbone in backbones.items():
            with torch.inference_mode():
                requested = [[tasks[name]]] * len(pixels)
                result = masked_pass(backbone, pixels, None, requested, stacks[name])
            logits[name].append(result.logits[0].values)
    return {name: torch.cat(parts) for name, parts in logits.items()}


@dataclass(frozen=True, slots=True)
class Change:
    """How the answers in one precision differ from those in float32."""

    accuracy: tuple[float, float]  # before and after
    calibration_error: tuple[float, float]
    agreement: float  # images with the same first label
    moved: float  # mean change of the first label's probability
    worst: list[str]


def compare(
    before: Tensor, after: Tensor, targets: Tensor, labels: Sequence[str], paths: Sequence[Path]
) -> Change:
    shares = before.softmax(dim=1), after.softmax(dim=1)
    first = before.argmax(dim=1)
    moved = (shares[1] - shares[0]).gather(1, first[:, None])[:, 0].abs()
    changed = (after.argmax(dim=1) != first).nonzero()[:, 0].tolist()
    worst = sorted(changed, key=lambda i: -float(moved[i]))[:WORST]

    def told(logits: Tensor, of: Tensor, image: int) -> str:
        label = int(logits[image].argmax())
        return f"{labels[label]} {float(of[image, label]):.2f}"

    def quality(logits: Tensor, of: Tensor) -> tuple[float, float]:
        right = (logits.argmax(dim=1) == targets).double().numpy()
        return float(right.mean()), calibrate(of.amax(dim=1).double().numpy(), right).error

    (right, error), (right_after, error_after) = (
        quality(before, shares[0]),
        quality(after, shares[1]),
    )
    lines = [
        f"{paths[i].parent.name}/{paths[i].name}: {told(before, shares[0], i)} became "
        f"{told(after, shares[1], i)}"
        for i in worst
    ]
    agreement = 1 - len(changed) / len(before)
    return Change((right, right_after), (error, error_after), agreement, float(moved.mean()), lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="+", default=TASKS)
    parser.add_argument("--most", type=int, help="images of a task, evenly chosen; else all")
    given = parser.parse_args(arguments)
    loaded = load_backbone(embedded.BACKBONE)
    int8 = {"int8 here": loaded.packed(int8=True), "int8 wide": with_rounded_weights(loaded)}
    for name in given.only:
        bundle = TaskBundle.load(embedded.TASKS / f"{name}.safetensors")
        part = read_task(name, given.data, bundle).part("test")
        step = max(1, len(part.samples) // (given.most or len(part.samples)))
        paths = [sample.path for sample in part.samples][::step]
        targets = torch.from_numpy(part.targets())[::step]
        logits = answers({"float32": loaded, **int8}, bundle, paths)
        for precision in int8:
            change = compare(logits["float32"], logits[precision], targets, bundle.labels, paths)
            line = {"task": name, "images": len(paths), "precision": precision}
            print(json.dumps(line | {field: getattr(change, field) for field in change.__slots__}))


if __name__ == "__main__":
    main()
