"""`python -m research.measure_backbone`: how good a backbone's class token is, and how fast.

A closed-form probe (linear discriminant analysis) measures how well the class token separates
classes, independent of any training recipe. Data is a folder with

    cifar100/{train,test}/<class>/…     flowers102/{train,test}/<class>/…
    pets/{train,test}/<class>/…         imagenet/<wnid>_<name>.JPEG, one of each of 1,000 classes

of which parts may be missing. Several backbones (`folder` or `folder@size`) are timed in turns, so
that other work on the machine slows all of them alike.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from engram_server.model import Backbone, MultiTaskViT, load_backbone
from engram_server.model.backbone import BaseHead
from torch import Tensor

SHRINKAGE = 0.3
BATCH = 25
TEST_IMAGES = 1000
PROBES = {"cifar100": (30,), "flowers102": (1, 5, 18), "pets": (27,)}  # training images a class

Views = Callable[[Path], np.ndarray]


def read_backbone(text: str, view: str) -> Backbone:
    """`folder` or `folder@size`, looking at photos as it says itself or by another view."""
    folder, _, size = text.partition("@")
    backbone = load_backbone(folder, image_size=int(size) if size else None)
    how, pixels = backbone.preprocessing, backbone.image_size[0]
    if view == "squeeze":  # the whole photo, its sides made equal
        how = replace(how, resize=(pixels, pixels), crop=None)
    elif view != "own":  # ratio of the shorter side to the centre crop
        how = replace(how, resize=round(pixels * float(view)))
    return replace(backbone, preprocessing=how)


def class_tokens(backbone: Backbone, photos: Sequence[Path]) -> Tensor:
    """The class token of each photo, (N, D), by the pass that serves."""
    looks = BaseHead(torch.eye(backbone.width), None, ("",) * backbone.width, "embedding")
    model = MultiTaskViT(replace(backbone, base=looks))

    def look(path: Path) -> Tensor:
        return torch.from_numpy(backbone.preprocessing(path.read_bytes(), max_pixels=None))

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        batches = [photos[start : start + BATCH] for start in range(0, len(photos), BATCH)]
        return torch.cat(
            [
                model(torch.stack(list(pool.map(look, some))), tasks=["base"])["base"]
                for some in batches
            ]
        )


def read_probe(folder: Path, split: str, limit: int | None) -> tuple[list[Path], Tensor]:
    """Photos and class numbers: so many of each class, in the order of their names."""
    names = sorted(path.name for path in (folder / "train").iterdir())
    found = [
        (path, number)
        for number, name in enumerate(names)
        for path in sorted((folder / split / name).glob("*"))[:limit]
    ]
    return [path for path, _ in found], torch.tensor([number for _, number in found])


def probe(tokens: Tensor, labels: Tensor, test_tokens: Tensor, test_labels: Tensor) -> float:
    """Accuracy of linear discriminant analysis with a covariance drawn towards a sphere."""
    classes = int(labels.max()) + 1
    counts = torch.bincount(labels, minlength=classes).double()
    means = torch.zeros(classes, tokens.shape[1], dtype=torch.double)
    means.index_add_(0, labels, tokens.double())
    means /= counts[:, None]
    centre = means[labels] if len(labels) > classes else means.mean(0)  # one a class: all together
    spread = tokens.double() - centre
    covariance = spread.T @ spread / len(labels)
    sphere = torch.eye(len(covariance), dtype=torch.double) * covariance.trace() / len(covariance)
    weight = torch.linalg.solve((1 - SHRINKAGE) * covariance + SHRINKAGE * sphere, means.T)
    bias = -0.5 * (means.T * weight).sum(0)
    predictions = (test_tokens.double() @ weight + bias).argmax(1)
    return float((predictions == test_labels).double().mean())


def measure_probe(backbone: Backbone, folder: Path, counts: Sequence[int]) -> dict[str, float]:
    photos, labels = read_probe(folder, "train", max(counts))
    test_photos, test_labels = read_probe(folder, "test", None)
    chosen = np.random.default_rng(0).permutation(len(test_photos))[:TEST_IMAGES]
    test_tokens = class_tokens(backbone, [test_photos[place] for place in chosen])
    tokens = class_tokens(backbone, photos)
    first = torch.arange(len(labels)) - torch.searchsorted(labels, labels)  # number in its class
    return {
        f"{folder.name}/{count}": probe(
            tokens[first < count], labels[first < count], test_tokens, test_labels[chosen]
        )
        for count in counts
    }


def measure_base(backbone: Backbone, folder: Path) -> float:
    """How often the backbone's own head has the class first: one photo of each ImageNet class."""
    photos = sorted(folder.glob("n*.JPEG"))
    if backbone.base is None or len(photos) != len(backbone.base.labels):
        raise typer.BadParameter(f"{folder}: one photo of each of the backbone's classes is needed")
    logits = class_tokens(backbone, photos) @ backbone.base.weight.T
    if backbone.base.bias is not None:
        logits += backbone.base.bias
    return float((logits.argmax(1) == torch.arange(len(photos))).double().mean())


def measure_time(backbones: dict[str, Backbone], rounds: int) -> dict[str, float]:
    """Median milliseconds an image at batch 25, the backbones taking turns."""
    models = {name: MultiTaskViT(backbone) for name, backbone in backbones.items()}
    timings: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 2):
        for name, model in models.items():
            pixels = torch.zeros(BATCH, 3, *model.backbone.image_size)
            started = time.perf_counter()
            model(pixels, tasks=["base"])
            if turn >= 2:
                timings[name].append((time.perf_counter() - started) / BATCH * 1000)
    return {name: statistics.median(times) for name, times in timings.items()}


def main(
    backbones: Annotated[list[str], typer.Argument(metavar="FOLDER[@SIZE]…")],
    data: Annotated[Path | None, typer.Option(help="Without it, only times are measured.")] = None,
    parts: Annotated[str, typer.Option(help="Which of the data to use.")] = "imagenet,"
    + ",".join(PROBES),
    view: Annotated[
        str, typer.Option(help="own, squeeze, or shorter side / size of the middle, as in 1.14")
    ] = "own",
    rounds: Annotated[int, typer.Option(help="How often to time each.")] = 20,
    threads: int = 2,
) -> None:
    """Measure backbones: probes, the base task, and milliseconds an image."""
    torch.set_num_threads(threads)
    found = {text: read_backbone(text, view) for text in backbones}
    figures: dict[str, dict[str, float]] = {text: {} for text in found}
    for text, backbone in found.items():
        for part in parts.split(",") if data else []:
            if data is None or not (data / part).is_dir():
                continue
            if part == "imagenet":
                figures[text]["base"] = measure_base(backbone, data / part)
            else:
                figures[text] |= measure_probe(backbone, data / part, PROBES[part])
        shown = {name: round(value, 4) for name, value in figures[text].items()}
        typer.echo(json.dumps({"backbone": text, "view": view, **shown}))
    for text, milliseconds in measure_time(found, rounds).items() if rounds else ():
        typer.echo(json.dumps({"backbone": text, "milliseconds": round(milliseconds, 2)}))


if __name__ == "__main__":
    typer.run(main)
