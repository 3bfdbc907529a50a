"""Teach a task from a folder of class folders or a list of labelled images.

Each request publishes a version, so requests are as large as the server accepts. Classes are
interleaved, so that every version has at least two of them. All files are read before the first
request: a missing file, or a photo in two classes, is reported before anything is taught.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Literal, Unpack

from engram_vit import replies
from engram_vit.answers import (
    Correction,
    CorrectionsRemoved,
    CorrectionsResult,
    Example,
    Examples,
    TeachResult,
)
from engram_vit.core import Core, Operation, Request, WaitOptions, Work, task_path, waiting_for
from engram_vit.errors import ClientError, ImageError, NotFound, RequestRejected, UsageError
from engram_vit.images import InputSize, as_images, as_json, load, name_of, size_of, walk
from engram_vit.predicting import BATCH_BYTES, Progress

if TYPE_CHECKING:
    from engram_vit.images import Image, Images

    Labels = str | Sequence[str]
    # A folder of class folders, images by label, or images with their label or labels.
    Photos = str | os.PathLike[str] | Mapping[str, Images] | Iterable[tuple[Image, Labels]]

TaskType = Literal["single_label", "multi_label"]

BATCH_PHOTOS = 64  # the server's default limit
REMOVED_AT_ONCE = 256
_PAGE = 1000
_RECORDS = 100  # of corrections in one response


class TeachOptions(WaitOptions, total=False):
    task_type: TaskType | None  # of a new task; default single_label
    description: str | None
    only_new: bool  # reject an existing task
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class _Photo:
    image: "Image"
    name: str
    labels: frozenset[str]
    digest: str
    size: int


def teach(
    core: Core, name: str, photos: "Photos", **options: Unpack[TeachOptions]
) -> Operation[TeachResult]:
    """Create a task from photos, or add examples to it; the server serves it when this returns.

    `photos` is a folder of class folders, a mapping from label to images, or (image, label) pairs
    (several labels for a multi-label task). A photo that is already an example gets the new label.
    """
    listed = yield Work(lambda: list(_list_photos(photos)))
    size = yield from core.input_size(image for image, _ in listed)
    found: list[_Photo] = yield Work(lambda: _read_photos(listed, size))
    several = yield from _may_have_several(core, name, options.get("task_type"), found)
    merged = _merged(found, several)
    if not merged:
        raise UsageError("There are no photos to teach from.")
    return (yield from _send_all(core, name, _interleaved(merged), size, options))


def examples(core: Core, name: str, version: int | None = None) -> Operation[Examples]:
    """List the example set of a task."""
    entries: list[Example] = []
    while True:
        query = {"limit": str(_PAGE), "offset": str(len(entries))}
        if version is not None:
            query["version"] = str(version)
        page = yield from core.build(Examples, Request("GET", task_path(name, "examples"), query))
        version = page.version  # all pages are of one version
        entries += page.examples
        if len(page.examples) < _PAGE:
            return replace(page, examples=tuple(entries))


def remove_examples(
    core: Core, name: str, photos: "Images", *, purge: bool = False, **waiting: Unpack[WaitOptions]
) -> Operation[TeachResult]:
    """Remove examples by file or digest; more than 256 create several versions.

    `purge` also deletes the earlier versions that have one of them, for good.
    """
    digests = yield from _digests_of(photos)
    if not digests:
        raise UsageError("No examples to remove.")
    taught: TeachResult | None = None
    removed = 0
    for start in range(0, len(digests), REMOVED_AT_ONCE):
        query: dict[str, str | list[str]] = {"digest": digests[start : start + REMOVED_AT_ONCE]}
        if purge:
            query["purge"] = "true"
        request = Request("DELETE", task_path(name, "examples"), query, repeatable=False)
        taught = yield from core.build(TeachResult, waiting_for(request, waiting))
        removed += taught.removed
    assert taught is not None
    return replace(taught, removed=removed)


def correct(
    core: Core, name: str, image: "Image", labels: "Labels", **waiting: Unpack[WaitOptions]
) -> Operation[TeachResult | CorrectionsResult]:
    """Report the true labels of an image.

    A taught task is updated at once. For a trained task the correction is stored, and
    `engram train --with-corrections` uses it.
    """
    size = yield from core.input_size([image])
    body = yield Work(lambda: _load(image, size, name_of(image, 0)))
    document = {"examples": [_as_json(body, _label_set(labels))]}
    request = Request("POST", task_path(name, "examples"), json=document)
    try:
        return (yield from core.build(TeachResult, waiting_for(request, waiting)))
    except RequestRejected as error:
        if error.kind != "not-taught":
            raise
    request = Request("POST", task_path(name, "corrections"), json=document)
    return (yield from core.build(CorrectionsResult, request))


def corrections(core: Core, name: str) -> Operation[tuple[Correction, ...]]:
    """List the corrections of a trained task, the latest per photo, newest first."""
    found: dict[str, Correction] = {}
    offset = 0
    while True:
        query = {"limit": str(_RECORDS), "offset": str(offset)}
        response = yield from core.call(Request("GET", task_path(name, "corrections"), query))
        page, records = replies.read(response, lambda d: (d["corrections"], d["records"]))
        for each in page:
            found.setdefault(each["digest"], replies.build(Correction, each))
        offset += _RECORDS
        if offset >= records:
            return tuple(found.values())


def remove_corrections(
    core: Core, name: str, photos: "Images | None" = None
) -> Operation[CorrectionsRemoved]:
    """Remove the corrections of photos, by file or digest, for good; without `photos`, all."""
    digests = None
    if photos is not None:
        digests = yield from _digests_of(photos)
        if not digests:
            raise UsageError("No corrections to remove.")
    removed = 0
    for start in range(0, 1 if digests is None else len(digests), REMOVED_AT_ONCE):
        query = {} if digests is None else {"digest": digests[start : start + REMOVED_AT_ONCE]}
        request = Request("DELETE", task_path(name, "corrections"), query)
        result = yield from core.build(CorrectionsRemoved, request)
        removed += result.removed
    return CorrectionsRemoved(name, removed)


def _digests_of(photos: "Images") -> Operation[list[str]]:
    images = list(as_images(photos))
    found: list[_Photo] = yield Work(lambda: _read_photos([(each, ()) for each in images], None))
    return list(dict.fromkeys(photo.digest for photo in found))


def _list_photos(photos: "Photos") -> "Iterator[tuple[Image, Labels]]":
    if isinstance(photos, str | os.PathLike):
        yield from in_class_folders(os.fspath(photos))
    elif isinstance(photos, Mapping):
        for label, images in photos.items():
            yield from ((image, label) for image in as_images(images))
    else:
        yield from photos


def in_class_folders(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the images below each class folder with the folder's name."""
    if not os.path.isdir(folder):
        raise UsageError(f"The folder '{folder}' does not exist.")
    found = False
    for label in sorted(os.listdir(folder)):
        path = os.path.join(folder, label)
        if os.path.isdir(path) and not label.startswith("."):
            for image in walk(path):
                found = True
                yield image, label
    if not found:
        raise UsageError(
            f"'{folder}' has no class folders with images. Put the photos of each class into a "
            f"folder named after the class."
        )


