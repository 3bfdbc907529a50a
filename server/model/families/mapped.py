"""Weights as the pages of their file: in what precision they lie there, and how to be rid of them.

Transformers maps the weights of a safetensors file instead of reading them, wherever the precision
is left as it is: they take no memory of their own until they are changed.
"""

import ctypes
import json
import mmap
import sys
from collections.abc import Iterator
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

_HALVES: Final = {"F16": torch.float16, "BF16": torch.bfloat16}
_FILE: Final = "model.safetensors"


def stored_dtype(name: str) -> torch.dtype:
    """The half precision that all weights of a folder or hub name are stored in, else float32."""
    kinds: set[str] = set()
    try:
        for path in _files(name):
            with safe_open(path, "pt") as file:
                kinds |= {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, KeyError, SafetensorError):
        return torch.float32  # whoever loads it says what is wrong
    floats = {kind for kind in kinds if kind.startswith(("F", "BF"))}  # older files keep indices
    return _HALVES.get(floats.pop(), torch.float32) if len(floats) == 1 else torch.float32


def _files(name: str) -> Iterator[str]:
    """Where the weights lie: one file, or those of an index."""

    def find(file: str) -> str | None:
        return cached_file(name, file, _raise_exceptions_for_missing_entries=False)

    whole = find(_FILE)
    if whole is not None:
        yield whole
        return
    index = find(f"{_FILE}.index.json")
    if index is None:
        return
    with open(index, encoding="utf-8") as file:
        parts = set(json.load(file)["weight_map"].values())
    yield from (path for part in sorted(parts) if (path := find(part)) is not None)


def give_back_pages(tensor: Tensor) -> None:
    """Tells the system that nobody will read a tensor again; its values are lost.

    Pages of a file would stay in memory for as long as anything of the file is mapped.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return
    start = tensor.data_ptr()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (start + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:  # its own pages, none that it shares
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED
        )
