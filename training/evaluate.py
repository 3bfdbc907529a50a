"""Several bundles over one or several data sets, all tasks of a data set in one pass.

A bundle is judged on a data set whose labels it knows. Data that a bundle was trained on is told
from its manifest, and then only the images that were held out are used. Who answers is not this
module's business: `evaluate` asks a backbone right here, `training.remote` a server.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from server.model import Backbone
from server.model.tasks import Task
from task_store import TaskBundle
from training.data import DataSet, Problem, SplitName, read_data, split_data
from training.errors import DataError
from training.images import ImageSet, Unreadable
from training.labels import default_labels
from training.lineage import load_tasks
from training.metrics import Figures, figures
from training.predict import predict
from training.scratch import Scratch
from training.watching import Watcher

HELD_OUT: tuple[SplitName, ...] = ("test", "val")
BATCH = 32
WORKERS = 2
KEPT_BYTES = 4 * 2**30  # of decoded images


@dataclass(frozen=True, slots=True)
class Judged:
    """One bundle on one data set."""

    task: str
    data: str
    figures: Figures
    by_order: bool  # classes matched by their order, because the bundle's have no names
    logits: Tensor  # (n, K)
    targets: Tensor


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that was judged, and what could not be."""

    judged: list[Judged]
    skipped: list[Unreadable]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A task to be judged, as far as its bundle tells."""

    name: str
    problem: str
    labels: tuple[str, ...]
    classes: int
    training: Mapping[str, object]  # how it came about

    @classmethod
    def of(cls, name: str, bundle: TaskBundle) -> "Candidate":
        training = bundle.manifest.training
        return cls(name, bundle.problem, bundle.labels, bundle.classes, training)


@dataclass(frozen=True, slots=True)
class Answered:
    """Logits (n, K) of each task, for all images but those that could not be read."""

    logits: list[Tensor]
    skipped: list[Unreadable]


class Answerer(Protocol):
    """Answers for the images of a data set, by some of the candidates, given by their places."""

    def __call__(self, data: DataSet, places: Sequence[int]) -> Answered: ...


def evaluate(
    data: Sequence[str | Path],
    *,
    tasks: Sequence[str | Path],
    backbone: Backbone,
    split: SplitName | None = None,
    problem: Problem | None = None,
    batch: int = BATCH,
    watcher: Watcher | None = None,
) -> Evaluation:
    """Judge bundles on data sets; `split` where the data has several, test unless told."""
    loaded = load_tasks(backbone, tasks)
    names = _names([Path(task) for task in tasks], len(loaded.bundles))
    candidates = list(map(Candidate.of, names, loaded.bundles))
    sets = [read_data(source, problem) for source in data]
    with ThreadPoolExecutor(max_workers=WORKERS) as pool, closing(Scratch(KEPT_BYTES)) as scratch:
        told = watcher or Watcher()
        answerer = _OnBackbone(backbone, loaded.tasks, batch, pool, told, scratch)
        return judge(sets, candidates, answerer, split)


def judge(
    sets: Sequence[DataSet],
    candidates: Sequence[Candidate],
    answerer: Answerer,
    split: SplitName | None,
) -> Evaluation:
    """Each candidate on every data set whose labels it knows."""
    found = Evaluation([], [], [])
    used: set[int] = set()
    for whole in sets:
        known = {
            place: labels
            for place, candidate in enumerate(candidates)
            if (labels := _matched(candidate, whole)) is not None
        }
        if not known:
            raise DataError(_mismatch(whole, candidates))
        used |= known.keys()
        chosen = _chosen(whole, split, [candidates[place] for place in known], found.notes)
        answered = answerer(chosen, list(known))
        found.skipped.extend(answered.skipped)
        rest = chosen.without(one.path for one in answered.skipped)
        if not len(rest):
            raise DataError(f"no image of '{rest.name}' can be read")
        for (place, labels), logits in zip(known.items(), answered.logits, strict=True):
            candidate = candidates[place]
            targets = torch.from_numpy(rest.targets(labels))
            one = figures(logits, targets, rest.problem, labels)
            by_order = labels != candidate.labels
            found.judged.append(Judged(candidate.name, rest.name, one, by_order, logits, targets))
    if unused := [one.name for place, one in enumerate(candidates) if place not in used]:
        raise DataError(f"none of the data sets has the labels of {', '.join(unused)}")
    return found


@dataclass(frozen=True, slots=True)
class _OnBackbone:
    """Answers by a backbone in this process."""

    backbone: Backbone
    tasks: Sequence[Task]
    batch: int
    pool: Executor
    watcher: Watcher
    scratch: Scratch

    def __call__(self, data: DataSet, places: Sequence[int]) -> Answered:
        paths = [sample.path for sample in data.samples]
        images = ImageSet(paths, self.backbone.preprocessing, self.scratch)
        skipped = images.read_all(self.pool, self.watcher.stage(f"reading {data.name}"))
        tasks = [self.tasks[place] for place in places]
        told = self.watcher.stage(f"judging {data.name}")
        logits = predict(self.backbone, images, tasks, self.batch, self.pool, told)
        return Answered(logits, skipped)


def _names(paths: Sequence[Path], count: int) -> list[str]:
    """The files' own names, or their whole paths where those are not distinct."""
    stems = [path.stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
    if len(names) != count:
        raise DataError("the same bundle is given twice")
    return names


def _matched(candidate: Candidate, data: DataSet) -> tuple[str, ...] | None:
    """What the candidate's outputs are called in the data; None where they are strangers."""
    if candidate.problem != data.problem:
        return None
    if data.problem == "regression":
        return () if candidate.classes == data.outputs else None
    if set(data.labels) <= set(candidate.labels):
        return candidate.labels
    unnamed = candidate.labels == default_labels(candidate.classes)
    return data.labels if unnamed and len(data.labels) == candidate.classes else None


def _mismatch(data: DataSet, candidates: Sequence[Candidate]) -> str:
    near = max(candidates, key=lambda one: len(set(data.labels) & set(one.labels)))
    unknown = sorted(set(data.labels) - set(near.labels))
    known = len(data.labels) - len(unknown)
    return (
        f"no task fits the data '{data.name}' ({data.problem}, {len(data.labels)} labels): "
        f"'{near.name}' ({near.problem}) knows {known} of them"
        + (f", and not '{unknown[0][:60]}'" if unknown else "")
    )


def _chosen(
    data: DataSet, split: SplitName | None, candidates: Sequence[Candidate], notes: list[str]
) -> DataSet:
    """The images to judge on: held out ones, wherever it can be known which those are."""
    if all(sample.split is None for sample in data.samples):
        trained = next((one for one in candidates if _trained_on(one, data)), None)
        if trained is None:
            if split is not None:
                raise DataError(f"'{data.name}' has no split '{split}': it is not split")
            return data
        shares, seed = trained.training["split"], trained.training["seed"]
        assert isinstance(shares, list)
        assert isinstance(seed, int)
        train, val, test = (float(str(share)) for share in shares)
        data = split_data(data, (train, val, test), seed)
        notes.append(
            f"'{data.name}' is what a task was trained on: judged on the images held out then"
        )
    order = HELD_OUT if split is None else (split,)
    for name in order:
        if len(part := data.part(name)):
            return part
    if split is not None:
        raise DataError(f"'{data.name}' has no images in the split '{split}'")
    notes.append(f"'{data.name}' has training images only: judged on those")
    return data


def _trained_on(candidate: Candidate, data: DataSet) -> bool:
    about = candidate.training.get("data")
    known = isinstance(about, dict) and about.get("digest") == data.digest
    return known and "split" in candidate.training and "seed" in candidate.training
