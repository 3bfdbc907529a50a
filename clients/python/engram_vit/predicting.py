"""One `predict` call: split a list into requests, and return the answers in order.

A request has at most `BATCH_IMAGES` images and about `BATCH_BYTES` bytes. If the server rejects a
request because of one image or its size, the halves are sent, so that the others are answered.
"""

import base64
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from engram_vit import replies
from engram_vit.answers import Answers, ImageAnswer
from engram_vit.core import Core, Operation, Request, Work
from engram_vit.errors import ClientError, ImageError, RequestRejected, UsageError
from engram_vit.images import InputSize, as_images, as_json, check_shrinking, load, name_of, size_of

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

    from engram_vit.images import Image, Images

    Pending = Future[list[ImageAnswer]] | asyncio.Task[list[ImageAnswer]]

    Batch = list[tuple[int, Image]]  # consecutive images with their positions

Tasks = str | Sequence[str] | None
Returns = Literal["scores", "logits", "embedding"]
Explanation = Literal["attention"]
Unknown = Literal["mark", "hide"]
Progress = Callable[[int, int | None], None]  # answered images, total if known

BATCH_IMAGES = 16
BATCH_BYTES = 16 * 1024 * 1024  # half of the server's default limit


class PredictOptions(TypedDict, total=False):
    """Keyword arguments of `predict`; `PredictCall` has the defaults."""

    top_k: int | None  # predictions per task, best first
    threshold: float | None  # minimum score, for multi-label tasks
    returns: Returns  # instead of scores: logits or embeddings
    explain: Explanation | None  # "attention": also return attention maps
    unknown: Unknown  # images out of distribution: "mark" their predictions (default) or "hide"
    shrink: bool  # send smaller files with the same answer; requires Pillow
    deadline: float | None  # seconds for the whole list
    keep_going: bool  # continue after a bad image; its answer has an `error`
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class Item:
    index: int
    name: str
    body: bytes | str  # str: a digest


