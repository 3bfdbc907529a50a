"""Evaluate bundles on data sets, all tasks of a data set in one pass.

A bundle is evaluated on the data sets whose labels it has. If the manifest says that it was trained
on a data set, only held-out images are used.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from engram_bundle import TaskBundle
from engram_bundle.names import BASE_TASK
from engram_server.model import Backbone, ContextBatch
from engram_server.model.masked_pass import masked_pass
from engram_server.model.tasks import StackCache, Task
from engram_vit import Client
from engram_vit.answers import TaskAnswer
from engram_vit.errors import RequestRejected
from torch import Tensor

from engram_training.bundles import default_labels, load_tasks
from engram_training.data.dataset import DataSet, SplitName, TaskType, read_data, split_data
from engram_training.data.images import ImageSet, Inputs, Unreadable
from engram_training.data.workspace import OnProgress, Watcher, Workspace
from engram_training.errors import DataError
from engram_training.judging.metrics import Figures, figures

HELD_OUT: tuple[SplitName, ...] = ("test", "val")
BATCH = 32
KEPT_BYTES = 4 * 2**30  # of decoded images


@dataclass(frozen=True, slots=True)
class Judged:
    task: str
    data: str
    figures: Figures
    by_order: bool  # classes matched by order, because the bundle has no class names
    logits: Tensor  # (n, K)


@dataclass(frozen=True, slots=True)
class Failure:
    """A task without figures, or a data set that no task matches."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    judged: list[Judged]
    failed: list[Failure]
    skipped: list[Unreadable]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Candidate:
    name: str
    task_type: str
    labels: tuple[str, ...]
    classes: int
    training: Mapping[str, object]  # provenance

    @classmethod
    def of(cls, name: str, bundle: TaskBundle) -> "Candidate":
        training = bundle.manifest.training
        return cls(name, bundle.task_type, bundle.labels, bundle.classes, training)


# Logits (n, K) of each task for the readable images, or why it has none; the unreadable images.
Answers = tuple[list[Tensor | str], list[Unreadable]]
# Runs some of the candidates, by index, on the images of a data set.
Answerer = Callable[[DataSet, Sequence[int]], Answers]


def evaluate(
    data: Sequence[str | Path],
    *,
    tasks: Sequence[str | Path],
    backbone: Backbone,
    split: SplitName | None = None,
    task_type: TaskType | None = None,
    batch: int = BATCH,
    watcher: Watcher | None = None,
) -> Evaluation:
    """Evaluate bundles on data sets; the default `split` is the held-out one."""
    loaded = load_tasks(backbone, tasks)
    names = _names([Path(task) for task in tasks], len(loaded.bundles))
    candidates = list(map(Candidate.of, names, loaded.bundles))
    sets = [read_data(source, task_type) for source in data]
    with Workspace(KEPT_BYTES, watcher=watcher) as workspace:

        def answer(data: DataSet, indices: Sequence[int]) -> Answers:
            chosen = [loaded.tasks[index] for index in indices]
            stages = f"reading {data.name}", f"evaluating {data.name}"
            logits, skipped = read_and_predict(backbone, data, chosen, batch, workspace, stages)
            return list(logits), skipped

        return judge(sets, candidates, answer, split)


def evaluate_server(
    data: Sequence[str | Path],
    *,
    tasks: Sequence[str],
    client: Client,
    split: SplitName | None = None,
    task_type: TaskType | None = None,
    watcher: Watcher | None = None,
) -> Evaluation:
    """Evaluate tasks of a server, named by reference, on data sets.

    Labels and provenance come from the bundle, which is downloaded. Each image is sent as it is,
    with all tasks in one request. References are resolved once, so that an alias that moves during
    the evaluation does not mix two versions.
    """
    sets = [read_data(source, task_type) for source in data]
    found, failed = _resolve_all(client, tasks)
    references = list(found)

    def answer(data: DataSet, indices: Sequence[int]) -> Answers:
        requested = [references[index] for index in indices]
        try:
            return _request(client, data, requested, watcher or Watcher())
        except RequestRejected as error:
            if len(indices) == 1:
                return [str(error)], []
        # The server rejects one of the tasks: each alone, so that the others are evaluated.
        alone = [answer(data, [index]) for index in indices]
        skipped = {one.path: one for _, bad in alone for one in bad}
        return [logits for (logits,), _ in alone], list(skipped.values())

    return judge(sets, list(found.values()), answer, split, failed)


