"""Teaching a task from photos: a folder, or any list of images with their labels, in requests.

Every request makes a version, so requests are large: as many photos as a server takes at once. The
photos of all classes are mixed, so that the first request already has two of them, and every
version on the way is a task. All files are looked at before the first is sent: one that is missing,
or is in two classes, is told before anything was taught.
"""

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from engram_client import replies
from engram_client.answers import (
    Correction,
    CorrectionsKept,
    Doubt,
    Example,
    Examples,
    Taught,
)
from engram_client.core import Core, Operation, Request, WaitOptions, Work, task_path, waiting_for
from engram_client.errors import BadImage, ClientError, NotFound, Refused, WrongUse
from engram_client.images import (
    InputSize,
    as_images,
    load,
    name_of,
    needs_input_size,
    size_of,
    walk,
)
from engram_client.predicting import BATCH_BYTES, Progress

if TYPE_CHECKING:
    from engram_client.images import Image, Images

    Labels = str | Sequence[str]
    # A folder of class folders, images by label, or images with their label or labels.
    Photos = str | os.PathLike[str] | Mapping[str, Images] | Iterable[tuple[Image, Labels]]

Problem = Literal["single_label", "multi_label"]

BATCH_PHOTOS = 64  # that a server takes by default
REMOVED_AT_ONCE = 256
_PAGE = 1000


class TeachOptions(TypedDict, total=False):
    """What may be given beside name and photos."""

    problem: Problem | None  # of a new task; single_label
    description: str | None
    only_new: bool  # refuse a task that exists already
    progress: Progress | None
    wait: Literal["all"] | None
    timeout: float


@dataclass(frozen=True, slots=True)
class _Photo:
    image: "Image"
    name: str
    labels: frozenset[str]
    digest: str
    size: int


def teach(
    core: Core, name: str, photos: "Photos", **options: Unpack[TeachOptions]
) -> Operation[Taught]:
    """Make a task from photos, or add them to it; it is being served when this returns.

    `photos` is a folder of class folders, a mapping of labels to images, or images with their label
    (or labels, of a multi-label task). A photo that is an example already takes its new label.
    """
    problem = options.get("problem")
    listed = yield Work(lambda: list(_listed(photos)))
    size: InputSize | None = None
    if any(needs_input_size(image, False) for image, _ in listed):
        size = yield from core.input_size()
    found: list[_Photo] = yield Work(lambda: _look_at(listed, size))
    several = yield from _may_have_several(core, name, problem, found)
    merged = _merged(found, several)
    if not merged:
        raise WrongUse("There is no photo to teach from.")
    lesson = _Teaching(core, name, options, size, total=len(merged))
    return (yield from lesson.send(_mixed(merged)))


def examples(core: Core, name: str, version: int | None = None) -> Operation[Examples]:
    """What a task was taught from."""
    entries: list[Example] = []
    while True:
        query = {"limit": str(_PAGE), "offset": str(len(entries))}
        if version is not None:
            query["version"] = str(version)
        response = yield from core.call(Request("GET", task_path(name, "examples"), query))
        page = replies.read(response, partial(replies.build, Examples))
        version = page.version  # all pages are of one version
        entries += page.examples
        if len(page.examples) < _PAGE:
            return replace(page, examples=tuple(entries))


def remove_examples(
    core: Core, name: str, photos: "Images", **waiting: Unpack[WaitOptions]
) -> Operation[Taught]:
    """Take examples away, by their files or digests; more than 256 make several versions."""
    images = list(as_images(photos))
    found: list[_Photo] = yield Work(lambda: _look_at([(each, ()) for each in images], None))
    digests = list(dict.fromkeys(photo.digest for photo in found))
    if not digests:
        raise WrongUse("No example is named.")
    taught: Taught | None = None
    removed = 0
    for start in range(0, len(digests), REMOVED_AT_ONCE):
        query = {"digest": digests[start : start + REMOVED_AT_ONCE]}
        request = Request("DELETE", task_path(name, "examples"), query, repeatable=False)
        response = yield from core.call(waiting_for(request, waiting))
        taught = replies.read(response, partial(replies.build, Taught))
        removed += taught.removed
    assert taught is not None
    return replace(taught, removed=removed)


