"""Names: tasks, aliases, references to one version of a task, and digests of content.

References: `cifar` (alias `default`), `cifar@3`, `cifar:canary`, `vision/cifar@3`. A digest is
`sha256:` and 64 lower-case hexadecimal digits.
"""

import difflib
import hashlib
import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Annotated

from pydantic import StringConstraints

from engram_bundle.errors import InvalidName
from engram_bundle.untrusted import printable

DEFAULT_ALIAS = "default"
BASE_TASK = "base"  # the backbone's own classifier

MAX_SUGGESTIONS = 8  # unknown names in one request for which a similar name is suggested
_NAME_CHARS = 127  # two parts and a slash
_MAX_CANDIDATES = 20_000
_MAX_COMPARED = 24

_PART = r"[a-z0-9][a-z0-9._-]{0,62}"
_TASK = re.compile(rf"(?:{_PART}/)?{_PART}")
# Starts with a letter, because `cifar:3` is a typo for `cifar@3`, never an alias.
_ALIAS = re.compile(r"[a-z][a-z0-9._-]{0,62}")
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_SHA256 = "sha256:"
DIGEST_PATTERN = rf"^{_SHA256}[0-9a-f]{{64}}$"
Digest = Annotated[str, StringConstraints(pattern=DIGEST_PATTERN)]


@dataclass(frozen=True, slots=True)
class TaskRef:
    """A reference to one version of a task, by number or by alias (default: `default`)."""

    task: str
    version: int | None = None
    alias: str | None = None

    def __str__(self) -> str:
        if self.version is not None:
            return f"{self.task}@{self.version}"
        return self.task if self.alias is None else f"{self.task}:{self.alias}"


def parse_ref(text: str) -> TaskRef:
    """Parse a reference, or raise InvalidName."""
    if "@" in text:
        task, _, number = text.partition("@")
        if not _VERSION.fullmatch(number):
            raise InvalidName(
                f"'{printable(text)}' has no version after '@': write for example 'cifar@3'.",
                names=[text],
            )
        ref = TaskRef(task, version=int(number))
    elif ":" in text:
        task, _, alias = text.partition(":")
        ref = TaskRef(task, alias=check_alias(alias))
    else:
        ref = TaskRef(text)
    if ref.task != BASE_TASK:
        check_task_name(ref.task)
    elif text != BASE_TASK:
        raise InvalidName(
            f"'{printable(text)}': the built-in task 'base' has no versions or aliases.",
            names=[text],
        )
    return ref


def check_task_name(name: str) -> str:
    """Return the name if a task may be published under it, or raise InvalidName."""
    if name == BASE_TASK:
        raise InvalidName(
            "'base' is reserved for the backbone's own classifier: choose another task name.",
            names=[name],
        )
    if not _TASK.fullmatch(name):
        raise InvalidName(
            f"'{printable(name)}' is not a valid task name: use 1 to 63 of a-z 0-9 . _ - starting "
            f"with a letter or digit, optionally after one 'team/'.",
            names=[name],
        )
    return name


def check_alias(alias: str) -> str:
    """Return a valid alias, or raise InvalidName."""
    if not _ALIAS.fullmatch(alias):
        raise InvalidName(
            f"'{printable(alias)}' is not a valid alias: use 1 to 63 of a-z 0-9 . _ - starting "
            f"with a letter.",
            names=[alias],
        )
    return alias


def digest_of(data: bytes) -> str:
    return format_digest(hashlib.sha256(data).digest())


def format_digest(raw: bytes) -> str:
    """Write the 32 bytes of a SHA-256 as a digest."""
    return _SHA256 + raw.hex()


def parse_digest(digest: str) -> bytes:
    """Return the 32 bytes of a digest, or raise InvalidName."""
    if re.fullmatch(DIGEST_PATTERN, digest) is None:
        raise InvalidName(
            f"'{printable(digest, 80)}' is not a digest: write 'sha256:' and 64 hex digits.",
            names=[digest],
        )
    return bytes.fromhex(digest.removeprefix(_SHA256))


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a misspelt one, if any is.

    Only a few of the names are compared letter by letter: those that share the longest beginning
    and end with it, which a single typo leaves unchanged.
    """
    if len(name) > _NAME_CHARS:
        return None

    def shared(other: str) -> int:
        return _common_prefix(name, other) + _common_prefix(reversed(name), reversed(other))

    candidates = heapq.nlargest(_MAX_COMPARED, islice(known, _MAX_CANDIDATES), key=shared)
    near = difflib.get_close_matches(name, candidates, n=1)
    return near[0] if near else None


def _common_prefix(one: Iterable[str], other: Iterable[str]) -> int:
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
