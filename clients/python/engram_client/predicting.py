"""One call of `predict`: its list cut into requests, and the answers put back in order.

A request has at most `BATCH_IMAGES` images and about `BATCH_BYTES` bytes. Where a server refuses a
request because of one image in it, or because it is too much at once, its halves are asked, down to
the image to blame: the others are answered all the same.
"""

import base64
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypedDict

from engram_client import replies
from engram_client.answers import Answers, ImageAnswer
from engram_client.core import Core, Operation, Request, Work
from engram_client.errors import BadImage, ClientError, Refused, WrongUse
from engram_client.images import (
    as_images,
    check_shrinking,
    load,
    name_of,
    needs_input_size,
    size_of,
)

if TYPE_CHECKING:
    import asyncio
    from concurrent.futures import Future

    from engram_client.images import Image, Images

    Pending = Future[list[ImageAnswer]] | asyncio.Task[list[ImageAnswer]]

    Batch = list[tuple[int, Image]]  # images that follow each other, with their places in the list

Tasks = str | Sequence[str] | None
Returns = Literal["scores", "logits", "embedding"]
Explanation = Literal["attention"]
Unknown = Literal["show", "hide"]
Progress = Callable[[int, int | None], None]  # how many are answered, of how many if that is known

BATCH_IMAGES = 16
BATCH_BYTES = 16 * 1024 * 1024  # half of what a server takes by default


class PredictOptions(TypedDict, total=False):
    """What may be given beside images and tasks; `Predicting` has the defaults."""

    top_k: int | None  # predictions of each task, best first
    threshold: float | None  # of a multi-label task those with a score of at least this
    returns: Returns  # logits or embedding instead of scores
    explain: Explanation | None  # "attention": each task also says where it looked
    unknown: Unknown  # "hide": no predictions of tasks that do not know the image
    shrink: bool  # make files smaller before they are sent, with the same answer; needs Pillow
    deadline: float | None  # seconds for the whole list
    keep_going: bool  # a bad image does not end the list: its answer has an `error`
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class Item:
    """One image, ready to be sent: its bytes, or its digest."""

    index: int
    name: str
    body: bytes | str


class Predicting:
    """One call: it takes what was answered, and decides what to hand out or to raise."""

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
        unknown: Unknown = "show",
        shrink: bool = False,
        deadline: float | None = None,
        keep_going: bool = False,
        progress: Progress | None = None,
    ) -> None:
        if tasks is not None and not tasks:
            raise WrongUse("No task is named: leave `tasks` out to ask every ready task.")
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
            "unknown": None if unknown == "show" else unknown,
        }
        self._params = {name: str(value) for name, value in query.items() if value is not None}

    def batches(self) -> "Iterator[Batch]":
        """The list, piece by piece; nothing of it is kept."""
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

    def ask(self, batch: "Batch") -> Operation[list[ImageAnswer]]:
        """Answers for all images of a batch; those that cannot be used say why."""
        size = None
        if any(needs_input_size(image, self._shrink) for _, image in batch):
            size = yield from self._core.input_size()
        bodies = yield Work(lambda: [load(image, size, self._shrink) for _, image in batch])
        items: list[Item] = []
        answers: list[ImageAnswer] = []
        for (index, image), body in zip(batch, bodies, strict=True):
            name = name_of(image, index)
            if isinstance(body, BadImage):
                answers.append(ImageAnswer(name, index, error=body.message))
            else:
                items.append(Item(index, name, body))
        answers += yield from self._ask(items)
        return sorted(answers, key=lambda answer: answer.index)

    def _ask(self, items: list[Item]) -> Operation[list[ImageAnswer]]:
        if not items:
            return []
        try:
            response = yield from self._core.call(self._request(items), self._deadline)
        except Refused as error:
            if not replies.about_images(error):
                raise
            if len(items) == 1:
                return [ImageAnswer(items[0].name, items[0].index, error=error.message)]
            middle = len(items) // 2
            if replies.asks_too_much(error):
                self._most = min(self._most, middle)  # the requests to come need not learn it again
            first = yield from self._ask(items[:middle])
            return first + (yield from self._ask(items[middle:]))
        named = [(item.index, item.name) for item in items]
        return replies.read(response, lambda document: replies.images(document, named))

    def _request(self, items: Sequence[Item]) -> Request:
        if any(isinstance(item.body, str) for item in items):
            images = [
                {"digest": item.body}
                if isinstance(item.body, str)
                else {"b64": base64.b64encode(item.body).decode()}
                for item in items
            ]
            return Request("POST", "/predict", self._params, json={"images": images})
        files = [
            ("image", ("image", item.body, "application/octet-stream"))
            for item in items
            if isinstance(item.body, bytes)
        ]
        return Request("POST", "/predict", self._params, files=files)

    def hand_out(self, answers: Sequence[ImageAnswer]) -> Iterator[ImageAnswer]:
        """The answers of the next batch, one by one; without `keep_going` a bad image ends it."""
        for place, answer in enumerate(answers):
            if answer.error is not None and not self._keep_going:
                error = BadImage(answer.error)
                error.image, error.index = answer.image, answer.index
                error.answered = Answers(one for one in answers[place:] if one.error is None)
                raise error
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._total)
            yield answer

    def ended(self, error: ClientError, batch: "Batch", later: "Iterable[Pending]") -> None:
        """Tell an error where the list broke off, and what was answered beyond."""
        if error.image is None:
            error.index, image = batch[0]
            error.image = name_of(image, error.index)
        done = (one.result() for one in later if one.done() and not one.exception())
        beyond = (answer for answer in itertools.chain(*done) if answer.error is None)
        error.answered = Answers((*error.answered, *beyond))