def correct(
    core: Core, name: str, image: "Image", labels: "Labels", **waiting: Unpack[WaitOptions]
) -> Operation[Taught | CorrectionsKept]:
    """Say what an image shows: a taught task learns it at once, and is served so.

    Of a trained task it is kept, and `engram train --with-corrections` takes it in.
    """
    size: InputSize | None = None
    if needs_input_size(image, False):
        size = yield from core.input_size()
    body = yield Work(lambda: load(image, size, False))
    if isinstance(body, BadImage):
        raise _named(body, name_of(image, 0))
    document = {"examples": [_as_json(body, _label_set(labels))]}
    request = Request("POST", task_path(name, "examples"), json=document)
    try:
        response = yield from core.call(waiting_for(request, waiting))
    except Refused as error:
        if error.kind != "not-taught":
            raise
        kept = Request("POST", task_path(name, "corrections"), json=document)
        response = yield from core.call(kept)
        return replies.read(response, partial(replies.build, CorrectionsKept))
    return replies.read(response, partial(replies.build, Taught))


def corrections(core: Core, name: str) -> Operation[tuple[Correction, ...]]:
    """What people said about the answers of a trained task, the last of each photo."""
    found: list[Correction] = []
    while True:
        query = {"limit": str(_PAGE), "offset": str(len(found))}
        response = yield from core.call(Request("GET", task_path(name, "corrections"), query))
        page = replies.read(response, lambda document: document["corrections"])
        found += [replies.build(Correction, each) for each in page]
        if len(page) < _PAGE:
            return tuple(found)


# --- the photos -----------------------------------------------------------------------------------


def _listed(photos: "Photos") -> "Iterator[tuple[Image, Labels]]":
    if isinstance(photos, str | os.PathLike):
        yield from in_class_folders(os.fspath(photos))
    elif isinstance(photos, Mapping):
        for label, images in photos.items():
            yield from ((image, label) for image in as_images(images))
    else:
        yield from photos


def in_class_folders(folder: str) -> Iterator[tuple[str, str]]:
    """The images below each class folder, with its name."""
    if not os.path.isdir(folder):
        raise WrongUse(f"There is no folder '{folder}'.")
    found = False
    for label in sorted(os.listdir(folder)):
        path = os.path.join(folder, label)
        if os.path.isdir(path) and not label.startswith("."):
            for image in walk(path):
                found = True
                yield image, label
    if not found:
        raise WrongUse(
            f"'{folder}' has no folders with images in them: put the photos of each class into a "
            f"folder named after it."
        )


def _label_set(labels: "Labels") -> frozenset[str]:
    return frozenset([labels] if isinstance(labels, str) else labels)


def _look_at(listed: "Sequence[tuple[Image, Labels]]", size: InputSize | None) -> list[_Photo]:
    """Every photo with its digest; the first that cannot be read is raised."""
    found = []
    for index, (image, labels) in enumerate(listed):
        body = load(image, size, False)
        if isinstance(body, BadImage):
            raise _named(body, name_of(image, index))
        digest = body if isinstance(body, str) else f"sha256:{hashlib.sha256(body).hexdigest()}"
        found.append(
            _Photo(image, name_of(image, index), _label_set(labels), digest, size_of(image))
        )
    return found


def _named(error: BadImage, name: str) -> BadImage:
    error.image = name
    return error


def _may_have_several(
    core: Core, name: str, problem: Problem | None, photos: Sequence[_Photo]
) -> Operation[bool]:
    """Whether a photo may be in two classes; the server is asked only where one is."""
    if problem is not None:
        return problem == "multi_label"
    labels: dict[str, frozenset[str]] = {}
    if all(labels.setdefault(one.digest, one.labels) == one.labels for one in photos):
        return True
    try:
        task = yield from core.task(name)
    except NotFound:
        return False
    return task.problem == "multi_label"


def _merged(photos: Sequence[_Photo], several: bool) -> list[_Photo]:
    """Each photo once, with all its labels."""
    merged: dict[str, _Photo] = {}
    for photo in photos:
        known = merged.setdefault(photo.digest, photo)
        if known.labels == photo.labels:
            continue
        if not several:
            one, other = (", ".join(sorted(each.labels)) for each in (known, photo))
            raise WrongUse(
                f"{known.name} and {photo.name} are the same photo, given as '{one}' and as "
                f"'{other}': keep one of them, or teach a multi-label task."
            )
        merged[photo.digest] = replace(known, labels=known.labels | photo.labels)
    return list(merged.values())