def _label_set(labels: "Labels") -> frozenset[str]:
    return frozenset([labels] if isinstance(labels, str) else labels)


def _read_photos(listed: "Sequence[tuple[Image, Labels]]", size: InputSize | None) -> list[_Photo]:
    """Read every photo and its digest; raise for the first unreadable one."""
    found = []
    for index, (image, labels) in enumerate(listed):
        name = name_of(image, index)
        body = _load(image, size, name)
        digest = body if isinstance(body, str) else f"sha256:{hashlib.sha256(body).hexdigest()}"
        found.append(_Photo(image, name, _label_set(labels), digest, size_of(image)))
    return found


def _load(image: "Image", size: InputSize | None, name: str) -> bytes | str:
    body = load(image, size, False)
    if isinstance(body, ImageError):
        body.image = name
        raise body
    return body


def _may_have_several(
    core: Core, name: str, task_type: TaskType | None, photos: Sequence[_Photo]
) -> Operation[bool]:
    """Whether a photo may have several labels; sends a request only if one has."""
    if task_type is not None:
        return task_type == "multi_label"
    labels: dict[str, frozenset[str]] = {}
    if all(labels.setdefault(one.digest, one.labels) == one.labels for one in photos):
        return True
    try:
        task = yield from core.task(name)
    except NotFound:
        return False
    return task.task_type == "multi_label"


