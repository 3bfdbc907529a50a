"""What the demo tasks mark as out of distribution: the table of docs/reference/demo-tasks.md.

    python -m research.unknown_images --cifar10 package --gcompris gcompris [--write]

Fits the detector of each demo task to up to 2,000 of its training images, and applies it to photos
of things that the task knows and to photos of other things. None of them is a training image. The
folders are those of `research.demo_data`. `--write` puts the detectors into the embedded bundles;
nothing else of them changes. Features are computed once and kept below build/.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from engram_bundle import OodSpec, TaskBundle
from engram_server import embedded
from engram_server.model import Backbone, load_backbone
from engram_server.model.heads.ood import OodDetector, fit_ood_detector
from engram_server.model.masked_pass import encode

from research.accuracy import DATA
from research.demo_data import Photo, cifar10_photos, gcompris_photos, some_of_each, tar_photos

Floats = npt.NDArray[np.float64]

MOST: Final = {"train": 2000, "test": 300}  # images of a set
TASKS: Final = Path(embedded.__file__).parent / "tasks"
SAMPLES: Final = Path(embedded.__file__).parents[1] / "console" / "samples"
KEPT: Final = Path("build") / "unknown-images"
BATCH: Final = 32
ARCHIVES: Final = {
    "cifar100": "cifar100",
    "flowers": "flowers102",
    "leaves": "plants",
    "textures": "dtd10",
    "traffic signs": "gtsrb",
}
SMALL: Final = ("cifar10", "cifar100")  # tasks trained on images of 32 pixels
# Names of photos of GCompris and of the console that show a class of the task.
NAMED: Final = {
    "cifar10": (
        *("cat", "chicken", "dog", "duck", "gosling", "heron", "horse", "kingfisher", "kitten"),
        *("northern_harrier", "owl", "parrot", "penguin", "scarlet_macaw", "spoonbills", "swans"),
        "toucan",
    ),
    "cifar100": (
        *("bee", "bridge", "bucket", "burj", "butterfly", "calf", "camel", "camels", "castle"),
        *("caterpillar", "chair", "chateaudeChambord", "chateaudeChenonceau", "cheetah"),
        *("citedeCarcassonne", "coffee", "cow", "crab", "crocodile", "cup", "dolphin"),
        *("empireState", "jaguar", "kangaroo", "neuschwansteinCastle", "plate", "rocket"),
        *("schwerinPalace", "squirrel"),
    ),
}
FLOWERS_OF_CIFAR100: Final = re.compile("sunflower|^rose|poppy|orchid|cattleya")
UNKNOWN: Final = {
    "cifar10": ("flowers", "leaves", "textures", "tools", "monuments"),
    "cifar100": ("leaves", "textures", "traffic signs", "tools"),
    "flowers": ("leaves", "textures", "traffic signs", "tools", "monuments", "animals"),
    "leaves": ("flowers", "textures", "traffic signs", "tools", "monuments", "animals"),
}
PLACES: Final = {"tools": "/tools/", "monuments": "onuments/", "animals": "animals/|/erase/"}


@dataclass(frozen=True)
class Photos:
    """Class tokens of photos, and the class or file name of each."""

    tokens: Floats
    names: Sequence[str]

    def select(self, pattern: str | re.Pattern[str]) -> Floats:
        return self.tokens[[re.search(pattern, name) is not None for name in self.names]]

    @property
    def classes(self) -> npt.NDArray[np.int64]:
        return np.unique(self.names, return_inverse=True)[1].astype(np.int64)


def read(backbone: Backbone, photos: Iterable[Photo], split: str, name: str) -> Photos:
    kept = KEPT / f"{name}-{split}.npz"
    if not kept.exists():
        of_split = [photo for photo in photos if photo[0] == split]
        most = max(1, MOST[split] // len({label for _, label, _ in of_split}))
        chosen = list(some_of_each(of_split, most, most)) if name != "gcompris" else of_split
        tokens = []
        for start in range(0, len(chosen), BATCH):
            files = [content for _, _, content in chosen[start : start + BATCH]]
            views = [backbone.preprocessing(file, max_pixels=None) for file in files]
            readout = encode(backbone, torch.from_numpy(np.stack(views))).readout
            tokens.append(readout[:, : backbone.width].double().numpy())
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.savez(kept, tokens=np.concatenate(tokens), names=[label for _, label, _ in chosen])
    with np.load(kept) as file:
        return Photos(file["tokens"], file["names"].tolist())


def read_all(backbone: Backbone, cifar10: Path, gcompris: Path) -> dict[str, Photos]:
    """Training images as `train cifar10`, and others as `cifar10`."""
    found = {}
    for name in ("cifar10", *ARCHIVES):
        archive = DATA / f"{ARCHIVES.get(name)}.tar"
        photos = list(cifar10_photos(cifar10) if name == "cifar10" else tar_photos(archive))
        found[name] = read(backbone, photos, "test", name)
        if name in UNKNOWN:
            found[f"train {name}"] = read(backbone, photos, "train", name)
    ordinary = [("test", name, content) for _, name, content in gcompris_photos(gcompris, set())]
    samples = [("test", f"/{path.name}", path.read_bytes()) for path in SAMPLES.glob("*.jpg")]
    found["ordinary"] = read(backbone, chain(ordinary, sorted(samples)), "test", "gcompris")
    found |= {name: Photos(found["ordinary"].select(place), ()) for name, place in PLACES.items()}
    return found


def known_photos(task: str, photos: dict[str, Photos]) -> Floats:
    """Photos of the task's classes: test photos, or ordinary ones if its images are small."""
    if task not in SMALL:
        return photos[task].tokens
    named = photos["ordinary"].select(rf"/({'|'.join(NAMED[task])})\.(webp|jpg)$")
    if task == "cifar10":
        return named
    return np.concatenate([named, photos["flowers"].select(FLOWERS_OF_CIFAR100)])