def _mixed(photos: Sequence[_Photo]) -> list[_Photo]:
    """One photo of each class, then the second of each, and so on."""
    classes: dict[frozenset[str], list[_Photo]] = {}
    for photo in photos:
        classes.setdefault(photo.labels, []).append(photo)
    rounds = zip_longest(*classes.values())
    return [photo for each in rounds for photo in each if photo is not None]


# --- the requests ---------------------------------------------------------------------------------


class _Teaching:
    """One call of `teach`: request after request, each on what the one before has made."""

    def __init__(
        self, core: Core, name: str, options: TeachOptions, size: InputSize | None, total: int
    ) -> None:
        self._core = core
        self._name = name
        self._options = options
        self._size = size
        self._total = total
        self._most = BATCH_PHOTOS
        self._done = self._added = self._moved = 0

    def send(self, photos: list[_Photo]) -> Operation[Taught]:
        names = {photo.digest: photo.name for photo in photos}
        taught: Taught | None = None
        while self._done < len(photos):
            batch = self._next(photos)
            try:
                taught = yield from self._teach(batch, last=self._done + len(batch) == self._total)
            except Refused as error:
                if replies.asks_too_much(error) and len(batch) > 1:
                    self._most = len(batch) // 2
                    continue
                raise self._broken_off(error, taught) from None
            except ClientError as error:
                raise self._broken_off(error, taught) from None
            self._done += len(batch)
            self._added += taught.added
            self._moved += taught.moved
            if progress := self._options.get("progress"):
                progress(self._done, self._total)
        assert taught is not None
        doubtful = tuple(_with_photo(doubt, names) for doubt in taught.doubtful)
        return replace(taught, doubtful=doubtful, added=self._added, moved=self._moved)

    def _next(self, photos: list[_Photo]) -> list[_Photo]:
        batch: list[_Photo] = []
        size = 0
        for photo in photos[self._done : self._done + self._most]:
            if batch and size + photo.size > BATCH_BYTES:
                break
            batch.append(photo)
            size += photo.size
        return batch

    def _teach(self, batch: list[_Photo], last: bool) -> Operation[Taught]:
        bodies = yield Work(lambda: [load(photo.image, self._size, False) for photo in batch])
        for photo, body in zip(batch, bodies, strict=True):
            if isinstance(body, BadImage):  # it was there a moment ago
                raise _named(body, photo.name)
        only_new = self._options.get("only_new", False) and self._done == 0
        query = {
            key: value
            for key in ("problem", "description")
            if (value := self._options.get(key)) is not None
        }
        request = Request(
            "POST",
            task_path(self._name, "examples"),
            {key: str(value) for key, value in query.items()},
            {"If-None-Match": "*"} if only_new else {},
            repeatable=not only_new,
        )
        pairs = list(zip(batch, bodies, strict=True))
        if all(isinstance(body, bytes) and len(one.labels) == 1 for one, body in pairs):
            files = [
                (next(iter(one.labels)), (one.name, body, "application/octet-stream"))
                for one, body in pairs
            ]
            request = replace(request, files=files)
        else:
            listed = [_as_json(body, one.labels) for one, body in pairs]
            request = replace(request, json={"examples": listed})
        if last:
            waiting: WaitOptions = {"wait": self._options.get("wait")}
            if "timeout" in self._options:
                waiting["timeout"] = self._options["timeout"]
            request = waiting_for(request, waiting)
        response = yield from self._core.call(request)
        return replies.read(response, partial(replies.build, Taught))

    def _broken_off(self, error: ClientError, taught: Taught | None) -> ClientError:
        """The same error, with what was taught before it."""
        if taught is not None:
            error.message += (
                f" {self._done} of {self._total} photos were taught before, as version "
                f"{taught.version} of '{self._name}'; the same call again adds the others."
            )
        return error


def _as_json(body: bytes | str, labels: frozenset[str]) -> dict[str, object]:
    image = {"digest": body} if isinstance(body, str) else {"b64": base64.b64encode(body).decode()}
    if len(labels) == 1:
        return {**image, "label": next(iter(labels))}
    return {**image, "labels": sorted(labels)}


def _with_photo(doubt: Doubt, names: Mapping[str, str]) -> Doubt:
    return replace(doubt, photo=names.get(doubt.digest))
