"""Pages of `GET /tasks`, and the summary of one task.

A page starts after its cursor: the last name of the page before, or with `sort=newest` the
generation that created the last task. Neither depends on other tasks, so no task is skipped or
listed twice while others come and go.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal

from engram_bundle.names import BASE_TASK
from engram_store import TaskInfo
from pydantic import BaseModel, Field

from engram_server.access.identity import Identity
from engram_server.api.dependencies import Strict
from engram_server.engine.tasks.snapshot import Snapshot, Status
from engram_server.errors import InvalidRequest

MAX_PAGE = 1000
MAX_TEAMS = 1000
# Facts of a version that a summary shows.
_SUMMARISED = {"task_type", "classes", "description"}


class TaskQuery(BaseModel):
    """Which tasks to list, and which page of them."""

    limit: int = Field(MAX_PAGE, ge=1, le=MAX_PAGE, description="Tasks in a response.")
    cursor: str | None = Field(
        None, max_length=256, description="`next` of the page before, with the same `sort`."
    )
    q: str = Field(
        "", max_length=256, description="Part of the name or of the description, in any case."
    )
    team: str | None = Field(
        None, max_length=256, description="Only tasks of this team: `team/name`."
    )
    sort: Literal["name", "newest"] = Field(
        "name", description="By name, or the task that was created last first."
    )
    retired: bool = Field(False, description="List the retired tasks instead.")


class TaskSummary(Strict):
    """A task and its default version."""

    task: str = Field(examples=["pets"])
    version: int | None = Field(
        description="The default version; null for `base`. Of a retired task, the default version "
        "after it is restored; null if it cannot be restored as a whole."
    )
    status: Status | Literal["retired"]
    reason: str | None
    task_type: str = Field(examples=["single_label"])
    classes: int
    description: str = Field(examples=["Which pet?"])
    aliases: dict[str, int] = Field(examples=[{"default": 1}])
    versions: list[int] = Field(
        description="Live versions. Of a retired task, those that `restore` brings back."
    )


class TaskList(Strict):
    generation: int
    backbone: str
    tasks: list[TaskSummary]
    total: int = Field(description="Tasks on all pages.")
    next: str | None = Field(description="The `cursor` of the next page; null on the last one.")
    teams: list[str] = Field(
        description=f"Teams of the tasks that the caller may read, at most {MAX_TEAMS}."
    )


def list_page(snapshot: Snapshot, backbone: str, identity: Identity, query: TaskQuery) -> TaskList:
    """One page of the tasks that the caller may read."""
    tasks = snapshot.catalog.retired_tasks if query.retired else snapshot.catalog.tasks
    has_base = snapshot.base is not None and not query.retired
    names = identity.allowed_tasks("read", (*((BASE_TASK,) if has_base else ()), *tasks))
    matching = [name for name in names if _matches(snapshot, name, query)]
    total = len(matching)
    if query.sort == "newest":
        matching.sort(key=lambda name: -_created(snapshot, name))
    if query.cursor is not None:
        matching = list(_after(snapshot, matching, query))
    page, more = matching[: query.limit], len(matching) > query.limit
    return TaskList(
        generation=snapshot.generation,
        backbone=backbone,
        tasks=[TaskSummary(**summarise(snapshot, name, retired=query.retired)) for name in page],
        total=total,
        next=_cursor(snapshot, page[-1], query) if more else None,
        teams=list(islice(dict.fromkeys(team for team in map(_team, names) if team), MAX_TEAMS)),
    )


def summarise(snapshot: Snapshot, name: str, *, retired: bool = False) -> dict[str, Any]:
    """The members of a TaskSummary; UnknownTask if there is no such live task."""
    if retired:
        return _summarise_retired(snapshot.catalog.retired_tasks[name])
    if name == BASE_TASK and (base := snapshot.base) is not None:
        summary: dict[str, Any] = {
            "version": None,
            "task_type": base.task_type,
            "classes": base.classes,
            "description": _description(snapshot, name),
            "aliases": {},
            "versions": [],
        }
    else:
        task = snapshot.catalog.task(name)
        version = task.aliases["default"]
        summary = {
            "version": version,
            **task.versions[version].facts.model_dump(include=_SUMMARISED),
            "aliases": dict(sorted(task.aliases.items())),
            "versions": [each.version for each in task.live],
        }
    state = snapshot.state_of(name, summary["version"])
    return {"task": name, "status": state.status, "reason": state.reason, **summary}


def _summarise_retired(task: TaskInfo) -> dict[str, Any]:
    return {
        "task": task.name,
        "version": task.restored_default,
        "status": "retired",
        "reason": None,
        **task.current.facts.model_dump(include=_SUMMARISED),
        "aliases": {},
        "versions": list(task.restorable),
    }


def _description(snapshot: Snapshot, name: str) -> str:
    if name == BASE_TASK:
        return "The backbone's classifier."
    return snapshot.catalog.all_tasks[name].current.facts.description


def _matches(snapshot: Snapshot, name: str, query: TaskQuery) -> bool:
    if query.team is not None and _team(name) != query.team:
        return False
    text = query.q.casefold()
    return not text or text in name or text in _description(snapshot, name).casefold()


def _team(name: str) -> str:
    return name.rpartition("/")[0]


def _created(snapshot: Snapshot, name: str) -> int:
    """The generation that created a task, which no other task has."""
    return 0 if name == BASE_TASK else snapshot.catalog.all_tasks[name].first.generation


def _cursor(snapshot: Snapshot, name: str, query: TaskQuery) -> str:
    return name if query.sort == "name" else str(_created(snapshot, name))


def _after(snapshot: Snapshot, names: list[str], query: TaskQuery) -> Iterator[str]:
    """The names behind the cursor."""
    cursor = query.cursor or ""
    if query.sort == "name":
        last = _position(cursor)
        return (name for name in names if _position(name) > last)
    if not cursor.isdecimal():
        raise InvalidRequest(
            f"'{cursor}' is not a cursor of a list with sort=newest: send `next` of the page "
            f"before."
        )
    generation = int(cursor)
    return (name for name in names if _created(snapshot, name) < generation)


def _position(name: str) -> tuple[bool, str]:
    """The place of a name in the list: `base` is first."""
    return (name != BASE_TASK, name)
