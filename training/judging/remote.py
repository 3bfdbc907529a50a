"""Tasks of a running server, judged as `training.judging.evaluation` judges bundles here.

Labels and provenance are read from the bundle, which the server hands out. Answers come from the
server, which gets the files as they are, with all tasks of an image in one request. A reference is
resolved once, so that a label that moves meanwhile does not mix two versions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from engram_client import Client, ImageAnswer

from task_store import TaskBundle
from task_store.names import BASE_TASK
from training.data.dataset import DataSet, Problem, SplitName, read_data
from training.data.images import Unreadable
from training.errors import DataError
from training.judging.evaluation import Answers, Candidate, Evaluation, judge
from training.progress import Watcher

NO_TRAINING: Final[dict[str, object]] = {}


def evaluate_server(
    data: Sequence[str | Path],
    *,
    tasks: Sequence[str],
    client: Client,
    split: SplitName | None = None,
    problem: Problem | None = None,
    watcher: Watcher | None = None,
) -> Evaluation:
    """Judge tasks of a server, given by reference, on data sets."""
    sets = [read_data(source, problem) for source in data]
    resolved = [_resolve(client, task) for task in tasks]
    references = [reference for reference, _ in resolved]
    if len(set(references)) != len(references):
        raise DataError("the same task is given twice")

    def answer(data: DataSet, places: Sequence[int]) -> Answers:
        paths = [sample.path for sample in data.samples]
        requested = [references[place] for place in places]
        on_progress = (watcher or Watcher()).stage(f"asking about {data.name}")
        logits: list[list[tuple[float, ...]]] = [[] for _ in requested]
        skipped: list[Unreadable] = []
        for image in client.predict_iter(paths, requested, returns="logits", keep_going=True):
            if image.error is None:
                for rows, reference in zip(logits, requested, strict=True):
                    rows.append(_logits(image, reference))
            else:
                skipped.append(Unreadable(paths[image.index], image.error))
            if on_progress is not None:
                on_progress(image.index + 1, len(paths))
        return Answers([torch.tensor(rows) for rows in logits], skipped)

    return judge(sets, [candidate for _, candidate in resolved], answer, split)


def _resolve(client: Client, task: str) -> tuple[str, Candidate]:
    """The reference of one version, and what its bundle says."""
    if task == BASE_TASK:
        about = client.task(task)
        labels = about.class_labels or ()
        return task, Candidate(task, about.problem, labels, about.classes, NO_TRAINING)
    pulled = client.pull(task)
    bundle = TaskBundle.from_bytes(pulled.data)
    return f"{pulled.task}@{pulled.version}", Candidate.of(task, bundle)


def _logits(answer: ImageAnswer, reference: str) -> tuple[float, ...]:
    logits = answer[reference].logits
    assert logits is not None, "logits were requested"
    return logits
