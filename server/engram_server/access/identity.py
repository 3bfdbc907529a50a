"""The authenticated caller and its scopes, each limited to task name patterns.

API keys and OpenID Connect tokens both become an `Identity`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, get_args

from engram_server.access.quotas import Quota

Scope = Literal["predict", "read", "publish", "admin", "metrics"]
SCOPES: tuple[Scope, ...] = get_args(Scope)

# `*` matches any characters, including the slash after a team.
ANY_TASK = "*"


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated caller. `id` is the actor in the log and the owner of cached contexts."""

    id: str  # `local`, `api-key`, `admin-key`, `key:<id>`, `openid:<subject>`
    name: str  # shown to users
    grants: Mapping[Scope, tuple[str, ...]]  # patterns of task names
    quota: Quota | None = field(default=None, compare=False)

    def has_scope(self, scopes: Iterable[Scope]) -> bool:
        """Whether the caller has one of these scopes for at least one task pattern."""
        return any(scope in self.grants for scope in scopes)

    def allows(self, scopes: Iterable[Scope], task: str) -> bool:
        """Whether the caller has one of these scopes for a task."""
        for scope in scopes:
            for pattern in self.grants.get(scope, ()):
                if pattern == ANY_TASK or matches(pattern, task):
                    return True
        return False

    def allowed_tasks(self, scope: Scope, tasks: tuple[str, ...]) -> tuple[str, ...]:
        """Filter tasks by a scope."""
        return _matching(self.grants.get(scope, ()), tasks)

    def allows_all_tasks(self, scopes: Iterable[Scope]) -> bool:
        """Whether the caller has one of these scopes for every task."""
        return any(ANY_TASK in self.grants.get(scope, ()) for scope in scopes)


EVERYTHING: Mapping[Scope, tuple[str, ...]] = dict.fromkeys(SCOPES, (ANY_TASK,))
# The caller of a server without keys, which listens on loopback only.
LOCAL = Identity("local", "without a key", EVERYTHING)


@lru_cache(maxsize=256)
def _matching(patterns: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    # Cached: the task names change only with the generation.
    return tuple(name for name in names if any(matches(pattern, name) for pattern in patterns))


def matches(pattern: str, name: str) -> bool:
    """Match a name against a pattern in linear time (fnmatch may backtrack)."""
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
