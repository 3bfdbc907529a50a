"""Tasks as a pass takes them: the weights of one, prepared once, and the stack of several.

`TaskWeights` is what a person trains or a bundle holds. `prepare` binds it to a backbone: memory
depends on no image, so its keys and values are computed here, once, and never again. `TaskStack`
lays the tasks of a pass side by side, padded where they differ.
"""

import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from server.errors import ExtensionError, TaskMismatch
from server.model.adapters import Adapter, AdapterStack, LowRank, check_adapter
from server.model.backbone import Backbone
from server.model.known import Known, KnownRegion
from server.model.linear import linear_from

Placement = Literal["pre_norm", "post_norm"]
PLACEMENTS: Final[tuple[str, ...]] = get_args(Placement)


@dataclass(frozen=True, slots=True)
class TaskWeights:
    """One task's parameters: L layers, m memory tokens, width D, K outputs.

    With `class_token` alone the task is head + class token; with neither it is a head that reads
    the backbone's own class token.
    """

    head_weight: Tensor  # (K, D)
    head_bias: Tensor | None = None  # (K,)
    class_token: Tensor | None = None  # (D,), without position
    memory: Tensor | None = None  # (L, m, D)
    placement: Placement = "pre_norm"
    adapter: Adapter = field(default_factory=dict)  # of the task's own row; empty without one
    known: Known | None = None
    normalised: bool = False  # whether the head reads features divided by their length
    head_projection: Tensor | None = None  # (E, D): where that length is measured


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Task:
    """A task bound to a backbone and a device. Two are equal only if they are the same object."""

    head_weight: Tensor  # (K, D), float32; `base` may read more than the class token: (K, n · D)
    head_bias: Tensor | None  # (K,)
    token: Tensor | None = None  # (D,): the row that enters the first layer; None reads CLS
    memory_keys: Tensor | None = None  # (L, H, m, d)
    memory_values: Tensor | None = None  # (L, H, m, d)
    ancestors: tuple["Task", ...] = ()  # every task it extends, directly or not
    adapter: Adapter = field(default_factory=dict)
    serial: int = field(default_factory=itertools.count().__next__)  # never used twice
    known: KnownRegion | None = None
    normalised: bool = False
    head_projection: Tensor | None = None  # (E, D), float32

    @property
    def tensors(self) -> list[Tensor]:
        own = (
            self.head_weight,
            self.head_bias,
            self.head_projection,
            self.token,
            self.memory_keys,
            self.memory_values,
        )
        known = [] if self.known is None else self.known.tensors
        adapter = (tensor for change in self.adapter.values() for tensor in change)
        return [*(tensor for tensor in own if tensor is not None), *adapter, *known]

    @property
    def reads_base(self) -> bool:
        """Whether it takes the backbone's own class token: for its head, or for what it knows."""
        return self.token is None or self.known is not None

    def logits(self, features: Tensor) -> Tensor:
        """What the head answers to rows (n, D), (n, K)."""
        if self.normalised:
            features = unit_length(features, self.head_projection)
        return F.linear(features, self.head_weight, self.head_bias)

    @property
    def requires_grad(self) -> bool:
        """Whether this task, or one it extends, is being trained."""
        own = any(tensor.requires_grad for tensor in self.tensors)
        return own or any(task.requires_grad for task in self.ancestors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def lineage(self) -> tuple["Task", ...]:
        """Itself and those ancestors that have a row and memory to attend to."""
        return (self, *(task for task in self.ancestors if task.token is not None))


def unit_length(features: Tensor, projection: Tensor | None) -> Tensor:
    """Rows (n, D), each divided by its length, or by that of its projection."""
    measured = features if projection is None else F.linear(features, projection)
    lengths: Tensor = torch.linalg.vector_norm(measured, dim=-1, keepdim=True)
    return features / lengths


def prepare(backbone: Backbone, weights: TaskWeights, parents: Sequence[Task] = ()) -> Task:
    """Binds a task's weights to a backbone. Differentiable, so that a trainer uses it too."""
    _check_shapes(backbone, weights)
    if parents and weights.class_token is None:
        raise ExtensionError(
            "a task without a class token has no row that could attend to a parent's; "
            "give it a class token or drop what it extends"
        )
    device = backbone.device

    def in_float32(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, torch.float32)

    keys = values = token = None
    if weights.class_token is not None:
        token = backbone.embed_class_token(weights.class_token.to(device, backbone.dtype))
    if weights.memory is not None and weights.memory.shape[1]:
        memory = weights.memory.to(device, backbone.dtype)
        keys, values = _memory_states(backbone, memory, weights.placement)
    adapter: Adapter = {
        name: LowRank(*(tensor.to(device, backbone.dtype) for tensor in change))
        for name, change in weights.adapter.items()
    }
    ancestors = dict.fromkeys(parents)
    for parent in parents:
        ancestors.update(dict.fromkeys(parent.ancestors))
    return Task(
        head_weight=weights.head_weight.to(device, torch.float32),
        head_bias=in_float32(weights.head_bias),
        normalised=weights.normalised,
        head_projection=in_float32(weights.head_projection),
        token=token,
        memory_keys=keys,
        memory_values=values,
        known=None if weights.known is None else KnownRegion.of(weights.known, device),
        ancestors=tuple(ancestors),
        adapter=adapter,
    )


def base_task(backbone: Backbone) -> Task | None:
    """The backbone's own head as a task, where it has one."""
    if backbone.base is None:
        return None
    return Task(head_weight=backbone.base.weight, head_bias=backbone.base.bias)


def _memory_states(
    backbone: Backbone, memory: Tensor, placement: Placement
) -> tuple[Tensor, Tensor]:
    """Keys and values of memory (L, m, D) at every layer, each (L, H, m, d)."""
    geometry = backbone.geometry
    keys, values = [], []
    for block, rows in zip(backbone.blocks, memory, strict=True):
        if placement == "pre_norm":
            rows = geometry.norm(rows, block.norm1_weight, block.norm1_bias)
        inner = geometry.attention_width
        states = linear_from(inner, rows, block.qkv_weight, block.qkv_bias)
        states = states.reshape(-1, 2, geometry.heads, geometry.head_width)  # (m, 2, H, d)
        keys.append(states[:, 0].transpose(0, 1))
        values.append(states[:, 1].transpose(0, 1))
    return torch.stack(keys), torch.stack(values)


def _check_shapes(backbone: Backbone, weights: TaskWeights) -> None:
    layers, width = backbone.layers, backbone.width
    head = weights.head_weight

    def check(what: str, tensor: Tensor, fits: bool, needed: str) -> None:
        if not fits:
            raise TaskMismatch(
                f"the {what} is {tuple(tensor.shape)}, but backbone '{backbone.name}' needs "
                f"{needed}"
            )

    check("head", head, head.ndim == 2 and head.shape[1] == width, f"(K, {width})")
    if weights.head_bias is not None and weights.head_bias.shape != head.shape[:1]:
        raise TaskMismatch(
            f"the head's bias is {tuple(weights.head_bias.shape)}, but its {head.shape[0]} outputs "
            f"need ({head.shape[0]},)"
        )
    projection = weights.head_projection
    if projection is not None:
        fits = projection.ndim == 2 and projection.shape[1] == width
        check("head's projection", projection, fits, f"(E, {width})")
    token, memory = weights.class_token, weights.memory
    if token is not None:
        check("class token", token, token.shape == (width,), f"({width},)")
    elif weights.adapter:
        raise TaskMismatch("an adapter needs a class token, whose row it is for; there is none")
    check_adapter(backbone, weights.adapter)
    if memory is None:
        return
    if token is None:
        raise TaskMismatch("memory needs a class token to read it, and this task has none")
    fits = memory.ndim == 3 and (memory.shape[0], memory.shape[2]) == (layers, width)
    check("memory", memory, fits, f"({layers}, m, {width})")
    if weights.placement not in PLACEMENTS:
        raise TaskMismatch(
            f"'{weights.placement}' is no placement of memory; use one of {', '.join(PLACEMENTS)}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class TaskStack:
    """Tasks with rows, closed under ancestry, side by side: what every layer of a pass takes.

    T tasks, at most M memory tokens of own and inherited memory each. `lineage[t]` lists what task
    t's class token attends to besides the image: itself first, then its ancestors, padded by -1.
    A stack does not keep its tasks alive; it knows them by serial number.
    """

    index: dict[int, int]  # serial → place in the stack
    tokens: Tensor  # (T, D)
    memory_keys: Tensor | None  # (L, T, H, M, d)
    memory_values: Tensor | None  # (L, T, H, M, d)
    memory_bias: Tensor | None  # (T, 1, M): -inf where a task has less than M memory
    lineage: npt.NDArray[np.int64]  # (T, A)
    adapters: AdapterStack | None

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> "TaskStack":
        """`tasks` must be distinct, have rows, and contain their own ancestors that have rows."""
        index = {task.serial: place for place, task in enumerate(tasks)}
        lines = [[index[member.serial] for member in task.lineage] for task in tasks]
        lineage = np.full((len(tasks), max(map(len, lines))), -1, dtype=np.int64)
        for row, line in zip(lineage, lines, strict=True):
            row[: len(line)] = line
        keys, values, bias = _stack_memory(tasks)
        tokens = torch.stack([task.token for task in tasks if task.token is not None])
        adapters = AdapterStack.of([task.adapter for task in tasks])
        return cls(index, tokens, keys, values, bias, lineage, adapters)

    def __len__(self) -> int:
        return len(self.index)

    def place(self, task: Task) -> int:
        return self.index[task.serial]

    @property
    def nbytes(self) -> int:
        tensors = (self.tokens, self.memory_keys, self.memory_values, self.memory_bias)
        adapters = 0 if self.adapters is None else self.adapters.nbytes
        return adapters + sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _stack_memory(tasks: Sequence[Task]) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    keys = [[k for each in task.lineage if (k := each.memory_keys) is not None] for task in tasks]
    values = [
        [v for each in task.lineage if (v := each.memory_values) is not None] for task in tasks
    ]
    sizes = [sum(part.shape[2] for part in parts) for parts in keys]
    longest = max(sizes)
    if longest == 0:
        return None, None, None
    like = next(part for parts in keys for part in parts)
    bias = None
    if min(sizes) < longest:
        bias = torch.zeros(len(tasks), 1, longest, dtype=like.dtype)
        for row, size in zip(bias, sizes, strict=True):
            row[:, size:] = -torch.inf
        bias = bias.to(like.device)
    return _padded(keys, longest, like), _padded(values, longest, like), bias


def _padded(parts_of_tasks: list[list[Tensor]], longest: int, like: Tensor) -> Tensor:
    """One (L, T, H, M, d) tensor of per-task lists of (L, H, m, d)."""
    layers, heads, _, width = like.shape
    stacked = []
    for parts in parts_of_tasks:
        gap = longest - sum(part.shape[2] for part in parts)
        if gap:
            parts = [*parts, like.new_zeros(layers, heads, gap, width)]
        stacked.append(torch.cat(parts, dim=2))
    return torch.stack(stacked, dim=1)


class StackCache:
    """Reuses the stack of a task set that comes again, within a budget of bytes.

    Stacks go when one of their tasks does: a retired task leaves nothing behind. Not thread-safe:
    the thread that runs the passes owns it.
    """

    def __init__(self, capacity_bytes: int = 256 * 2**20) -> None:
        self._capacity = capacity_bytes
        self._stacks: OrderedDict[tuple[int, ...], TaskStack] = OrderedDict()
        self._bytes = 0
        self._watched: dict[int, weakref.ref[Task]] = {}
        # Filled by the garbage collector, in any thread; emptied by ours.
        self._gone: deque[int] = deque()

    def stack_of(self, requested: Iterable[Task]) -> TaskStack | None:
        """The stack of those tasks that have rows and of their ancestors; None if none has."""
        members = {
            member for task in requested if task.token is not None for member in task.lineage
        }
        if not members:
            return None
        self._drop_stacks_of_gone_tasks()
        tasks = sorted(members, key=lambda task: task.serial)
        key = tuple(task.serial for task in tasks)
        stack = self._stacks.get(key)
        if stack is not None:
            self._stacks.move_to_end(key)
            return stack
        stack = TaskStack.of(tasks)
        if not any(task.requires_grad for task in tasks):
            self._keep(key, tasks, stack)
        return stack

    def _keep(self, key: tuple[int, ...], tasks: Sequence[Task], stack: TaskStack) -> None:
        for task in tasks:
            if task.serial not in self._watched:
                gone = partial(self._note_gone, task.serial)
                self._watched[task.serial] = weakref.ref(task, gone)
        self._stacks[key] = stack
        self._bytes += stack.nbytes
        while self._bytes > self._capacity:
            _, dropped = self._stacks.popitem(last=False)
            self._bytes -= dropped.nbytes

    def _note_gone(self, serial: int, _: object) -> None:
        self._gone.append(serial)

    def _drop_stacks_of_gone_tasks(self) -> None:
        while self._gone:
            serial = self._gone.popleft()
            self._watched.pop(serial, None)
            for key in [key for key in self._stacks if serial in key]:
                self._bytes -= self._stacks.pop(key).nbytes