class PredictCall:
    """One `predict` call: builds requests, delivers answers, decides what to raise."""

    def __init__(
        self,
        core: Core,
        images: "Images",
        tasks: Tasks = None,
        *,
        top_k: int | None = None,
        threshold: float | None = None,
        returns: Returns = "scores",
        explain: Explanation | None = None,
        unknown: Unknown = "mark",
        shrink: bool = False,
        deadline: float | None = None,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if tasks is not None and not tasks:
            raise UsageError("`tasks` is empty. Omit it to use every ready task.")
        if shrink:
            check_shrinking()
        self._core = core
        self._images = as_images(images)
        self._shrink = shrink
        self._keep_going = keep_going
        self._progress = progress
        self._total = len(self._images) if isinstance(self._images, Sized) else None
        self._deadline = None if deadline is None else core.now() + deadline
        self._most = BATCH_IMAGES
        self._done = 0
        query = {
            "tasks": tasks if tasks is None or isinstance(tasks, str) else ",".join(tasks),
            "top_k": top_k,
            "threshold": threshold,
            "return": None if returns == "scores" else returns,
            "explain": explain,
            "unknown": None if unknown == "mark" else unknown,
        }
        self._params = {name: str(value) for name, value in query.items() if value is not None}

    def batches(self) -> "Iterator[Batch]":
        """Split the images into batches, lazily."""
        pending: Batch = []
        size = 0
        for index, image in enumerate(self._images):
            more = size_of(image)
            if pending and (len(pending) >= self._most or size + more > BATCH_BYTES):
                yield pending
                pending, size = [], 0
            pending.append((index, image))
            size += more
        if pending:
            yield pending

    def run(self, batch: "Batch") -> Operation[list[ImageAnswer]]:
        """Return answers for all images of a batch; unusable images have an `error`."""
        size = yield from self._core.input_size((image for _, image in batch), self._shrink)
        bodies = yield Work(lambda: [load(image, size, self._shrink) for _, image in batch])
        items: list[Item] = []
        answers: list[ImageAnswer] = []
        for (index, image), body in zip(batch, bodies, strict=True):
            name = name_of(image, index)
            if isinstance(body, ImageError):
                answers.append(ImageAnswer(name, index, error=body.message))
            else:
                items.append(Item(index, name, body))
        answers += yield from self._send(items)
        return sorted(answers, key=lambda answer: answer.index)

    def _send(self, items: list[Item]) -> Operation[list[ImageAnswer]]:
        if not items:
            return []
        try:
            response = yield from self._core.call(self._request(items), self._deadline)
        except RequestRejected as error:
            if not replies.concerns_images(error):
                raise
            if len(items) == 1:
                return [ImageAnswer(items[0].name, items[0].index, error=error.message)]
            middle = len(items) // 2
            if replies.is_too_large(error):
                self._most = min(self._most, middle)  # later requests start with this size
            first = yield from self._send(items[:middle])
            return first + (yield from self._send(items[middle:]))
        named = [(item.index, item.name) for item in items]
        return replies.read(response, lambda document: replies.images(document, named))

    def _request(self, items: Sequence[Item]) -> Request:
        bodies = [item.body for item in items if isinstance(item.body, bytes)]
        if len(bodies) < len(items):  # some are digests
            images = [as_json(item.body) for item in items]
            return Request("POST", "/predict", self._params, json={"images": images})
        files = [("image", ("image", body, "application/octet-stream")) for body in bodies]
        return Request("POST", "/predict", self._params, files=files)

    def deliver(self, answers: Sequence[ImageAnswer]) -> Iterator[ImageAnswer]:
        """Yield the answers of a batch; without `keep_going`, raise on a bad image."""
        for place, answer in enumerate(answers):
            if answer.error is not None and not self._keep_going:
                error = ImageError(answer.error)
                error.image, error.index = answer.image, answer.index
                error.answered = Answers(one for one in answers[place:] if one.error is None)
                raise error
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._total)
            yield answer

    def annotate(self, error: ClientError, batch: "Batch", later: "Iterable[Pending]") -> None:
        """Add the first unanswered image and the later answers to an error."""
        if error.image is None:
            error.index, image = batch[0]
            error.image = name_of(image, error.index)
        done = (one.result() for one in later if one.done() and not one.exception())
        beyond = (answer for answer in itertools.chain(*done) if answer.error is None)
        error.answered = Answers((*error.answered, *beyond))


def embed(core: Core, images: "Images", model: str | None = None) -> Operation[list[list[float]]]:
    """Return an embedding of unit length for each image, in order.

    `model` is the backbone (default), or a task: the feature that its head reads.
    """
    if model is None:
        response = yield from core.call(Request("GET", "/tasks", {"limit": "1"}))
        model = replies.read(response, lambda document: str(document["backbone"]))
    call, embeddings = PredictCall(core, images), list[list[float]]()
    for batch in call.batches():
        size = yield from core.input_size((image for _, image in batch), False)
        inputs = yield Work(partial(_embedding_inputs, batch, size))
        body = {"model": model, "input": inputs, "encoding_format": "base64"}
        response = yield from core.call(Request("POST", "/v1/embeddings", json=body))
        embeddings += replies.read(response, _embeddings)
    return embeddings


def _embedding_inputs(batch: "Batch", size: InputSize | None) -> list[str]:
    inputs = []
    for index, image in batch:
        body = load(image, size, False)
        if isinstance(body, str):
            body = ImageError("A digest cannot be embedded: pass the image itself.")
        if isinstance(body, ImageError):
            body.image, body.index = name_of(image, index), index
            raise body
        inputs.append(base64.b64encode(body).decode())
    return inputs


def _embeddings(document: Any) -> list[list[float]]:  # noqa: ANN401 - JSON
    rows = (base64.b64decode(each["embedding"]) for each in document["data"])
    return [list(struct.unpack(f"<{len(row) // 4}f", row)) for row in rows]
