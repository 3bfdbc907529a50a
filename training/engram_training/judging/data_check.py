"""Check the images of a run before training: wrong labels, leaks and outliers.

Nothing is trained for this: the closed form has leave-one-out predictions of all training images,
and every image has been encoded. The thresholds were measured on photos (docs/how-to/train.md).
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
from engram_server.errors import ImageError
from engram_server.model.heads.lda import LdaStatistics
from PIL import Image

from engram_training.data.dataset import DataSet, SplitName
from engram_training.data.images import ImageSet, PreparedData
from engram_training.data.issues import Issue
from engram_training.fitting.closed_form import MAX_IMAGES, SolvedHead, some

Features = npt.NDArray[np.float16]  # (n, F)
Cosines = npt.NDArray[np.float32]  # (n,)

THUMBNAIL_EDGE: Final = 112
MAX_ISSUES: Final = 200  # of a kind
MAX_THUMBNAILS: Final = 24  # of a kind
DUPLICATE_COSINE: Final = 0.85  # of standardised features
DUPLICATE_SHARE: Final = 0.35  # of the distance (1 - cosine) between neighbouring training images
OUTLIER_FENCE: Final = 3.0  # quartile ranges of the log distance above its upper quartile
_CHUNK: Final = 1024


def check_data(
    prepared: PreparedData,
    features: Mapping[SplitName, Features],
    head: SolvedHead | None,
    width: int,
) -> list[Issue]:
    """List suspected label errors, near-duplicates of training images, and outliers.

    `head` is the closed form solved from the first columns of the training features.
    """
    checks = (
        _label_errors(prepared, features["train"], head),
        _duplicates(prepared, features),
        _outliers(prepared, features["train"][:, :width]),
    )
    return [issue for found in checks for issue in found]


def _label_errors(
    prepared: PreparedData, features: Features, head: SolvedHead | None
) -> Iterator[Issue]:
    if head is None or head.leave_one_out is None:
        return
    data, images = prepared.data.part("train"), prepared.images["train"]
    weight, bias = head.weight.numpy(), head.bias.numpy()
    suspects = head.leave_one_out.most_suspicious(MAX_ISSUES)
    for number, place in enumerate(suspects):
        index = place * head.stride
        logits = weight @ features[index, : weight.shape[1]].astype(np.float32) + bias
        probability = float(head.leave_one_out.probabilities[place])
        labels = " ".join(map(str, data.samples[index].values)) or "nothing"
        yield Issue(
            images.paths[index],
            "label error",
            f"labelled {labels}, which the other images make {probability:.0%} likely",
            probability,
            _suggested(data, index, logits),
            _thumbnails(number, (images, index)),
        )


def _suggested(data: DataSet, index: int, logits: npt.NDArray[np.float32]) -> str:
    """The likeliest other label; for multi-label tasks, the labels with the worst flipped."""
    own = {str(value) for value in data.samples[index].values}
    has = np.array([label in own for label in data.labels])
    if data.task_type == "single_label":
        return data.labels[int(np.where(has, -np.inf, logits).argmax())]
    worst = int(np.where(has, logits, -logits).argmin())
    has[worst] = not has[worst]
    return ";".join(label for label, given in zip(data.labels, has, strict=True) if given)


def _duplicates(prepared: PreparedData, features: Mapping[SplitName, Features]) -> Iterator[Issue]:
    """Held-out images that are nearly a training image: figures on them say nothing."""
    train = prepared.images["train"]
    number = 0
    for split in ("val", "test"):
        held_out = features.get(split)
        if held_out is None or not len(held_out):
            continue
        for index, twin, cosine in near_duplicates(held_out, features["train"]):
            if number == MAX_ISSUES:
                return
            images = prepared.images[split]
            yield Issue(
                images.paths[index],
                "duplicate",
                f"this {split} image is nearly the training image {train.paths[twin].name}"
                + _label_conflict(prepared.data, split, index, twin),
                cosine,
                thumbnails=_thumbnails(number, (images, index), (train, twin)),
            )
            number += 1


def _label_conflict(data: DataSet, split: SplitName, index: int, twin: int) -> str:
    own, other = data.part(split).samples[index].values, data.part("train").samples[twin].values
    if set(own) == set(other):
        return ""
    return f", which is labelled {' '.join(map(str, other))}"


def near_duplicates(held_out: Features, train: Features) -> Iterator[tuple[int, int, float]]:
    """Yield held-out images with their nearest training image, if they are nearly the same.

    Nearly the same is much nearer than training images are to each other: there are data sets
    whose images all look alike.
    """
    mean = train.mean(axis=0, dtype=np.float32)
    deviation = train.std(axis=0, dtype=np.float32) + 1e-6

    def units(rows: Features) -> npt.NDArray[np.float32]:
        values = (rows.astype(np.float32) - mean) / deviation
        lengths = np.linalg.norm(values, axis=1, keepdims=True)
        return np.asarray(values / np.maximum(lengths, 1e-6))

    def nearest(rows: Features, *, itself: bool) -> tuple[npt.NDArray[np.int64], Cosines]:
        """The nearest training image of each row, except `itself`, the row of the same number."""
        chunk = units(rows)
        best = np.full(len(rows), -1.0, dtype=np.float32)
        twins = np.zeros(len(rows), dtype=np.int64)
        for first in range(0, len(train), _CHUNK):
            cosines = chunk @ units(train[first : first + _CHUNK]).T
            if itself and not first:
                np.fill_diagonal(cosines, -1.0)
            winners = cosines.argmax(axis=1)
            values = cosines[np.arange(len(rows)), winners]
            better = values > best
            best[better], twins[better] = values[better], winners[better] + first
        return twins, best

    usual = 1 - float(np.median(nearest(train[:_CHUNK], itself=True)[1]))
    limit = 1 - min(1 - DUPLICATE_COSINE, DUPLICATE_SHARE * usual)
    for start in range(0, len(held_out), _CHUNK):
        twins, cosines = nearest(held_out[start : start + _CHUNK], itself=False)
        for row in np.flatnonzero(cosines > limit).tolist():
            yield start + row, int(twins[row]), float(cosines[row])


def _outliers(prepared: PreparedData, tokens: Features) -> Iterator[Issue]:
    """Training images that are unlike all others, whatever their label."""
    data, images = prepared.data.part("train"), prepared.images["train"]
    chosen, stride = some(tokens, MAX_IMAGES)
    classes = np.zeros(len(chosen), dtype=np.int64)
    if data.task_type == "single_label":
        classes = np.unique(some(data.targets(), MAX_IMAGES)[0], return_inverse=True)[1]
    for number, (place, distance) in enumerate(far_images(chosen, classes)[:MAX_ISSUES]):
        index = place * stride
        yield Issue(
            images.paths[index],
            "outlier",
            f"{distance:.1f} times as far from every class as half of the images",
            distance,
            thumbnails=_thumbnails(number, (images, index)),
        )


def far_images(tokens: Features, classes: npt.NDArray[np.int64]) -> list[tuple[int, float]]:
    """Images beyond the fence, farthest first, with their distance relative to the median."""
    if len(tokens) < 8:
        return []
    statistics = LdaStatistics.of(tokens.astype(np.float64), classes)
    distances = np.sqrt(np.maximum(statistics.leave_one_out_distances().min(axis=1), 1e-9))
    logs = np.log(distances)
    finite = np.isfinite(logs)
    if finite.sum() < 8:
        return []
    low, middle, high = np.quantile(logs[finite], (0.25, 0.5, 0.75))
    far = np.flatnonzero(finite & (logs > high + OUTLIER_FENCE * max(high - low, 1e-3)))
    order = far[np.argsort(-logs[far], kind="stable")]
    return [(int(index), float(np.exp(logs[index] - middle))) for index in order]


def _thumbnails(number: int, *pictures: tuple[ImageSet, int]) -> tuple[bytes, ...]:
    if number >= MAX_THUMBNAILS:
        return ()
    made = (thumbnail(images, index) for images, index in pictures)
    return tuple(each for each in made if each)


def thumbnail(images: ImageSet, index: int) -> bytes:
    """Return a small JPEG; nothing if the photo is gone, of which tensors are kept."""
    try:
        picture = Image.fromarray(images.pixels(index))
    except (OSError, ImageError):
        return b""
    picture.thumbnail((THUMBNAIL_EDGE, THUMBNAIL_EDGE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=80)
    return file.getvalue()


def describe(issues: Sequence[Issue]) -> str:
    """The number of issues of each kind."""
    names = {"label error": "suspected label errors", "duplicate": "near-duplicates of training "
             "images among held-out ones", "outlier": "outliers"}  # fmt: skip
    counts = {kind: sum(one.kind == kind for one in issues) for kind in names}
    return ", ".join(f"{count} {names[kind]}" for kind, count in counts.items() if count)
