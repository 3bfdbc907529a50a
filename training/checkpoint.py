"""Where a run stands, in one file beside the bundle, replaced whole or not at all."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from task_store import files
from training.errors import CannotResume, CannotWrite

KEY = "engram-training"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors, and everything about them that is no tensor."""

    run: dict[str, Any]  # what must be equal for a run to be this one
    progress: dict[str, Any]
    tensors: dict[str, Tensor]


def checkpoint_path(bundle: Path) -> Path:
    return bundle.with_name(f"{bundle.stem}.checkpoint")


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    text = json.dumps({"run": checkpoint.run, "progress": checkpoint.progress})
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}
    write_whole(path, save(tensors, {KEY: text}))


def read_checkpoint(path: Path, run: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint of this very run; None where there is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CannotResume(f"the checkpoint '{path}' cannot be read: {error.strerror}") from error
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        content = json.loads(header["__metadata__"][KEY])
        tensors = load(data)
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CannotResume(
            f"the checkpoint '{path}' is damaged; delete it to start anew"
        ) from error
    for name, value in json.loads(json.dumps(run)).items():
        before = content["run"].get(name)
        if before != value:
            raise CannotResume(
                f"the checkpoint '{path}' is of a run with another {name.replace('_', ' ')} "
                f"({_short(before)} instead of {_short(value)}); give the same options, or leave "
                "out --resume to start anew"
            )
    return Checkpoint(content["run"], content["progress"], tensors)


def write_whole(path: Path, data: bytes) -> None:
    """A file written whole or not at all, or CannotWrite."""
    try:
        files.write_whole(path, data)
    except OSError as error:
        raise CannotWrite(f"'{path}' cannot be written: {error.strerror or error}") from error


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
