"""The tasks of a batch run: from a store or from bundle files, checked as the server does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from engram_bundle import TaskBundle, TaskStoreError
from engram_bundle.names import BASE_TASK
from engram_store import TaskStore

from engram_server.batch.passing import DevicePass
from engram_server.engine.tasks.loader import TaskPreparer
from engram_server.engine.types import Floats, LoadedBundle, Pixels, ServedTask
from engram_server.errors import EngramError, SettingsError, TaskMismatch
from engram_server.model.backbone import Backbone


@dataclass(frozen=True, slots=True)
class ChosenTask:
    """A task by the reference under which its answers are written."""

    reference: str
    name: str
    version: int | None  # None for `base` and for bundle files
    bundle: TaskBundle | None  # None for `base`


@dataclass(frozen=True, slots=True)
class ChosenTasks:
    tasks: Sequence[ChosenTask]
    parents: Mapping[str, TaskBundle]  # by digest: every bundle that another extends


def choose_tasks(
    references: Sequence[str], store: TaskStore | None, files: Sequence[Path]
) -> ChosenTasks:
    """Read the bundles of references and of files. Raises TaskStoreError or SettingsError."""
    tasks = [_from_store(reference, store) for reference in dict.fromkeys(references)]
    for file in files:
        bundle = TaskBundle.load(file)
        name = bundle.manifest.name or file.stem
        tasks.append(ChosenTask(name, name, None, bundle))
    names = [task.reference for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SettingsError(f"Task '{twice[0]}' is listed twice. Remove one, or rename the bundle.")
    known = {task.bundle.digest: task.bundle for task in tasks if task.bundle is not None}
    parents: dict[str, TaskBundle] = {}
    for task in tasks:
        if task.bundle is not None:
            _add_parents(task.reference, task.bundle, known, store, parents)
    return ChosenTasks(tasks, parents)


def _from_store(reference: str, store: TaskStore | None) -> ChosenTask:
    if reference == BASE_TASK:
        return ChosenTask(BASE_TASK, BASE_TASK, None, None)
    assert store is not None, "references need a store"
    found = store.catalog(refresh=False).resolve(reference)
    return ChosenTask(reference, found.task, found.version, store.read_bundle(found.digest))


def _add_parents(
    reference: str,
    bundle: TaskBundle,
    known: Mapping[str, TaskBundle],
    store: TaskStore | None,
    parents: dict[str, TaskBundle],
) -> None:
    # A digest covers the digests of the parents, so there are no cycles.
    for digest in bundle.extends:
        if digest in parents:
            continue
        parent = known.get(digest)
        if parent is None and store is None:
            raise SettingsError(
                f"'{reference}' extends the bundle {digest}. Pass that bundle with --bundle as "
                f"well."
            )
        parents[digest] = parent or _read_parent(store, digest)
        _add_parents(reference, parents[digest], known, store, parents)


def _read_parent(store: TaskStore | None, digest: str) -> TaskBundle:
    assert store is not None
    return store.read_bundle(digest)


def keep_references(
    chosen: ChosenTasks, earlier: Mapping[str, Mapping[str, object]]
) -> ChosenTasks:
    """Rename tasks as an earlier run named them.

    A run that was begun with `pets` can so be continued with `pets@3` after `pets` has moved on.
    """
    names = {(each["task"], each["version"]): name for name, each in earlier.items()}
    tasks = [
        task
        if task.reference in earlier or task.version is None
        else replace(task, reference=names.get((task.name, task.version), task.reference))
        for task in chosen.tasks
    ]
    return replace(chosen, tasks=tasks)


class TaskBinder:
    """Binds tasks to the backbone on every device, and replays their golden examples."""

    def __init__(
        self,
        backbones: Mapping[torch.device, Backbone],
        passes: Mapping[torch.device, DevicePass],
        parents: Mapping[str, TaskBundle],
    ) -> None:
        self._passes = passes
        self._parents = parents
        self._preparer = TaskPreparer(backbones, self._replay)
        self._loaded: dict[str, LoadedBundle] = {}  # by digest

    def bind(self, task: ChosenTask) -> ServedTask:
        """Raise TaskMismatch if the task cannot run on the backbone."""
        if task.bundle is None:
            base = self._preparer.base()
            if base is None or base.slot.loaded is None:
                raise TaskMismatch("The backbone has no classifier, so there is no task 'base'.")
            return base.slot.loaded.served_as(base.key)
        key = task.name, task.version
        try:
            loaded = self._load(task.bundle)
            self._preparer.test_answers(task.bundle, loaded, key)
        except (TaskStoreError, EngramError) as error:
            raise TaskMismatch(f"Task '{task.reference}' cannot run: {error}") from error
        return loaded.served_as(key)

    def _load(self, bundle: TaskBundle) -> LoadedBundle:
        if bundle.digest not in self._loaded:
            parents = tuple(self._load(self._parents[digest]) for digest in bundle.extends)
            host = self._preparer.check(bundle)
            self._loaded[bundle.digest] = self._preparer.prepare(bundle.digest, host, parents)
        return self._loaded[bundle.digest]

    def _replay(self, task: ServedTask, images: Sequence[Pixels]) -> Floats:
        """The logits (G, K) of the golden images, on the first device."""
        uint8 = [np.asarray(image, dtype=np.uint8) for image in images]
        run = next(iter(self._passes.values()))
        return np.stack([answer.logits for (answer,) in run([task], uint8).answers])
