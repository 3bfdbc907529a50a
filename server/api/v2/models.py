"""Tasks as models of the protocol: which there are, what they take and give, and their state."""

from dataclasses import dataclass

from server.api.answers import Json
from server.api.v2.inputs import IMAGE, PIXEL_VALUES
from server.api.v2.outputs import SCORES
from server.engine.engine import Engine
from server.engine.tasks.snapshot import Match, Snapshot, TaskState, unavailable

MULTITASK = "multitask"
PLATFORM = "engram"

_ANSWERING = ("ready", "on_demand")


@dataclass(frozen=True, slots=True)
class Output:
    """What a task gives for an image: so many numbers, of this kind."""

    name: str
    classes: int
    parameters: Json


@dataclass(frozen=True, slots=True)
class Model:
    """A task, or all of them together, as the protocol sees it."""

    name: str
    versions: list[int]
    image_size: tuple[int, int]
    outputs: list[Output]

    def metadata(self) -> Json:
        """As every client of the protocol reads it."""
        outputs: list[Json] = [
            {
                "name": each.name,
                "datatype": "FP32",
                "shape": [-1, each.classes],
                "parameters": each.parameters,
            }
            for each in self.outputs
        ]
        return {
            "name": self.name,
            "versions": [str(version) for version in self.versions],
            "platform": PLATFORM,
            "inputs": [
                {"name": IMAGE, "datatype": "BYTES", "shape": [-1, 1]},
                {"name": PIXEL_VALUES, "datatype": "FP32", "shape": [-1, 3, *self.image_size]},
            ],
            "outputs": outputs,
        }

    def config(self, max_images: int) -> Json:
        """As Triton's tools read it: shapes without the batch."""
        pixels = [3, *self.image_size]
        outputs: list[Json] = [
            {"name": each.name, "data_type": "TYPE_FP32", "dims": [each.classes]}
            for each in self.outputs
        ]
        return {
            "name": self.name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "max_batch_size": max_images,
            # Optional, because one of them is enough.
            "input": [
                {"name": IMAGE, "data_type": "TYPE_STRING", "dims": [1], "optional": True},
                {
                    "name": PIXEL_VALUES,
                    "data_type": "TYPE_FP32",
                    "format": "FORMAT_NCHW",
                    "dims": pixels,
                    "optional": True,
                },
            ],
            "output": outputs,
        }


def reference(name: str, version: int | None) -> str | None:
    """The task reference that a model is; None for `multitask`, which is all of them."""
    if version is not None:
        return f"{name}@{version}"
    return None if name == MULTITASK else name


def describe(engine: Engine, name: str, version: int | None) -> Model:
    """A model, or UnknownTask, or TaskUnavailable if it was unloaded."""
    snapshot = engine.snapshot
    size = engine.backbone.image_size
    ref = reference(name, version)
    if ref is None:
        ready = snapshot.find(None)
        outputs = [_output(engine, snapshot, found, found.ref) for found in ready]
        return Model(name, [], size, outputs)
    (found,) = snapshot.find([ref])
    output = _output(engine, snapshot, found, SCORES)
    labels = found.slot.labels
    if labels is not None:
        output.parameters["labels"] = list(labels)
    task = snapshot.catalog.tasks.get(found.name)
    versions = [] if task is None else [each.version for each in task.live]
    return Model(name, versions, size, [output])


def check_ready(engine: Engine, name: str, version: int | None) -> None:
    """UnknownTask, or TaskUnavailable with the reason, unless the model answers."""
    ref = reference(name, version)
    if ref is None:
        return
    (found,) = engine.snapshot.find([ref])
    if not found.slot.ready and found.slot.failure is not None:
        raise unavailable({ref: found.slot.failure.reason})


def index(engine: Engine, *, only_ready: bool) -> list[Json]:
    """Every version of every model, and its state."""
    states = engine.snapshot.states()
    listed: list[Json] = [{"name": MULTITASK, "state": "READY", "reason": ""}]
    listed += [_entry(state) for state in states if not only_ready or state.status in _ANSWERING]
    return listed


def _entry(state: TaskState) -> Json:
    entry: Json = {"name": state.name}
    if state.version is not None:
        entry["version"] = str(state.version)
    entry["state"] = "READY" if state.status in _ANSWERING else "UNAVAILABLE"
    entry["reason"] = state.reason or ""
    return entry


def _output(engine: Engine, snapshot: Snapshot, found: Match, name: str) -> Output:
    task, version = found.name, found.version
    if version is None:
        head = engine.backbone.base
        assert head is not None  # nothing else is without a version
        return Output(name, int(head.weight.shape[0]), {"problem": head.problem})
    info = snapshot.catalog.version(task, version)
    return Output(
        name, info.facts.classes, {"problem": info.facts.problem, "version": str(version)}
    )
