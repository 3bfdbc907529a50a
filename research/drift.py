"""False alarms and detection of drift: the table of docs/how-to/find-drift.md.

    python -m research.drift [--images 400]

For each data set, the drift reference is fitted to training images of every other class. Then
streams of 200 images run through the meter of the server: test images of the same classes in 20
random draws, and the same images blurred or darkened, images of the other classes, and images of
another data set. An alarm is a distance above its limit, checked after every tenth image from the
60th on; for the false alarms also at the end only, once in each window.
"""

import argparse
import io
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from engram_server import embedded
from engram_server.engine.rollout.comparison import Answers
from engram_server.engine.rollout.drift import DriftMeter
from engram_server.engine.types import TaskVersion
from engram_server.model import Backbone, load_backbone
from engram_server.model.heads.drift import DriftReference, fit_drift_reference
from engram_server.model.heads.ood import OodDetector, fit_ood_detector
from engram_server.model.masked_pass import encode
from PIL import Image, ImageEnhance, ImageFilter

from research.accuracy import DATA
from research.demo_data import Photo, tar_photos

Features = npt.NDArray[np.float32]
Change = Callable[[Image.Image], Image.Image]

SETS: Final = ("cifar100", "flowers102", "plants", "gtsrb", "dtd10", "tile")
SMALL: Final = ("cifar100",)  # images of 32 pixels
WINDOW: Final = 200
WINDOWS: Final = 20
STEP: Final = 10
BATCH: Final = 32
TASK: Final = TaskVersion("task", 1, "embedding", ())


class Stream(NamedTuple):
    known: Features  # test images of the classes in the reference
    blurred: Features
    darkened: Features
    other_classes: Features
    reference: DriftReference
    detector: OodDetector


def blur(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(min(image.size) / 50))


def darken(image: Image.Image) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(0.4)


def changed(content: bytes, change: Change | None) -> bytes:
    if change is None:
        return content
    image, out = Image.open(io.BytesIO(content)).convert("RGB"), io.BytesIO()
    image.thumbnail((400, 400))  # above the input size, and faster
    change(image).save(out, "PNG", compress_level=1)
    return out.getvalue()


def features_of(
    backbone: Backbone, photos: Sequence[Photo], change: Change | None = None
) -> Features:
    parts = []
    for start in range(0, len(photos), BATCH):
        files = [changed(content, change) for _, _, content in photos[start : start + BATCH]]
        views = [backbone.preprocessing(file, max_pixels=None) for file in files]
        readout = encode(backbone, torch.from_numpy(np.stack(views))).readout
        parts.append(readout[:, : backbone.width].float().numpy())
    return np.concatenate(parts)


def read(backbone: Backbone, name: str, images: int) -> Stream:
    photos = list(tar_photos(DATA / f"{name}.tar"))
    random = np.random.default_rng(0)
    random.shuffle(photos)
    known = set(sorted({label for _, label, _ in photos})[::2])

    def some(split: str, own: bool, count: int) -> list[Photo]:
        return [one for one in photos if one[0] == split and (one[1] in known) == own][:count]

    test = some("test", True, images)
    train = some("train", True, 2 * images)
    tokens = features_of(backbone, train).astype(np.float64)
    classes = np.unique([label for _, label, _ in train], return_inverse=True)[1]
    detector = fit_ood_detector(tokens, classes, small_images=name in SMALL)
    assert detector is not None
    reference = fit_drift_reference(tokens, scores=detector.typical)
    assert reference is not None
    return Stream(
        features_of(backbone, test),
        features_of(backbone, test[:WINDOW], blur),
        features_of(backbone, test[:WINDOW], darken),
        features_of(backbone, some("test", False, WINDOW)),
        reference,
        detector,
    )


def alarms(known: Stream, stream: Features) -> list[int]:
    """After how many images the distance was above its limit."""
    meter, found = DriftMeter(), []
    for end in range(STEP, len(stream) + 1, STEP):
        part = stream[end - STEP : end]
        logits = np.zeros((len(part), 1), np.float32)
        scores = known.detector.scores(part.astype(np.float64)).astype(np.float32)
        meter.add(Answers(TASK, np.arange(len(part)), logits, scores, known.reference), part)
        if meter.report().drifting:
            found.append(end)
    return found


def row(name: str, streams: dict[str, Stream]) -> str:
    stream = streams[name]
    random = np.random.default_rng(1)
    draws = [random.permutation(len(stream.known))[:WINDOW] for _ in range(WINDOWS)]
    found = [alarms(stream, stream.known[draw]) for draw in draws]
    at_end = sum(WINDOW in each for each in found)
    cells = [name, f"{stream.reference.images}", f"{at_end} of {WINDOWS}"]
    cells.append(f"{sum(map(bool, found))} of {WINDOWS}")
    drifted = (stream.blurred, stream.darkened, stream.other_classes)
    cells.extend(first(stream, each) for each in drifted)
    others = [first(stream, other.known[:WINDOW]) for key, other in streams.items() if key != name]
    missed = others.count("no")
    cells.append(f"{max((int(x) for x in others if x != 'no'), default=0)}, {missed} missed")
    return "| " + " | ".join(cells) + " |"


def first(known: Stream, stream: Features) -> str:
    found = alarms(known, stream)
    return str(found[0]) if found else "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--images", type=int, default=400, help="test images of each set")
    args = parser.parse_args()
    backbone = load_backbone(embedded.BACKBONE)
    streams = {}
    for name in args.sets:
        streams[name] = read(backbone, name, args.images)
        print(f"read {name}", flush=True)
    print(
        "| data set | reference images | false alarms (at the end) | (at any time) | blurred | "
        "darkened | other classes | other sets (slowest) |\n|---|---|---|---|---|---|---|---|"
    )
    for name in args.sets:
        print(row(name, streams), flush=True)


if __name__ == "__main__":
    main()
