"""Who makes a request, and what they may do: scopes, each for some tasks.

Keys, and whatever else tells who somebody is, all end in an `Identity`; nothing behind it knows
where it came from.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, get_args

from server.quota import Quota

Scope = Literal["predict", "read", "publish", "admin", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

# `*` stands for any number of any characters, the slash of a team included.
ANY_TASK = "*"


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated caller. Its `id` is the actor in the catalog, and the owner of contexts."""

    id: str  # `local`, `api-key`, `admin-key`, `key:<id of the key>`
    name: str  # for people
    grants: Mapping[Scope, tuple[str, ...]]  # patterns of task names
    quota: Quota | None = field(default=None, compare=False)

    def has_any(self, scopes: Iterable[Scope]) -> bool:
        """Whether one of these scopes is held, for whatever tasks."""
        return any(scope in self.grants for scope in scopes)

    def may(self, scopes: Iterable[Scope], task: str) -> bool:
        """Whether one of these scopes is held for a task."""
        for scope in scopes:
            for pattern in self.grants.get(scope, ()):
                if pattern == ANY_TASK or matches(pattern, task):
                    return True
        return False

    def permitted(self, scope: Scope, tasks: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the tasks for which a scope is held."""
        return _matching(self.grants.get(scope, ()), tasks)

    def may_all(self, scopes: Iterable[Scope]) -> bool:
        """Whether one of these scopes is held for every task there may be."""
        return any(ANY_TASK in self.grants.get(scope, ()) for scope in scopes)


EVERYTHING: Mapping[Scope, tuple[str, ...]] = dict.fromkeys(SCOPES, (ANY_TASK,))
# Whoever reaches a server without keys, which listens to its own machine alone.
LOCAL = Identity("local", "without a key", EVERYTHING)


@lru_cache(maxsize=256)
def _matching(patterns: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    # Remembered: every request asks the same of all the names of a generation.
    return tuple(name for name in names if any(matches(pattern, name) for pattern in patterns))


def matches(pattern: str, name: str) -> bool:
    """Whether a name fits a pattern. Takes time in proportion to the name, whatever they are."""
    first, *others = pattern.split("*")
    if not others:
        return name == pattern
    *middle, last = others
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        found = name.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True