def _merged(photos: Sequence[_Photo], several: bool) -> list[_Photo]:
    """Merge duplicates: each photo once, with all its labels."""
    merged: dict[str, _Photo] = {}
    for photo in photos:
        first = merged.setdefault(photo.digest, photo)
        if first.labels == photo.labels:
            continue
        if not several:
            one, other = (", ".join(sorted(each.labels)) for each in (first, photo))
            raise UsageError(
                f"{first.name} and {photo.name} are the same photo with the labels '{one}' and "
                f"'{other}'. Keep one of them, or teach a multi-label task."
            )
        merged[photo.digest] = replace(first, labels=first.labels | photo.labels)
    return list(merged.values())


def _interleaved(photos: Sequence[_Photo]) -> list[_Photo]:
    """Interleave the classes: the first photo of each, then the second of each."""
    classes: dict[frozenset[str], list[_Photo]] = {}
    for photo in photos:
        classes.setdefault(photo.labels, []).append(photo)
    rounds = zip_longest(*classes.values())
    return [photo for each in rounds for photo in each if photo is not None]


def _send_all(
    core: Core, name: str, photos: Sequence[_Photo], size: InputSize | None, options: TeachOptions
) -> Operation[TeachResult]:
    """Send requests one after the other, each adding to the previous version."""
    taught: TeachResult | None = None
    most, done, added, moved = BATCH_PHOTOS, 0, 0, 0
    while done < len(photos):
        batch = _next_batch(photos[done : done + most])
        try:
            request = yield Work(partial(_request, name, batch, size, options, first=done == 0))
            if done + len(batch) == len(photos):
                request = waiting_for(request, options)
            taught = yield from core.build(TeachResult, request)
        except ClientError as error:
            if len(batch) > 1 and replies.is_too_large(error):
                most = len(batch) // 2
                continue
            if taught is not None:
                error.message += (
                    f" {done} of {len(photos)} photos were taught before the error (version "
                    f"{taught.version} of '{name}'). Repeat the call to add the rest."
                )
            raise
        done += len(batch)
        added += taught.added
        moved += taught.moved
        if progress := options.get("progress"):
            progress(done, len(photos))
    assert taught is not None
    names = {photo.digest: photo.name for photo in photos}
    issues = (replace(issue, photo=names.get(issue.digest)) for issue in taught.label_issues)
    return replace(taught, label_issues=tuple(issues), added=added, moved=moved)


def _next_batch(photos: Sequence[_Photo]) -> Sequence[_Photo]:
    sizes = accumulate(photo.size for photo in photos)
    fitting = sum(size <= BATCH_BYTES for size in sizes)
    return photos[: max(1, fitting)]


def _request(
    name: str, batch: Sequence[_Photo], size: InputSize | None, options: TeachOptions, first: bool
) -> Request:
    bodies = [_load(photo.image, size, photo.name) for photo in batch]
    only_new = options.get("only_new", False) and first
    query = {"task_type": options.get("task_type"), "description": options.get("description")}
    request = Request(
        "POST",
        task_path(name, "examples"),
        {key: value for key, value in query.items() if value is not None},
        {"If-None-Match": "*"} if only_new else {},
        repeatable=not only_new,
    )
    pairs = list(zip(batch, bodies, strict=True))
    files = [
        (label, (photo.name, body, "application/octet-stream"))
        for photo, body in pairs
        for label in photo.labels
        if isinstance(body, bytes) and len(photo.labels) == 1
    ]
    if len(files) == len(batch):
        return replace(request, files=files)
    listed = [_as_json(body, photo.labels) for photo, body in pairs]
    return replace(request, json={"examples": listed})


def _as_json(body: bytes | str, labels: frozenset[str]) -> dict[str, object]:
    if len(labels) == 1:
        return {**as_json(body), "label": next(iter(labels))}
    return {**as_json(body), "labels": sorted(labels)}