def _resolve_all(
    client: Client, tasks: Sequence[str]
) -> tuple[dict[str, Candidate], list[Failure]]:
    """The tasks that the server has, by reference, and those that it has not."""
    found: dict[str, Candidate] = {}
    failed: list[Failure] = []
    for task in tasks:
        try:
            reference, candidate = _resolve(client, task)
        except RequestRejected as error:
            failed.append(Failure(task, str(error)))
            continue
        if reference in found:
            raise DataError(f"'{task}' and '{found[reference].name}' are the same. Remove one.")
        found[reference] = candidate
    return found, failed


def _request(client: Client, data: DataSet, references: Sequence[str], watcher: Watcher) -> Answers:
    """Let a server predict all images with these tasks."""
    paths = [sample.path for sample in data.samples]
    on_progress = watcher.stage(f"predicting {data.name}")
    answers: list[list[TaskAnswer]] = [[] for _ in references]
    skipped: list[Unreadable] = []
    for image in client.predict_iter(paths, references, returns="logits", keep_going=True):
        if image.error is None:
            for rows, reference in zip(answers, references, strict=True):
                rows.append(image[reference])
        else:
            skipped.append(Unreadable(paths[image.index], image.error))
        if on_progress is not None:
            on_progress(image.index + 1, len(paths))
    return [_logits(rows) for rows in answers], skipped


def _logits(answers: Sequence[TaskAnswer]) -> Tensor | str:
    """The logits (n, K) of one task; its first error if it has no answer for some image."""
    failures = [one.error for one in answers if one.error is not None]
    if failures:
        return f"No answer for {len(failures)} images: {failures[0]}"
    return torch.tensor([one.logits for one in answers])


def _resolve(client: Client, task: str) -> tuple[str, Candidate]:
    """Return the reference of one version, and its description."""
    if task == BASE_TASK:
        about = client.task(task)
        labels = about.class_labels or ()
        return task, Candidate(task, about.task_type, labels, about.classes, {})
    pulled = client.pull(task)
    bundle = TaskBundle.from_bytes(pulled.data)
    return f"{pulled.task}@{pulled.version}", Candidate.of(task, bundle)


def judge(
    sets: Sequence[DataSet],
    candidates: Sequence[Candidate],
    answer: Answerer,
    split: SplitName | None,
    failed: Sequence[Failure] = (),
) -> Evaluation:
    """Evaluate each candidate on every data set whose labels it has.

    Raises DataError if there are no figures at all.
    """
    result = Evaluation([], list(failed), [], [])
    used: set[int] = set()
    for whole in sets:
        matches = {
            index: labels
            for index, candidate in enumerate(candidates)
            if (labels := _match_labels(candidate, whole)) is not None
        }
        if not matches:
            result.failed.append(Failure(whole.name, _mismatch(whole, candidates)))
            continue
        used |= matches.keys()
        chosen = _chosen(whole, split, [candidates[index] for index in matches], result.notes)
        answers, skipped = answer(chosen, list(matches))
        result.skipped.extend(skipped)
        rest = chosen.without(one.path for one in skipped)
        if not len(rest):
            raise DataError(f"No image of '{rest.name}' can be read.")
        for (index, labels), logits in zip(matches.items(), answers, strict=True):
            candidate = candidates[index]
            if isinstance(logits, str):
                result.failed.append(Failure(candidate.name, logits))
                continue
            targets = torch.from_numpy(rest.targets(labels))
            one = figures(logits, targets, rest.task_type, labels)
            by_order = labels != candidate.labels
            result.judged.append(Judged(candidate.name, rest.name, one, by_order, logits))
    for index, candidate in enumerate(candidates):
        if index not in used and len(used):
            reasons = (_missing(candidate, data) for data in sets)
            result.failed.append(Failure(candidate.name, " ".join(reasons)))
    if not result.judged:
        raise DataError(" ".join(one.reason for one in result.failed))
    return result


def _names(paths: Sequence[Path], count: int) -> list[str]:
    """Return the file names, or the paths if the names are not distinct."""
    stems = [path.stem for path in paths]
    names = stems if len(set(stems)) == len(stems) else [str(path) for path in paths]
    if len(names) != count:
        raise DataError("The same bundle is listed twice. Remove one.")
    return names


def _match_labels(candidate: Candidate, data: DataSet) -> tuple[str, ...] | None:
    """Return the labels of the candidate's outputs; None if they do not match the data."""
    if candidate.task_type != data.task_type:
        return None
    if data.task_type == "regression":
        return () if candidate.classes == data.outputs else None
    if set(data.labels) <= set(candidate.labels):
        return candidate.labels
    unnamed = candidate.labels == default_labels(candidate.classes)
    return data.labels if unnamed and len(data.labels) == candidate.classes else None


