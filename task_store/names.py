"""Names of tasks and labels, and references to one version of a task.

`cifar` (its label `default`), `cifar@3`, `cifar:canary`, `vision/cifar@3`.
"""

import difflib
import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from task_store.errors import InvalidName
from task_store.manifest import shown

DEFAULT_LABEL = "default"
BASE_TASK = "base"

# For how many unknown names of one request the closest known one is looked for.
MAX_SUGGESTIONS = 8
_NAME_CHARS = 127  # two parts and a slash
_NAMES_LOOKED_AT = 20_000
_NAMES_COMPARED = 24

_PART = r"[a-z0-9][a-z0-9._-]{0,62}"
_TASK = re.compile(rf"(?:{_PART}/)?{_PART}")
# A letter first: `cifar:3` is a typo for `cifar@3`, never a label.
_LABEL = re.compile(r"[a-z][a-z0-9._-]{0,62}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(frozen=True, slots=True)
class TaskRef:
    """One version of a task, by number or by label (`default` when neither is given)."""

    task: str
    version: int | None = None
    label: str | None = None

    def __str__(self) -> str:
        if self.version is not None:
            return f"{self.task}@{self.version}"
        return self.task if self.label is None else f"{self.task}:{self.label}"


def parse_ref(text: str) -> TaskRef:
    """Read a reference, or raise InvalidName."""
    if "@" in text:
        task, _, number = text.partition("@")
        if not _VERSION.fullmatch(number):
            raise InvalidName(
                f"'{shown(text)}' has no version after '@': write for example 'cifar@3'.",
                names=[text],
            )
        ref = TaskRef(task, version=int(number))
    elif ":" in text:
        task, _, label = text.partition(":")
        ref = TaskRef(task, label=check_label(label))
    else:
        ref = TaskRef(text)
    if ref.task == BASE_TASK:
        if ref != TaskRef(BASE_TASK):
            raise InvalidName(
                f"'{shown(text)}': the built-in task 'base' has no versions or labels.",
                names=[text],
            )
        return ref
    check_task_name(ref.task)
    return ref


def check_task_name(name: str) -> str:
    """The name, if it may be published, or InvalidName."""
    if name == BASE_TASK:
        raise InvalidName(
            "'base' is the backbone's own classifier: choose another task name.", names=[name]
        )
    if not _TASK.fullmatch(name):
        raise InvalidName(
            f"'{shown(name)}' is no task name: use 1 to 63 of a-z 0-9 . _ - starting with a letter "
            f"or digit, optionally after one 'team/'.",
            names=[name],
        )
    return name


def check_label(label: str) -> str:
    """The label, if it may be used, or InvalidName."""
    if not _LABEL.fullmatch(label):
        raise InvalidName(
            f"'{shown(label)}' is no label: use 1 to 63 of a-z 0-9 . _ - starting with a letter.",
            names=[label],
        )
    return label


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one may have meant.

    Of thousands only a few are compared letter by letter: those with the most in common at both
    ends, where a slip of the pen leaves most of a name as it was.
    """
    if len(name) > _NAME_CHARS:
        return None

    def in_common(other: str) -> int:
        return _same_start(name, other) + _same_start(reversed(name), reversed(other))

    alike = heapq.nlargest(_NAMES_COMPARED, islice(known, _NAMES_LOOKED_AT), key=in_common)
    near = difflib.get_close_matches(name, alike, n=1)
    return near[0] if near else None


def _same_start(one: Iterable[str], other: Iterable[str]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count
