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
    from engram_client.images import Image

Returns = Literal["scores", "logits", "embedding"]
Explanation = Literal["attention"]
Progress = Callable[[int, int | None], None]  # how many are answered, of how many if that is known

BATCH_IMAGES = 16
BATCH_BYTES = 16 * 1024 * 1024  # half of what a server takes by default


class PredictOptions(TypedDict, total=False):
    """What may be given beside images and tasks; `Options` has the defaults."""

    top_k: int | None
    threshold: float | None
    returns: Returns
    explain: Explanation | None
    shrink: bool
    deadline: float | None
    keep_going: bool
    progress: Progress | None


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked about every image of a list, and how.

    `top_k` predictions of each task, best first; of a multi-label task those with a score of at
    least `threshold`; or, with `returns`, `logits` or `embedding` instead of scores. With
    `explain="attention"` each task also says where it looked. `shrink` makes files smaller before
    they are sent, with the same answer, which needs Pillow. `deadline` is in seconds and for the
    whole list. With `keep_going` a bad image does not end the list: its answer
    has an `error`. `progress` is called with how many are answered, and of how many.
    """

    tasks: str | Sequence[str] | None = None
    top_k: int | None = None
    threshold: float | None = None
    returns: Returns = "scores"
    explain: Explanation | None = None
    shrink: bool = False
    deadline: float | None = None
    keep_going: bool = False
    progress: Progress | None = None

    def params(self) -> dict[str, str]:
        """The same as the query of a request."""
        names = [self.tasks] if isinstance(self.tasks, str) else self.tasks
        given = {
            "tasks": None if names is None else ",".join(names),
            "top_k": self.top_k,
            "threshold": self.threshold,
            "return": None if self.returns == "scores" else self.returns,
            "explain": self.explain,
        }
        return {name: str(value) for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Batch:
    """Some images of the list that follow each other."""

    start: int
    images: "list[Image]"


@dataclass(frozen=True, slots=True)
class Item:
    """One image, ready to be sent: its bytes, or its digest."""

    index: int
    name: str
    body: bytes | str


class Predicting:
    """One call: it takes what was answered, and decides what to hand out or to raise."""

    def __init__(self, core: Core, images: "Image | Iterable[Image]", options: Options) -> None:
        if options.tasks is not None and not options.tasks:
            raise WrongUse("No task is named: leave `tasks` out to ask every ready task.")
        if options.shrink:
            check_shrinking()
        self._core = core
        self._images = as_images(images)
        self._options = options
        self._params = options.params()
        self._total = len(self._images) if isinstance(self._images, Sized) else None
        self._deadline = None if options.deadline is None else core.now() + options.deadline
        self._most = BATCH_IMAGES
        self._done = 0

    def batches(self) -> Iterator[Batch]:
        """The list, piece by piece; nothing of it is kept."""
        pending: list[Image] = []
        start = size = 0
        for image in self._images:
            more = size_of(image)
            if pending and (len(pending) >= self._most or size + more > BATCH_BYTES):
                yield Batch(start, pending)
                start, pending, size = start + len(pending), [], 0
            pending.append(image)
            size += more
        if pending:
            yield Batch(start, pending)

    def ask(self, batch: Batch) -> Operation[list[ImageAnswer]]:
        """Answers for all images of a batch; those that cannot be used say why."""
        options = self._options
        size = None
        if any(needs_input_size(image, options.shrink) for image in batch.images):
            size = yield from self._core.input_size()
        bodies = yield Work(lambda: [load(image, size, options.shrink) for image in batch.images])
        items: list[Item] = []
        answers: list[ImageAnswer] = []
        for index, (image, body) in enumerate(
            zip(batch.images, bodies, strict=True), start=batch.start
        ):
            name = name_of(image, index)
            if isinstance(body, BadImage):
                answers.append(replies.failed(index, name, body))
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
                return [replies.failed(items[0].index, items[0].name, error)]
            middle = len(items) // 2
            if replies.asks_too_much(error):
                self._most = min(self._most, middle)  # the requests to come need not learn it again
            first = yield from self._ask(items[:middle])
            return first + (yield from self._ask(items[middle:]))
        named = [(item.index, item.name) for item in items]
        return replies.read(response, lambda document: replies.images(document, named))

    def _request(self, items: Sequence[Item]) -> Request:
        if any(isinstance(item.body, str) for item in items):
            document = {"images": [_as_json(item.body) for item in items]}
            return Request("POST", "/predict", self._params, json=document)
        files = [
            ("image", ("image", item.body, "application/octet-stream"))
            for item in items
            if isinstance(item.body, bytes)
        ]
        return Request("POST", "/predict", self._params, files=files)

    def hand_out(self, answers: Sequence[ImageAnswer]) -> Iterator[ImageAnswer]:
        """The answers of the next batch, one by one; without `keep_going` a bad image ends it."""
        for place, answer in enumerate(answers):
            if answer.error is not None and not self._options.keep_going:
                error = replies.bad_image(answer)
                error.answered = Answers(one for one in answers[place:] if one.error is None)
                raise error
            self._done += 1
            if self._options.progress is not None:
                self._options.progress(self._done, self._total)
            yield answer

    def ended(
        self, error: ClientError, batch: Batch, later: Iterable[Sequence[ImageAnswer]]
    ) -> None:
        """Tell an error where the list broke off, and what was answered beyond."""
        if error.image is None:
            error.index = batch.start
            error.image = name_of(batch.images[0], batch.start)
        beyond = (answer for answer in itertools.chain(*later) if answer.error is None)
        error.answered = Answers((*error.answered, *beyond))


def _as_json(body: bytes | str) -> dict[str, str]:
    if isinstance(body, str):
        return {"digest": body}
    return {"b64": base64.b64encode(body).decode()}
