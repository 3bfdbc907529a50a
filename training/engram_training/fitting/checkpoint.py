"""Checkpoints of a run: one file next to the bundle, replaced atomically."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from engram_training.bundles import write_whole
from engram_training.errors import CannotResume
from engram_training.fitting.loop import Loop

KEY = "engram-training"
CHECKPOINT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    steps: int
    loop: dict[str, Any]
    tensors: dict[str, Tensor]


def checkpoint_path(bundle: Path) -> Path:
    return bundle.with_name(f"{bundle.stem}.checkpoint")


class CheckpointFile:
    """The checkpoint of one run; a run without a bundle file has none."""

    def __init__(self, bundle: Path | None, run: Mapping[str, Any]) -> None:
        """`run` must be equal in a run that resumes from this checkpoint."""
        self._path = None if bundle is None else checkpoint_path(bundle)
        self._run = run
        self._saved = time.perf_counter()

    def save_if_due(self, loop: Loop) -> None:
        if loop.done or time.perf_counter() - self._saved > CHECKPOINT_SECONDS:
            self.save(loop)

    def save(self, loop: Loop) -> None:
        if self._path is not None:
            numbers, tensors = loop.state()
            progress = {"steps": loop.plan.steps, "loop": numbers}
            text = json.dumps({"run": self._run, "progress": progress})
            whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
            write_whole(self._path, save(whole, {KEY: text}))
        self._saved = time.perf_counter()

    def read(self) -> Checkpoint | None:
        """Return None if there is no file; raise CannotResume for a file of another run."""
        assert self._path is not None
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CannotResume(
                f"Cannot read the checkpoint '{self._path}': {error.strerror}"
            ) from error
        try:
            length = int.from_bytes(data[:8], "little")
            header = json.loads(data[8 : 8 + length])
            content = json.loads(header["__metadata__"][KEY])
            tensors = load(data)
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise CannotResume(
                f"The checkpoint '{self._path}' is damaged. Delete it to start again."
            ) from error
        for name, value in json.loads(json.dumps(self._run)).items():
            before = content["run"].get(name)
            if before != value:
                raise CannotResume(
                    f"The checkpoint '{self._path}' belongs to a run with another "
                    f"{name.replace('_', ' ')} ({_short(before)} instead of {_short(value)}). "
                    "Use the same options, or omit --resume to start again."
                )
        progress = content["progress"]
        return Checkpoint(progress["steps"], progress["loop"], tensors)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
