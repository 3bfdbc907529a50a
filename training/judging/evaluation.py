"""Several bundles over one or several data sets, all tasks of a data set in one pass.

A bundle is judged on a data set whose labels it knows. Its manifest tells which data it was trained
on, and of that only the images that were held out are used. `evaluate` gets the answers from a
backbone in this process, `evaluate_server` from a server; `judge` serves both.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import torch
from engram_client import Client
from torch import Tensor

from server.model import Backbone
from server.model.masked_pass import masked_pass
from server.model.tasks import StackCache, Task
from task_store import TaskBundle
from task_store.names import BASE_TASK
from training.bundles import default_labels, load_tasks
from training.data.dataset import DataSet, Problem, SplitName, read_data, split_data
from training.data.images import ImageSet, Unreadable
from training.data.workspace import Workspace
from training.errors import DataError
from training.judging.metrics import Figures, figures
from training.progress import OnProgress, Watcher

HELD_OUT: tuple[SplitName, ...] = ("test", "val")
BATCH = 32
KEPT_BYTES = 4 * 2**30  # of decoded images


@dataclass(frozen=True, slots=True)
class Judged:
    task: str
    data: str
    figures: Figures
    by_order: bool  # classes matched by their order, because the bundle's have no names
    logits: Tensor  # (n, K)


@dataclass(frozen=True, slots=True)
class Evaluation:
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


# Logits (n, K) of each task, for all images but those that could not be read.
Answers = tuple[list[Tensor], list[Unreadable]]
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
            skipped = images.read_all(
                workspace.pool, workspace.watcher.stage(f"reading {data.name}")
            )
            chosen = [loaded.tasks[place] for place in places]
            on_progress = workspace.watcher.stage(f"judging {data.name}")
            logits = predict(backbone, images, chosen, batch, workspace.pool, on_progress)
            return logits, skipped

        return judge(sets, candidates, answer, split)


def evaluate_server(
    data: Sequence[str | Path],
    *,
    tasks: Sequence[str],
    client: Client,
    split: SplitName | None = None,
    problem: Problem | None = None,
    watcher: Watcher | None = None,
) -> Evaluation:
    """Judge tasks of a server, given by reference, on data sets.

    Labels and provenance are read from the bundle, which the server hands out. The server gets the
    files as they are, with all tasks of an image in one request. A reference is resolved once, so
    that a label that moves meanwhile does not mix two versions.
    """
    sets = [read_data(source, problem) for source in data]
    resolved = [_resolve(client, task) for task in tasks]
    references = [reference for reference, _ in resolved]
    if len(set(references)) != len(references):
        raise DataError("the same task is given twice")

    def answer(data: DataSet, places: Sequence[int]) -> Answers:
        paths = [sample.path for sample in data.samples]
        requested = [references[place] for place in places]
        on_progress = (watcher or Watcher()).stage(f"asking about {data.name}")
        logits: list[list[tuple[float, ...] | None]] = [[] for _ in requested]
        skipped: list[Unreadable] = []
        for image in client.predict_iter(paths, requested, returns="logits", keep_going=True):
            if image.error is None:
                for rows, reference in zip(logits, requested, strict=True):
                    rows.append(image[reference].logits)
            else:
                skipped.append(Unreadable(paths[image.index], image.error))
            if on_progress is not None:
                on_progress(image.index + 1, len(paths))
        return [torch.tensor(rows) for rows in logits], skipped

    return judge(sets, [candidate for _, candidate in resolved], answer, split)


def _resolve(client: Client, task: str) -> tuple[str, Candidate]:
    """The reference of one version, and what its bundle says."""
    if task == BASE_TASK:
        about = client.task(task)
        labels = about.class_labels or ()
        return task, Candidate(task, about.problem, labels, about.classes, {})
    pulled = client.pull(task)
    bundle = TaskBundle.from_bytes(pulled.data)
    return f"{pulled.task}@{pulled.version}", Candidate.of(task, bundle)


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
        answers, skipped = answer(chosen, list(matches))
        result.skipped.extend(skipped)
        rest = chosen.without(one.path for one in skipped)
        if not len(rest):
            raise DataError(f"no image of '{rest.name}' can be read")
        for (place, labels), logits in zip(matches.items(), answers, strict=True):
            candidate = candidates[place]
            targets = torch.from_numpy(rest.targets(labels))
            one = figures(logits, targets, rest.problem, labels)
            by_order = labels != candidate.labels
            result.judged.append(Judged(candidate.name, rest.name, one, by_order, logits))
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
    for name in HELD_OUT if split is None else (split,):
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


def predict(
    backbone: Backbone,
    images: ImageSet,
    tasks: Sequence[Task],
    batch: int,
    pool: Executor,
    on_progress: OnProgress | None = None,
) -> list[Tensor]:
    """Logits (n, K) of each task, all in one pass over the images: the one that the server runs."""
    logits: list[list[Tensor]] = [[] for _ in tasks]
    starts = range(0, len(images), batch)
    parts = [range(start, min(start + batch, len(images))) for start in starts]
    stacks = StackCache()
    upcoming = pool.submit(images.batch, parts[0]) if parts else None
    for position, places in enumerate(parts):
        assert upcoming is not None
        pixels = upcoming.result()
        if position + 1 < len(parts):
            upcoming = pool.submit(images.batch, parts[position + 1])
        for rows, values in zip(logits, answer(backbone, pixels, tasks, stacks), strict=True):
            rows.append(values)
        if on_progress is not None:
            on_progress(places.stop, len(images))
    return [
        torch.cat(rows) if rows else torch.zeros(0, task.head_weight.shape[0])
        for rows, task in zip(logits, tasks, strict=True)
    ]


def answer(
    backbone: Backbone, pixels: Tensor, tasks: Sequence[Task], stacks: StackCache
) -> list[Tensor]:
    """Logits (B, K) of each task for uint8 images (B, H, W, 3)."""
    view = backbone.preprocessing.normalise(pixels.to(backbone.device), backbone.dtype)
    with torch.no_grad():
        result = masked_pass(backbone, view, None, [list(tasks)] * len(view), stacks)
    by_task = {one.task: one.values.cpu() for one in result.logits}
    return [by_task[task] for task in tasks]
