"""Files of a model folder or a hub repository: the only module with private transformers arguments.

`cached_file` raises for a missing file unless it gets
`_raise_exceptions_for_missing_entries=False`, for which there is no public name. Tested with
transformers 5.22.

transformers maps the weights of a safetensors file if the precision is unchanged, so they take no
memory until they are modified.
"""

import ctypes
import json
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

_HALVES: Final = {"F16": torch.float16, "BF16": torch.bfloat16}
_FILE: Final = "model.safetensors"
_MAIN: Final = "main"


def split_revision(name_or_folder: str) -> tuple[str, str]:
    """A folder or repository, and its revision: `org/name@revision`; `main` by default."""
    if Path(name_or_folder).is_dir():
        return name_or_folder, _MAIN
    repository, _, revision = name_or_folder.partition("@")
    return repository, revision or _MAIN


def find_file(name_or_folder: str, file: str) -> str | None:
    """Return the local path of a file, downloading it if necessary; None if it does not exist.

    Raises OSError if the repository cannot be reached.
    """
    repository, revision = split_revision(name_or_folder)
    path: str | None = cached_file(
        repository, file, revision=revision, _raise_exceptions_for_missing_entries=False
    )
    return path


def stored_dtype(name: str) -> torch.dtype:
    """Return the half precision in which all weights of a model are stored, else float32."""
    kinds: set[str] = set()
    try:
        for path in _files(name):
            with safe_open(path, "pt") as file:
                kinds |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError):
        return torch.float32  # loading the model reports the error
    floats = {
        kind for kind in kinds if kind.startswith(("F", "BF"))
    }  # older files have int tensors
    return _HALVES.get(floats.pop(), torch.float32) if len(floats) == 1 else torch.float32


def _files(name: str) -> Iterator[str]:
    """Yield the weight files: one file, or the shards of an index."""
    whole = find_file(name, _FILE)
    if whole is not None:
        yield whole
        return
    index = find_file(name, f"{_FILE}.index.json")
    if index is None:
        return
    with open(index, encoding="utf-8") as file:
        shards = set(json.load(file)["weight_map"].values())
    yield from (path for shard in sorted(shards) if (path := find_file(name, shard)) is not None)


def release_pages(tensor: Tensor) -> None:
    """Release the memory of a mapped tensor; its values are lost.

    Otherwise pages of a file stay in memory as long as any part of the file is mapped.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    start = tensor.data_ptr()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:  # only pages that no other tensor shares
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED
        )
