"""Several bundles over one or several data sets, all tasks of a data set in one pass.

A bundle is judged on a data set whose labels it knows. Data that a bundle was trained on is told
from its manifest, and then only the images that were held out are used.
"""

from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

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
class _Pair:
    """A bundle that fits a data set."""

    name: str
    bundle: TaskBundle
    task: Task
    labels: tuple[str, ...]  # of its outputs, in the data's words


def evaluate(
    data: Sequence[str | Path],
    *,
    tasks: Sequence[str | Path],
    backbone: Backbone,
    split: SplitName | None = None,
    problem: Problem | None = None,
    batch: int = 32,
    watcher: Watcher | None = None,
) -> Evaluation:
    """Judge bundles on data sets; `split` where the data has several, test unless told."""
    loaded = load_tasks(backbone, tasks)
    names = _names([Path(task) for task in tasks], len(loaded.bundles))
    found = Evaluation([], [], [])
    sets = [read_data(source, problem) for source in data]
    used: set[str] = set()
    watcher = watcher or Watcher()
    with ThreadPoolExecutor(max_workers=WORKERS) as pool, closing(Scratch(KEPT_BYTES)) as scratch:
        for whole in sets:
            pairs = [
                _Pair(name, bundle, task, labels)
                for name, bundle, task in zip(names, loaded.bundles, loaded.tasks, strict=True)
                if (labels := _matched(bundle, whole)) is not None
            ]
            if not pairs:
                raise DataError(_mismatch(whole, names, loaded.bundles))
            used |= {pair.name for pair in pairs}
            chosen = _chosen(whole, split, [pair.bundle for pair in pairs], found.notes)
            _judge(backbone, chosen, pairs, batch, pool, watcher, scratch, found)
    if unused := [name for name in names if name not in used]:
        raise DataError(f"none of the data sets has the labels of {', '.join(unused)}")
    return found


def _names(paths: Sequence[Path], count: int) -> list[str]:
    """The files' own names, or their whole paths where those are not distinct."""
    stems = [path.stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
    if len(names) != count:
        raise DataError("the same bundle is given twice")
    return names


def _matched(bundle: TaskBundle, data: DataSet) -> tuple[str, ...] | None:
    """What the bundle's outputs are called in the data; None where they are strangers."""
    if bundle.problem != data.problem:
        return None
    if data.problem == "regression":
        return () if bundle.classes == data.outputs else None
    if set(data.labels) <= set(bundle.labels):
        return bundle.labels
    unnamed = bundle.labels == default_labels(bundle.classes)
    return data.labels if unnamed and len(data.labels) == bundle.classes else None


def _mismatch(data: DataSet, names: Sequence[str], bundles: Sequence[TaskBundle]) -> str:
    near = max(range(len(bundles)), key=lambda i: len(set(data.labels) & set(bundles[i].labels)))
    unknown = sorted(set(data.labels) - set(bundles[near].labels))
    known = len(data.labels) - len(unknown)
    return (
        f"no task fits the data '{data.name}' ({data.problem}, {len(data.labels)} labels): "
        f"'{names[near]}' ({bundles[near].problem}) knows {known} of them"
        + (f", and not '{unknown[0][:60]}'" if unknown else "")
    )


def _chosen(
    data: DataSet, split: SplitName | None, bundles: Sequence[TaskBundle], notes: list[str]
) -> DataSet:
    """The images to judge on: held out ones, wherever it can be known which those are."""
    if all(sample.split is None for sample in data.samples):
        trained = next((b for b in bundles if _trained_on(b, data)), None)
        if trained is None:
            if split is not None:
                raise DataError(f"'{data.name}' has no split '{split}': it is not split")
            return data
        training = trained.manifest.training
        shares, seed = training["split"], training["seed"]
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


def _trained_on(bundle: TaskBundle, data: DataSet) -> bool:
    training = bundle.manifest.training
    about = training.get("data")
    known = isinstance(about, dict) and about.get("digest") == data.digest
    return known and "split" in training and "seed" in training


def _judge(
    backbone: Backbone,
    data: DataSet,
    pairs: Sequence[_Pair],
    batch: int,
    pool: Executor,
    watcher: Watcher,
    scratch: Scratch,
    found: Evaluation,
) -> None:
    paths = [sample.path for sample in data.samples]
    images = ImageSet(paths, backbone.preprocessing, scratch)
    told = watcher.stage(f"reading {data.name}")
    skipped = images.read_all(pool, told)
    found.skipped.extend(skipped)
    data = data.without(one.path for one in skipped)
    if not len(data):
        raise DataError(f"no image of '{data.name}' can be read")
    tasks = [pair.task for pair in pairs]
    told = watcher.stage(f"judging {data.name}")
    answers = predict(backbone, images, tasks, batch, pool, told)
    for pair, logits in zip(pairs, answers, strict=True):
        targets = torch.from_numpy(data.targets(pair.labels))
        by_order = pair.labels != pair.bundle.labels
        one = figures(logits, targets, data.problem, pair.labels)
        found.judged.append(Judged(pair.name, data.name, one, by_order, logits, targets))
