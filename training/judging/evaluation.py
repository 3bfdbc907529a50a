"""Several bundles over one or several data sets, all tasks of a data set in one pass.

A bundle is judged on a data set whose labels it knows. Its manifest tells which data it was trained
on, and of that only the images that were held out are used. `evaluate` gets the answers from a
backbone in this process, `training.judging.remote` from a server; `judge` serves both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from server.model import Backbone
from task_store import TaskBundle
from training.bundles import load_tasks
from training.data.dataset import DataSet, Problem, SplitName, read_data
from training.data.images import ImageSet, Unreadable
from training.data.labels import default_labels
from training.data.splits import split_data
from training.data.workspace import Workspace
from training.errors import DataError
from training.judging.metrics import Figures, figures
from training.judging.predict import predict
from training.progress import Watcher

HELD_OUT: tuple[SplitName, ...] = ("test", "val")
BATCH = 32
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
    training: Mapping[str, object]  # provenance

    @classmethod
    def of(cls, name: str, bundle: TaskBundle) -> "Candidate":
        training = bundle.manifest.training
        return cls(name, bundle.problem, bundle.labels, bundle.classes, training)


@dataclass(frozen=True, slots=True)
class Answers:
    """Logits (n, K) of each task, for all images but those that could not be read."""

    logits: list[Tensor]
    skipped: list[Unreadable]


# Answers to the images of a data set by some of the candidates, given by their places.
Answerer = Callable[[DataSet, Sequence[int]], Answers]


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
    """Judge bundles on data sets; `split` chooses one of theirs, else the held-out one is used."""
    loaded = load_tasks(backbone, tasks)
    names = _names([Path(task) for task in tasks], len(loaded.bundles))
    candidates = list(map(Candidate.of, names, loaded.bundles))
    sets = [read_data(source, problem) for source in data]
    with Workspace(KEPT_BYTES, watcher=watcher) as workspace:

        def answer(data: DataSet, places: Sequence[int]) -> Answers:
            paths = [sample.path for sample in data.samples]
            images = ImageSet(paths, backbone.preprocessing, workspace.scratch)
            skipped = images.read_all(workspace.pool, workspace.stage(f"reading {data.name}"))
            chosen = [loaded.tasks[place] for place in places]
            on_progress = workspace.stage(f"judging {data.name}")
            logits = predict(backbone, images, chosen, batch, workspace.pool, on_progress)
            return Answers(logits, skipped)

        return judge(sets, candidates, answer, split)


def judge(
    sets: Sequence[DataSet],
    candidates: Sequence[Candidate],
    answer: Answerer,
    split: SplitName | None,
) -> Evaluation:
    """Each candidate on every data set whose labels it knows."""
    result = Evaluation([], [], [])
    used: set[int] = set()
    for whole in sets:
        matches = {
            place: labels
            for place, candidate in enumerate(candidates)
            if (labels := _match_labels(candidate, whole)) is not None
        }
        if not matches:
            raise DataError(_mismatch(whole, candidates))
        used |= matches.keys()
        chosen = _chosen(whole, split, [candidates[place] for place in matches], result.notes)
        answers = answer(chosen, list(matches))
        result.skipped.extend(answers.skipped)
        rest = chosen.without(one.path for one in answers.skipped)
        if not len(rest):
            raise DataError(f"no image of '{rest.name}' can be read")
        for (place, labels), logits in zip(matches.items(), answers.logits, strict=True):
            candidate = candidates[place]
            targets = torch.from_numpy(rest.targets(labels))
            one = figures(logits, targets, rest.problem, labels)
            by_order = labels != candidate.labels
            result.judged.append(Judged(candidate.name, rest.name, one, by_order, logits, targets))
    if unused := [one.name for place, one in enumerate(candidates) if place not in used]:
        raise DataError(f"none of the data sets has the labels of {', '.join(unused)}")
    return result


def _names(paths: Sequence[Path], count: int) -> list[str]:
    """The files' own names, or their whole paths where those are not distinct."""
    stems = [path.stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
    if len(names) != count:
        raise DataError("the same bundle is given twice")
    return names


def _match_labels(candidate: Candidate, data: DataSet) -> tuple[str, ...] | None:
    """The data's names of the candidate's outputs; None where they do not match."""
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