def auroc(known: Floats, unknown: Floats) -> float:
    """How often an unknown image has a higher score than a known one."""
    return float((unknown[:, None] > known).mean())


def report(task: str, detector: OodDetector, photos: dict[str, Photos]) -> str:
    known = detector.scores(known_photos(task, photos))
    own = detector.scores(photos[task].tokens)
    cells = [f"`{task}`", f"{(own > 1).mean():.1%}", f"{(known > 1).mean():.1%} of {len(known)}"]
    shares, others = [], []
    for name in UNKNOWN[task]:
        scores = detector.scores(photos[name].tokens)
        shares.append(float((scores > 1).mean()))
        others.append(f"{name} {shares[-1]:.0%} ({auroc(known, scores):.2f})")
    return "| " + " | ".join([*cells, ", ".join(others), f"{np.mean(shares):.0%}"]) + " |"


def with_detector(bundle: TaskBundle, detector: OodDetector) -> TaskBundle:
    spec = OodSpec(threshold=detector.distance, angle=detector.angle)
    manifest = bundle.manifest.model_copy(update={"ood": spec})
    tensors = {**bundle.tensors, "ood.means": detector.means, "ood.axes": detector.axes}
    return replace(bundle, manifest=manifest, tensors=tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cifar10", type=Path, required=True)
    parser.add_argument("--gcompris", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help="write the embedded bundles")
    args = parser.parse_args()
    photos = read_all(load_backbone(embedded.BACKBONE), args.cifar10, args.gcompris)
    print("| task | own test images | known photos | photos of other things (AUROC) | mean |")
    for task in UNKNOWN:
        train = photos[f"train {task}"]
        small = task in SMALL
        detector = fit_ood_detector(train.tokens, train.classes, small_images=small)
        assert detector is not None
        print(report(task, detector, photos), flush=True)
        if args.write:
            path = TASKS / f"{task}.safetensors"
            path.write_bytes(with_detector(TaskBundle.load(path), detector).to_bytes())


if __name__ == "__main__":
    main()
