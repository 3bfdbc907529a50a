"""Teach a task from a folder of class folders or a list of labelled images.

One call publishes one version. Photos that fit into a request are sent in one; more are uploaded in
parts, and published when all parts have arrived. Photos that cannot be read are left out and
reported. All files are read before the first request: a photo in two classes is reported before
anything is sent.
"""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Unpack

import httpx

from engram_vit import replies
from engram_vit.answers import (
    Correction,
    CorrectionsRemoved,
    CorrectionsResult,
    Example,
    Examples,
    TeachResult,
    Unreadable,
)
from engram_vit.core import Core, Operation, Request, WaitOptions, Work, task_path, waiting_for
from engram_vit.errors import (
    ClientError,
    ImageError,
    NotFound,
    RequestRejected,
    UnreadablePhotos,
    UsageError,
)
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
_PAGE_WITH_THUMBNAILS = 200
_RECORDS = 100  # of corrections in one response


class TeachOptions(WaitOptions, total=False):
    task_type: TaskType | None  # of a new task; default single_label
    description: str | None
    only_new: bool  # reject an existing task
    keep_pictures: bool  # default True: the server keeps a thumbnail and the file name of photos
    strict: bool  # publish nothing if a photo cannot be read
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
    Photos that cannot be read are listed as `unreadable`, and the others are taught. With `strict`
    nothing is published then, and the error has them as `unreadable`.
    """
    listed = yield Work(lambda: list(_list_photos(photos)))
    if not listed:
        raise UsageError("There are no photos to teach from.")
    size = yield from core.input_size(image for image, _ in listed)
    found, bad = yield Work(lambda: _read_photos(listed, size))
    several = yield from _may_have_several(core, name, options.get("task_type"), found)
    call = _TeachCall(core, name, _merged(found, several), size, options, bad)
    return (yield from call.run())


def examples(
    core: Core, name: str, version: int | None = None, *, thumbnails: bool = False
) -> Operation[Examples]:
    """List the example set of a task; `thumbnails` adds the pictures that were kept."""
    entries: list[Example] = []
    most = _PAGE_WITH_THUMBNAILS if thumbnails else _PAGE
    while True:
        query = {"limit": str(most), "offset": str(len(entries))}
        if thumbnails:
            query["thumbnails"] = "true"
        if version is not None:
            query["version"] = str(version)
        page = yield from core.build(Examples, Request("GET", task_path(name, "examples"), query))
        version = page.version  # all pages are of one version
        entries += page.examples
        if len(page.examples) < most:
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
    document = {"examples": [_as_json(body, _label_set(labels), name_of(image, 0))]}
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
    found, bad = yield Work(lambda: _read_photos([(each, ()) for each in images], None))
    if bad:
        raise UnreadablePhotos(bad)
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


def _read_photos(
    listed: "Sequence[tuple[Image, Labels]]", size: InputSize | None
) -> tuple[list[_Photo], list[Unreadable]]:
    """Read every photo and its digest, and list those that cannot be read."""
    found, bad = [], []
    for index, (image, labels) in enumerate(listed):
        name = name_of(image, index)
        body = load(image, size, False)
        if isinstance(body, ImageError):
            bad.append(Unreadable(name, body.message))
            continue
        digest = body if isinstance(body, str) else f"sha256:{hashlib.sha256(body).hexdigest()}"
        found.append(_Photo(image, name, _label_set(labels), digest, size_of(image)))
    return found, bad


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


class _TeachCall:
    """The photos of one `teach` call, sent in one request or in parts, and published once."""

    def __init__(
        self,
        core: Core,
        name: str,
        photos: Sequence[_Photo],
        size: InputSize | None,
        options: TeachOptions,
        unreadable: Sequence[Unreadable],
    ) -> None:
        self._core = core
        self._name = name
        self._photos = photos
        self._size = size
        self._options = options
        self._strict = options.get("strict", False)
        self._unreadable = list(unreadable)
        self._most = BATCH_PHOTOS

    def run(self) -> Operation[TeachResult]:
        self._check_readable(len(self._photos))
        taught: TeachResult | None = None
        # With `strict`, nothing may be published before the server has read all photos.
        if not self._strict and len(_next_batch(self._photos[: self._most])) == len(self._photos):
            taught = yield from self._send_at_once()
        if taught is None:
            taught = yield from self._send_in_parts()
        if progress := self._options.get("progress"):
            progress(len(self._photos), len(self._photos))
        paths = {photo.digest: photo.name for photo in self._photos}
        issues = (replace(issue, photo=paths.get(issue.digest)) for issue in taught.label_issues)
        return replace(taught, label_issues=tuple(issues), unreadable=tuple(self._unreadable))

    def _send_at_once(self) -> Operation[TeachResult | None]:
        """Teach in one request; None if it is too large."""
        query = {"skip_unreadable": "true"}
        request = yield Work(partial(self._request, self._photos, query))
        try:
            response = yield from self._core.call(waiting_for(request, self._options))
        except RequestRejected as error:
            if replies.is_too_large(error) and len(self._photos) > 1:
                return None
            raise
        self._note_unreadable(response, self._photos)
        return replies.read(response, partial(replies.build, TeachResult, unreadable=()))

    def _send_in_parts(self) -> Operation[TeachResult]:
        """Upload parts and publish them; a failure before that publishes nothing."""
        upload = {"upload": secrets.token_hex(16)}
        try:
            readable = yield from self._upload_parts(upload)
            self._check_readable(readable)
        except ClientError as error:
            yield from self._abort(upload)
            error.message += " Nothing was published."
            raise
        request = self._query_request({**upload, "publish": "true"})
        response = yield from self._core.call(waiting_for(request, self._options))
        return replies.read(response, partial(replies.build, TeachResult, unreadable=()))

    def _upload_parts(self, upload: Mapping[str, str]) -> Operation[int]:
        """Send all photos, and return the number of those that the server can read."""
        sent = readable = 0
        while sent < len(self._photos):
            batch = _next_batch(self._photos[sent : sent + self._most])
            request = yield Work(partial(self._request, batch, upload, part=True))
            try:
                response = yield from self._core.call(request)
            except ClientError as error:
                if len(batch) > 1 and replies.is_too_large(error):
                    self._most = len(batch) // 2
                    continue
                raise
            readable += replies.read(response, lambda document: int(document["examples"]))
            self._note_unreadable(response, batch)
            sent += len(batch)
            if progress := self._options.get("progress"):
                progress(sent, len(self._photos))
        return readable

    def _abort(self, upload: Mapping[str, str]) -> Operation[None]:
        # What cannot be aborted expires, and the first error is the one to report.
        request = Request("DELETE", task_path(self._name, "examples"), upload, repeatable=False)
        with contextlib.suppress(ClientError):
            yield from self._core.call(request)

    def _note_unreadable(self, response: httpx.Response, batch: Sequence[_Photo]) -> None:
        bad = replies.read(response, lambda document: document["unreadable"])
        for each in bad:
            self._unreadable.append(Unreadable(batch[each["index"]].name, each["reason"]))

    def _check_readable(self, readable: int) -> None:
        if self._unreadable and (self._strict or not readable):
            raise UnreadablePhotos(self._unreadable)

    def _request(
        self, batch: Sequence[_Photo], query: Mapping[str, str], *, part: bool = False
    ) -> Request:
        bodies = [_load(photo.image, self._size, photo.name) for photo in batch]
        request = self._query_request(query, part=part)
        pairs = list(zip(batch, bodies, strict=True))
        files = [
            (label, (photo.name, body, "application/octet-stream"))
            for photo, body in pairs
            for label in photo.labels
            if isinstance(body, bytes) and len(photo.labels) == 1
        ]
        if len(files) == len(batch):
            return replace(request, files=files)
        listed = [_as_json(body, photo.labels, photo.name) for photo, body in pairs]
        return replace(request, json={"examples": listed})

    def _query_request(self, query: Mapping[str, str], *, part: bool = False) -> Request:
        options = self._options
        only_new = options.get("only_new", False)
        values = {**query}
        if not options.get("keep_pictures", True):
            values["keep_pictures"] = "false"
        if not part:
            about = {key: options.get(key) for key in ("task_type", "description")}
            values |= {key: str(value) for key, value in about.items() if value is not None}
        headers = {"If-None-Match": "*"} if only_new else {}
        # An upload may be published twice, but If-None-Match fails after a plain request.
        repeatable = "upload" in query or not only_new
        path = task_path(self._name, "examples")
        return Request("POST", path, values, headers, repeatable=repeatable)


def _next_batch(photos: Sequence[_Photo]) -> Sequence[_Photo]:
    sizes = accumulate(photo.size for photo in photos)
    fitting = sum(size <= BATCH_BYTES for size in sizes)
    return photos[: max(1, fitting)]


def _as_json(body: bytes | str, labels: frozenset[str], name: str) -> dict[str, object]:
    about: dict[str, object] = {"labels": sorted(labels)}
    if len(labels) == 1:
        about = {"label": next(iter(labels))}
    if isinstance(body, bytes):
        about["name"] = name
    return {**as_json(body), **about}
