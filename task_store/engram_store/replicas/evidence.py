"""Evidence: how versions of a task answered the same images, counted by each server.

    evidence/<task>/<replica>.json    {"format": 1, "task": "pets", "pairs": […]}

Each server regularly writes its own counters, one object for each task, and no other server writes
that object. The sum of all objects of a task is the evidence of all replicas. The objects of
stopped servers stay, so evidence survives restarts, until they are older than `KEPT`. Objects have
counts and class labels, and nothing about single images.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Annotated, Final, Literal

from engram_bundle import check_task_name
from pydantic import Field

from engram_store.catalog import Catalog
from engram_store.events import Count, Record
from engram_store.layout import EVIDENCE, evidence_at
from engram_store.objects import ObjectInfo, Objects

KEPT: Final = timedelta(days=30)

Number = Annotated[int, Field(ge=0)]
ClassCounts = tuple[Number, Number]  # images with this top label, and those that agreed


class PairEvidence(Record):
    """Two versions of a task on the same images: one that answered, and a candidate."""

    baseline: Count
    candidate: Count
    images: Number = 0
    agreed: Number = 0  # the same top label, or for multi-label tasks the same labels
    agreed_top_k: Number = 0  # the top label of the baseline is among the first of the candidate
    score_difference: float = 0.0  # the sum over all images
    dropped: Number = 0  # images on which the candidate was left out
    not_finite: Number = 0  # answers of the candidate
    both_right: Number = 0  # by feedback, as are the next three
    only_baseline_right: Number = 0
    only_candidate_right: Number = 0
    both_wrong: Number = 0
    classes: Mapping[str, ClassCounts] = {}

    @property
    def versions(self) -> tuple[int, int]:
        return self.baseline, self.candidate

    def plus(self, other: "PairEvidence") -> "PairEvidence":
        """Return the sum of this evidence and another server's."""
        counts = set(PairEvidence.model_fields) - {"baseline", "candidate", "classes"}
        sums = {name: getattr(self, name) + getattr(other, name) for name in counts}
        classes = dict(self.classes)
        for label, (images, agreed) in other.classes.items():
            before = classes.get(label, (0, 0))
            classes[label] = before[0] + images, before[1] + agreed
        return self.model_copy(update={**sums, "classes": classes})


class TaskEvidence(Record):
    format: Literal[1] = 1
    task: str
    pairs: tuple[PairEvidence, ...]


class Evidence:
    """The evidence in a store. Invalid objects are skipped."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects

    def write(self, replica: str, evidence: TaskEvidence) -> None:
        data = evidence.model_dump_json().encode() + b"\n"
        self._objects.put(EVIDENCE.path(f"{evidence.task}/{replica}"), data)

    def remove(self, task: str, replica: str) -> None:
        self._objects.delete(EVIDENCE.path(f"{task}/{replica}"))

    def of_others(self, task: str, replica: str) -> list[PairEvidence]:
        """Read the evidence of a task that other servers have written."""
        own = EVIDENCE.path(f"{task}/{replica}")
        paths = [info.path for info in self._listing(task) if info.path != own]
        return [pair for each in self._read(paths) if each.task == task for pair in each.pairs]

    def of_purged(self, catalog: Catalog) -> list[ObjectInfo]:
        """List the objects that mention a purged version."""
        infos = [
            info
            for task in catalog.all_tasks.values()
            if task.purged
            for info in self._listing(task.name)
        ]
        read = self._objects.get_many([info.path for info in infos])
        pairs = ((info, TaskEvidence.read(data)) for info, data in zip(infos, read, strict=True))
        return [info for info, each in pairs if each is None or _mentions_purged(each, catalog)]

    def expired(self, before: datetime) -> list[ObjectInfo]:
        """List the objects that were last written before a time."""
        return [info for info in self._objects.listing(EVIDENCE.folder) if info.modified < before]

    def delete(self, infos: Iterable[ObjectInfo]) -> None:
        for info in infos:
            self._objects.delete(info.path)

    def _listing(self, task: str) -> list[ObjectInfo]:
        check_task_name(task)
        listed = self._objects.listing(f"{EVIDENCE.folder}/{task}")
        return [info for info in listed if evidence_at(info.path) == task]

    def _read(self, paths: list[str]) -> Iterable[TaskEvidence]:
        read = map(TaskEvidence.read, self._objects.get_many(paths))
        return [each for each in read if each is not None]


def _mentions_purged(evidence: TaskEvidence, catalog: Catalog) -> bool:
    purged = catalog.all_tasks[evidence.task].purged if evidence.task in catalog.all_tasks else {}
    return any(not purged.keys().isdisjoint(pair.versions) for pair in evidence.pairs)
