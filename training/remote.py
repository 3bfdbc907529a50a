"""Tasks of a running server judged on data sets, as `training.evaluate` judges bundles here.

What a task knows is read from its bundle, which the server hands out; what it answers comes from
the server, asked about the files as they are, all tasks of an image in one request. A reference is
resolved once, so that a label that moves meanwhile does not mix two versions.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from engram_client import Client, ImageAnswer

from task_store import TaskBundle
from task_store.names import BASE_TASK
from training.data import DataSet, Problem, SplitName, read_data
from training.errors import DataError
from training.evaluate import Answered, Candidate, Evaluation, judge
from training.images import Unreadable
from training.watching import Watcher

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
    found = [_find(client, task) for task in tasks]
    references = [reference for reference, _ in found]
    if len(set(references)) != len(references):
        raise DataError("the same task is given twice")
    candidates = [candidate for _, candidate in found]
    return judge(sets, candidates, _OnServer(client, references, watcher or Watcher()), split)


def _find(client: Client, task: str) -> tuple[str, Candidate]:
    """What to ask for, and what is known of it."""
    if task == BASE_TASK:
        about = client.task(task)
        labels = about.class_labels or ()
        return task, Candidate(task, about.problem, labels, about.classes, NO_TRAINING)
    pulled = client.pull(task)
    bundle = TaskBundle.from_bytes(pulled.data)
    return f"{pulled.task}@{pulled.version}", Candidate.of(task, bundle)


class _OnServer:
    """Answers by a server."""

    def __init__(self, client: Client, references: Sequence[str], watcher: Watcher) -> None:
        self._client = client
        self._references = references
        self._watcher = watcher

    def __call__(self, data: DataSet, places: Sequence[int]) -> Answered:
        paths = [sample.path for sample in data.samples]
        asked = [self._references[place] for place in places]
        told = self._watcher.stage(f"asking about {data.name}")
        logits: list[list[tuple[float, ...]]] = [[] for _ in asked]
        skipped: list[Unreadable] = []
        answers = self._client.predict_iter(paths, asked, returns="logits", keep_going=True)
        for answer in answers:
            if answer.error is None:
                for rows, reference in zip(logits, asked, strict=True):
                    rows.append(_logits(answer, reference))
            else:
                skipped.append(Unreadable(paths[answer.index], answer.error))
            if told is not None:
                told(answer.index + 1, len(paths))
        return Answered([torch.tensor(rows) for rows in logits], skipped)


def _logits(answer: ImageAnswer, reference: str) -> tuple[float, ...]:
    found = answer[reference].logits
    assert found is not None, "logits were asked for"
    return found
