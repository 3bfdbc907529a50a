"""Checkpoints of the public reproduction, necrashter/transformers-learnable-memory.

Each is a complete model in one `.pt` file, which is parsed and validated here:

vit.embeddings.cls_tokens.<k>                            (1, 1, D)    0: backbone, k ≥ 1: task k
vit.encoder.layer.<l>.attention.attention.
    memory_tokens.<k-1>                                  (1, m_k, D)  memory of task k at layer l
    attention_mask                                       0 and -inf: which task extends which
classifiers.<k>.{weight,bias}                            (K_k, D)     0: backbone, k ≥ 1: task k
everything else: the backbone, by its names in transformers 4

The file has no configuration, names or labels. Memory joins after the first LayerNorm of a layer
(`post_norm`), and class tokens are stored without position.
"""

import hashlib
import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from engram_bundle.untrusted import printable
from engram_server.model import TaskWeights
from torch import Tensor

from engram_training.errors import ForeignCheckpoint, InconsistentCheckpoint, UnreadableCheckpoint

Kind = Literal["single", "concatenated", "extended"]
Ancestors = tuple[frozenset[int], ...]  # of each task, by position from 0

CLASS_TOKEN: Final = "vit.embeddings.cls_tokens.{}"
POSITIONS: Final = "vit.embeddings.position_embeddings"
LAYER: Final = "vit.encoder.layer.{}."
_MEMORY: Final = LAYER + "attention.attention.memory_tokens.{}"
_MASK: Final = LAYER + "attention.attention.attention_mask"
_HEAD: Final = "classifiers.{}.{}"

# In front of every key: DataParallel, torch.compile.
_PREFIXES: Final = ({"module."}, {"_orig_mod."})
_PRECISIONS: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, slots=True)
class CheckpointTask:
    """One task of a checkpoint, in float32. Positions start at 0."""

    position: int
    weights: TaskWeights
    parents: tuple[int, ...]  # positions of the tasks it extends directly


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A parsed checkpoint. `order` lists positions with parents before children."""

    file_name: str
    sha256: str
    kind: Kind
    layers: int
    tasks: tuple[CheckpointTask, ...]
    order: tuple[int, ...]
    backbone: Mapping[str, Tensor]  # all other tensors, with the names of the file


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and validate a checkpoint without running any code in it."""
    content, sha256 = _load(path)
    try:
        return _parse(_state_dict(content), path.name, sha256)
    except (ForeignCheckpoint, InconsistentCheckpoint) as error:
        raise type(error)(f"'{path}': {error}") from error


def _load(path: Path) -> tuple[object, str]:
    if not path.exists():
        raise UnreadableCheckpoint(f"'{path}' does not exist.")
    if not path.is_file():
        raise UnreadableCheckpoint(f"'{path}' is not a file.")
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchScript archives and old formats
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True), sha256
    except PermissionError as error:
        raise UnreadableCheckpoint(f"Cannot read '{path}': {error.strerror}") from error
    except Exception as error:  # a damaged pickle can raise anything
        raise UnreadableCheckpoint(_why_unreadable(path, error)) from error


def _why_unreadable(path: Path, error: BaseException) -> str:
    with path.open("rb") as file:
        head = file.read(2)
    if not head:
        return f"'{path}' is empty."
    zipped, pickled = head == b"PK", head[:1] == b"\x80"  # new and old formats of torch.save
    text = str(error)
    code = re.search(r"\b(?:GLOBAL|class|function) ([\w.]+)", text)
    if code and (zipped or pickled) and isinstance(error, pickle.UnpicklingError):
        return (
            f"'{path}' contains more than tensors: loading it would run Python code "
            f"('{printable(code[1])}'). Save only the tensors, with "
            "torch.save(model.state_dict(), file), and import that file."
        )
    if "TorchScript" in text:
        return f"'{path}' is a TorchScript program. Save its state_dict() and import that file."
    if zipped:
        return f"'{path}' is truncated or damaged. Copy it again."
    return f"'{path}' is not a PyTorch checkpoint (written by torch.save), or is damaged."


def _state_dict(content: object) -> dict[str, Tensor]:
    """Return the named tensors without the wrappers of training scripts."""
    for wrapper in ("state_dict", "model_state_dict"):
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping):
        raise _foreign(f"it contains a {type(content).__name__} instead of named tensors")
    for key in content:
        if not isinstance(key, str):
            raise _foreign(f"a tensor has the name {printable(repr(key))}, which is not a text")
    state: dict[str, Tensor] = dict(content)
    while {"".join(key.partition(".")[:2]) for key in state} in _PREFIXES:
        state = {key.partition(".")[2]: value for key, value in state.items()}
    if CLASS_TOKEN.format(0) not in state:
        some = ", ".join(f"'{printable(key)}'" for key in list(state)[:3]) or "nothing"
        raise _foreign(f"it has no '{CLASS_TOKEN.format(0)}', but {some}")
    for key, value in state.items():
        _check_plain(key, value)
    return state


