"""Gives the demo tasks a temperature and what they know: `python -m research.demo_limits DATA`.

What `engram train` fits after training (`training.judging.calibration`, `training.fitting.solving`)
on bundles that were trained before it did. DATA is what `research.demo_data` made. The trained
weights stay but for the temperature, so no answer changes its order. Prints the figures of
docs/explanation/teaching.md: accuracy and calibration error on test images, how many of them are
called unknown, and how well each task tells its own test images from those of the others.

A pass over all images takes a quarter of an hour on one core; class tokens and logits are kept in
`--kept`, so that another run takes seconds.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from server import embedded
from server.model import Backbone, load_backbone
from server.model.known import Known
from server.model.masked_pass import masked_pass
from server.model.multitask import weights_of
from server.model.tasks import StackCache, TaskWeights, prepare
from task_store import KnownSpec, TaskBundle
from training.data.dataset import SPLITS, DataSet, read_data, split_data
from training.fitting.solving import what_is_known
from training.judging.calibration import fit_temperature, tempered
from training.judging.metrics import Figures, figures, manifest_metrics
from training.run import DEFAULT_FRACTIONS

TASKS: Final = ("cifar10", "cifar100", "flowers", "leaves", "quality")
ABOUT_ANY_IMAGE: Final = ("quality",)  # as with `engram train --any-image`
# Made of pictures of 32 pixels and asked about photos: those lie up to 2.3 times as far as the
# threshold. So far these two let them in.
FURTHER: Final = {"cifar10": 1.85, "cifar100": 1.75}
BATCH: Final = 32

Floats = npt.NDArray[np.float64]
Kept = dict[str, npt.NDArray[np.float32]]  # tokens and logits by split


def passes(backbone: Backbone, weights: TaskWeights, data: DataSet) -> Kept:
    """The backbone's class token and the task's logits of every image, by split."""
    head = torch.zeros(1, backbone.width)
    reader, task = prepare(backbone, TaskWeights(head)), prepare(backbone, weights)
    kept: Kept = {}
    stacks = StackCache()
    for split in SPLITS:
        paths = [sample.path for sample in data.part(split).samples]
        tokens, logits = [], []
        for start in range(0, len(paths), BATCH):
            files = [path.read_bytes() for path in paths[start : start + BATCH]]
            views = [backbone.preprocessing(file, max_pixels=None) for file in files]
            pixels = torch.from_numpy(np.stack(views))
            with torch.inference_mode():
                view = backbone.preprocessing.normalise(pixels, backbone.dtype)
                result = masked_pass(backbone, view, None, [[reader, task]] * len(view), stacks)
            by_task = {each.task: each for each in result.logits}
            tokens.append(by_task[reader].features.half().float().numpy())
            logits.append(by_task[task].values.numpy())
        kept[f"{split}.tokens"] = np.concatenate(tokens)
        kept[f"{split}.logits"] = np.concatenate(logits)
    return kept


def region(data: DataSet, kept: Kept) -> Known:
    """What a task of this data knows."""
    tokens = kept["train.tokens"].astype(np.float64)
    known = what_is_known(tokens, data.part("train").targets(), data.problem)
    assert known is not None, "the demo tasks have enough images"
    return replace(known, threshold=known.threshold * FURTHER.get(data.name, 1.0))


def with_limits(bundle: TaskBundle, data: DataSet, kept: Kept, known: Known | None) -> TaskBundle:
    """The bundle with a temperature, what it knows, and its figures as they are then."""
    targets = {split: data.part(split).targets() for split in SPLITS}
    val = torch.from_numpy(kept["val.logits"]), torch.from_numpy(targets["val"])
    temperature = fit_temperature(*val, data.problem)
    weights = tempered(weights_of(bundle), temperature)
    judged: dict[str, Figures] = {
        split: figures(
            torch.from_numpy(kept[f"{split}.logits"]) / temperature,
            torch.from_numpy(targets[split]),
            data.problem,
            data.labels,
        )
        for split in SPLITS[1:]
    }
    manifest = bundle.manifest.model_copy(
        update={
            "temperature": temperature * (bundle.manifest.temperature or 1.0),
            "known": None if known is None else KnownSpec(threshold=known.threshold),
            "metrics": {**bundle.manifest.metrics, **manifest_metrics(judged)},
        }
    )
    assert weights.head_bias is not None
    assert bundle.golden_logits is not None
    return replace(
        bundle,
        manifest=manifest,
        head_weight=weights.head_weight.numpy(),
        head_bias=weights.head_bias.numpy(),
        known_means=None if known is None else known.means,
        known_axes=None if known is None else known.axes,
        golden_logits=bundle.golden_logits / np.float32(temperature),
    )


def auroc(own: Floats, others: Floats) -> float:
    """How often another image lies further than an own one."""
    ranks = np.argsort(np.argsort(np.concatenate([own, others]), kind="stable"), kind="stable")
    beyond = ranks[len(own) :].sum() - len(others) * (len(others) - 1) / 2
    return float(beyond / (len(own) * len(others)))


def report(
    bundles: dict[str, TaskBundle], known_of: dict[str, Known], tokens: dict[str, Floats]
) -> None:
    """A line of JSON for each task."""
    for name, bundle in bundles.items():
        known = known_of[name]
        threshold = known.threshold
        distances = {other: known.distances(tokens[other]) for other in bundles}
        own, metrics = distances[name], bundle.manifest.metrics
        line = {
            "task": name,
            "accuracy": metrics["test_accuracy"],
            "calibration_error": metrics["test_calibration_error"],
            "temperature": round(bundle.manifest.temperature or 1, 3),
            "own_unknown": round(float((own > threshold).mean()), 4),
            "auroc": {n: round(auroc(own, d), 4) for n, d in distances.items() if n != name},
            "unknown": {n: round(float((d > threshold).mean()), 3) for n, d in distances.items()},
            "bytes": bundle.size_bytes,
        }
        print(json.dumps(line))


def read_task(name: str, folder: Path, bundle: TaskBundle) -> DataSet:
    """The data that a bundle was trained on, split as it was then."""
    data = read_data(folder / name)
    about = bundle.manifest.training["data"]
    assert isinstance(about, dict)
    if about["digest"] != data.digest:
        raise SystemExit(f"{folder / name} is not the data that '{name}' was trained on")
    return split_data(data, DEFAULT_FRACTIONS, seed=0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", type=Path, default=embedded.TASKS, help="folder of bundles")
    parser.add_argument("--out", type=Path, help="where to write the bundles; else only figures")
    parser.add_argument("--kept", type=Path, default=Path("build/demo-limits"))
    parser.add_argument("--only", nargs="+", default=TASKS)
    given = parser.parse_args(arguments)
    given.kept.mkdir(parents=True, exist_ok=True)
    backbone = load_backbone(embedded.BACKBONE)
    bundles: dict[str, TaskBundle] = {}
    known_of: dict[str, Known] = {}
    tokens: dict[str, Floats] = {}
    for name in given.only:
        bundle = TaskBundle.load(given.tasks / f"{name}.safetensors")
        data = read_task(name, given.data, bundle)
        place = given.kept / f"{name}.npz"
        if not place.exists():
            made = passes(backbone, weights_of(bundle), data)
            np.savez(place, allow_pickle=False, **made)
        with np.load(place) as file:
            kept = dict(file)
        known_of[name] = region(data, kept)
        told = None if name in ABOUT_ANY_IMAGE else known_of[name]
        bundles[name] = with_limits(bundle, data, kept, told)
        tokens[name] = kept["test.tokens"].astype(np.float64)
        if given.out is not None:
            bundles[name].save(given.out / f"{name}.safetensors")
    report(bundles, known_of, tokens)


if __name__ == "__main__":
    main()