def _mismatch(data: DataSet, candidates: Sequence[Candidate]) -> str:
    if not candidates:
        return f"There is no task to evaluate on '{data.name}'."
    near = max(candidates, key=lambda one: len(set(data.labels) & set(one.labels)))
    return f"No task matches '{data.name}'. {_missing(near, data)}"


def _missing(candidate: Candidate, data: DataSet) -> str:
    """Why a task cannot be evaluated on a data set."""
    missing = sorted(set(data.labels) - set(candidate.labels))
    common = len(data.labels) - len(missing)
    return (
        f"The data '{data.name}' ({data.task_type}) has {len(data.labels)} labels, and "
        f"'{candidate.name}' ({candidate.task_type}) has {common} of them"
        + (f", but not '{missing[0][:60]}'." if missing else ".")
    )


def _chosen(
    data: DataSet, split: SplitName | None, candidates: Sequence[Candidate], notes: list[str]
) -> DataSet:
    """Return the images to evaluate on: held-out ones, if the data or a manifest says which."""
    if all(sample.split is None for sample in data.samples):
        trained = next((one for one in candidates if _trained_on(one, data)), None)
        if trained is None:
            if split is not None:
                raise DataError(f"'{data.name}' has no split '{split}'; it is not split.")
            return data
        shares, seed = trained.training["split"], trained.training["seed"]
        assert isinstance(shares, list)
        assert isinstance(seed, int)
        train, val, test = (float(str(share)) for share in shares)
        data = split_data(data, (train, val, test), seed)
        notes.append(
            f"'{data.name}' is the training data of a task: evaluated on the held-out images"
        )
    for name in HELD_OUT if split is None else (split,):
        if len(part := data.part(name)):
            return part
    if split is not None:
        raise DataError(f"'{data.name}' has no images in the split '{split}'.")
    notes.append(f"'{data.name}' has only training images: evaluated on those")
    return data


def _trained_on(candidate: Candidate, data: DataSet) -> bool:
    about = candidate.training.get("data")
    same = isinstance(about, dict) and about.get("digest") == data.digest
    return same and "split" in candidate.training and "seed" in candidate.training


def read_and_predict(
    backbone: Backbone,
    data: DataSet,
    tasks: Sequence[Task],
    batch: int,
    workspace: Workspace,
    stages: tuple[str, str],
) -> tuple[list[Tensor], list[Unreadable]]:
    """Decode images and predict; `stages` names both for the watcher."""
    paths = [sample.path for sample in data.samples]
    images = ImageSet(paths, backbone.preprocessing, workspace.scratch)
    stage = workspace.watcher.stage
    skipped = images.read_all(workspace.pool, stage(stages[0]))
    logits = predict(backbone, images, tasks, batch, workspace.pool, stage(stages[1]))
    return logits, skipped


def predict(
    backbone: Backbone,
    images: ImageSet,
    tasks: Sequence[Task],
    batch: int,
    pool: Executor,
    on_progress: OnProgress | None = None,
) -> list[Tensor]:
    """Return the logits (n, K) of each task, with the pass of the server."""
    logits: list[list[Tensor]] = [[] for _ in tasks]
    starts = range(0, len(images), batch)
    parts = [range(start, min(start + batch, len(images))) for start in starts]
    stacks = StackCache()
    load = partial(images.inputs, rows=any(task.token is not None for task in tasks))
    upcoming = pool.submit(load, parts[0]) if parts else None
    for position, indices in enumerate(parts):
        assert upcoming is not None
        inputs = upcoming.result()
        if position + 1 < len(parts):
            upcoming = pool.submit(load, parts[position + 1])
        for rows, values in zip(logits, answer(backbone, inputs, tasks, stacks), strict=True):
            rows.append(values)
        if on_progress is not None:
            on_progress(indices.stop, len(images))
    return [
        torch.cat(rows) if rows else torch.zeros(0, task.head_weight.shape[0])
        for rows, task in zip(logits, tasks, strict=True)
    ]


def answer(
    backbone: Backbone, inputs: Inputs, tasks: Sequence[Task], stacks: StackCache
) -> list[Tensor]:
    """Return the logits (B, K) of each task for uint8 images (B, H, W, 3), or kept ones."""
    view, warm = None, None
    if isinstance(inputs, ContextBatch):
        warm = inputs
    else:
        view = backbone.preprocessing.normalise(inputs.to(backbone.device), backbone.dtype)
    with torch.no_grad():
        result = masked_pass(backbone, view, warm, [list(tasks)] * len(inputs), stacks)
    by_task = {one.task: one.values.cpu() for one in result.logits}
    return [by_task[task] for task in tasks]