def _foreign(reason: str) -> ForeignCheckpoint:
    return ForeignCheckpoint(f"this is not a checkpoint of the public reproduction: {reason}")


def _check_plain(key: str, value: object) -> None:
    """Check that a value is a dense floating-point tensor, fully stored in the file."""
    if not isinstance(value, Tensor):
        raise InconsistentCheckpoint(
            f"'{printable(key)}' is a {type(value).__name__}, not a tensor"
        )
    ordinary = value.layout == torch.strided and not value.is_nested
    if not ordinary or value.device.type != "cpu" or value.dtype not in _PRECISIONS:
        raise InconsistentCheckpoint(
            f"'{printable(key)}' is stored as {value.dtype}, {value.layout}, {value.device.type}; "
            "expected a dense floating-point tensor on the CPU"
        )
    # With strides of zero, a small file could claim tensors of any size.
    if value.nbytes > value.untyped_storage().nbytes():
        raise InconsistentCheckpoint(
            f"'{printable(key)}' claims {value.numel()} numbers, but fewer are stored"
        )


class _Parts:
    """The tensors of a checkpoint; each is taken once, and `rest` has the others."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.rest = state

    def count(self, pattern: str) -> int:
        numbered = re.compile(re.escape(pattern).replace(r"\{\}", r"\d+"))
        return sum(numbered.fullmatch(key) is not None for key in self.rest)

    def pop(self, key: str) -> Tensor:
        if key not in self.rest:
            raise InconsistentCheckpoint(f"'{key}' is missing")
        return self.rest.pop(key)

    def take(self, key: str, *shape: int | None) -> Tensor:
        """Remove and return a finite float32 tensor of this shape (None: any size)."""
        tensor = self.pop(key).detach()
        if len(shape) != tensor.ndim or any(
            expected not in (None, size) for expected, size in zip(shape, tensor.shape, strict=True)
        ):
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise InconsistentCheckpoint(
                f"'{key}' is {tuple(tensor.shape)}, but ({sizes}) was expected"
            )
        tensor = tensor.to(torch.float32)
        if not bool(torch.isfinite(tensor).all()):
            raise InconsistentCheckpoint(
                f"'{key}' has values that are not finite (NaN or infinity)"
            )
        return tensor


def _parse(state: dict[str, Tensor], file_name: str, sha256: str) -> Checkpoint:
    parts = _Parts(state)
    positions = state.get(POSITIONS)
    if positions is None or positions.ndim != 3:
        raise InconsistentCheckpoint(f"'{POSITIONS}' is missing or not (1, tokens, width)")
    _, base, width = positions.shape
    count = parts.count(CLASS_TOKEN) - 1
    layers = parts.count(_MASK)
    if count < 1:
        raise InconsistentCheckpoint("it contains only the backbone's class token, and no task")
    if layers < 1:
        raise InconsistentCheckpoint(
            "it has no attention mask, which defines how its tasks are related"
        )
    memories = [_take_memory(parts, position, layers, width) for position in range(count)]
    layout = MaskLayout(base, tuple(memory.shape[1] for memory in memories))
    ancestors = read_ancestors([parts.pop(_MASK.format(layer)) for layer in range(layers)], layout)
    tasks = []
    for position, memory in enumerate(memories):
        number = position + 1
        weight = parts.take(_HEAD.format(number, "weight"), None, width)
        bias_key = _HEAD.format(number, "bias")
        bias = parts.take(bias_key, weight.shape[0]) if bias_key in parts.rest else None
        token = parts.take(CLASS_TOKEN.format(number), 1, 1, width)[0, 0]
        weights = TaskWeights(weight, bias, token, memory, placement="post_norm")
        tasks.append(CheckpointTask(position, weights, direct_parents(ancestors, position)))
    kind: Kind = "single" if count == 1 else "extended" if any(ancestors) else "concatenated"
    order = tuple(sorted(range(count), key=lambda position: len(ancestors[position])))
    return Checkpoint(file_name, sha256, kind, layers, tuple(tasks), order, parts.rest)


def _take_memory(parts: _Parts, position: int, layers: int, width: int) -> Tensor:
    """Return the memory (L, m, D) of a task; m must be the same in all layers."""
    first = parts.take(_MEMORY.format(0, position), 1, None, width)
    tokens = first.shape[1]
    later = (_MEMORY.format(layer, position) for layer in range(1, layers))
    return torch.cat([first, *(parts.take(key, 1, tokens, width) for key in later)])


# --- which task extends which ---------------------------------------------------------------------
#
# Queries are CLS, the patches and the tasks' class tokens C_1 … C_T; keys are the same, then the
# memories M_1 … M_T. The mask is added to the scores: 0 allows attention, -inf prevents it. A mask
# only chooses which C_j a C_k attends to; everything else follows and is checked.


@dataclass(frozen=True, slots=True)
class MaskLayout:
    base: int  # CLS and patches
    memory: tuple[int, ...]  # memory tokens of each task

    @property
    def tasks(self) -> int:
        return len(self.memory)

    @property
    def shape(self) -> tuple[int, int, int]:
        queries = self.base + self.tasks
        return 1, queries, queries + sum(self.memory)

    def token(self, index: int) -> str:
        """Return the name of a query or a key, for messages."""
        if index < self.base:
            return "CLS" if index == 0 else f"patch {index}"
        index -= self.base
        if index < self.tasks:
            return f"C_{index + 1}"
        index -= self.tasks
        for position, count in enumerate(self.memory, start=1):
            if index < count:
                return f"M_{position}"
            index -= count
        raise IndexError(index)


def read_ancestors(masks: Sequence[Tensor], layout: MaskLayout) -> Ancestors:
    """Return the tasks that each task extends, directly or not, from the masks of all layers."""
    allowed = [_allowed(mask, layer, layout) for layer, mask in enumerate(masks)]
    first = allowed[0]
    for layer, other in enumerate(allowed):
        if place := _first_difference(first, other):
            query, key = map(layout.token, place)
            raise InconsistentCheckpoint(
                f"the attention masks of layers 0 and {layer} differ on whether {query} attends to "
                f"{key}, but the public reproduction has one mask for all layers"
            )
    seen = first[layout.base :, layout.base : layout.base + layout.tasks]  # (T, T)
    if place := _first_difference(_expected(seen, layout), first):
        query, key = map(layout.token, place)
        verb = "attends" if first[place] else "does not attend"
        raise InconsistentCheckpoint(
            f"the attention mask is not one of the public reproduction: {query} {verb} to {key}"
        )
    return _ancestors(seen)


def direct_parents(ancestors: Ancestors, position: int) -> tuple[int, ...]:
    """Return the ancestors that no other ancestor extends."""
    mine = ancestors[position]
    return tuple(sorted(mine - {old for parent in mine for old in ancestors[parent]}))


def _allowed(mask: Tensor, layer: int, layout: MaskLayout) -> Tensor:
    """Return where a query may attend to a key, (queries, keys)."""
    if tuple(mask.shape) != layout.shape:
        raise InconsistentCheckpoint(
            f"the attention mask of layer {layer} is {tuple(mask.shape)}, but {layout.base} base "
            f"tokens, {layout.tasks} tasks and {sum(layout.memory)} memory tokens make it "
            f"{layout.shape}"
        )
    mask = mask[0]
    allowed = mask == 0
    if place := _first_difference(allowed, mask != -torch.inf):
        query, key = map(layout.token, place)
        raise InconsistentCheckpoint(
            f"the attention mask of layer {layer} is {float(mask[place]):g} for {query} and {key}; "
            "only 0 and -inf are valid"
        )
    return allowed


def _expected(seen: Tensor, layout: MaskLayout) -> Tensor:
    """Return the mask that follows from which class tokens see which.

    Base rows see only base columns. Class tokens see all base columns, themselves, and a memory
    exactly where they see its class token.
    """
    _, queries, keys = layout.shape
    base, tasks = layout.base, layout.tasks
    expected = torch.zeros(queries, keys, dtype=torch.bool)
    expected[:, :base] = True
    own = seen | torch.eye(tasks, dtype=torch.bool)
    expected[base:, base : base + tasks] = own
    expected[base:, base + tasks :] = own.repeat_interleave(torch.tensor(layout.memory), dim=1)
    return expected


def _ancestors(seen: Tensor) -> Ancestors:
    rows = seen.tolist()
    ancestors = tuple(
        frozenset(j for j, sees in enumerate(row) if sees and j != k) for k, row in enumerate(rows)
    )
    for k, mine in enumerate(ancestors):
        for j in sorted(mine):
            if k in ancestors[j]:
                raise InconsistentCheckpoint(
                    f"the attention mask lets C_{k + 1} and C_{j + 1} attend to each other, but "
                    "tasks cannot extend each other"
                )
            if missing := ancestors[j] - mine:
                raise InconsistentCheckpoint(
                    f"the attention mask lets C_{k + 1} attend to C_{j + 1} but not to "
                    f"C_{min(missing) + 1}, which C_{j + 1} attends to, but a task extends "
                    "everything that its parents extend"
                )
    return ancestors


def _first_difference(one: Tensor, other: Tensor) -> tuple[int, int] | None:
    for query, key in (one != other).nonzero().tolist():
        return query, key
    return None
