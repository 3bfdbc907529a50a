"""Tasks for a pass: the weights of one task, its prepared form, and a stack of several.

`TaskWeights` are the parameters of a bundle or a training run. `prepare` binds them to a backbone:
memory does not depend on the image, so its keys and values are computed once. `TaskStack` stacks
the tasks of a pass, padded where they differ.
"""

import itertools
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from engram_bundle import DriftSpec, TaskBundle
from engram_bundle.schema import PLACEMENTS, Placement, lora_names, missing_class_token
from torch import Tensor

from engram_server.errors import ExtensionError, TaskMismatch
from engram_server.model.backbone import Backbone
from engram_server.model.heads.drift import DriftReference
from engram_server.model.heads.examples import FeatureLayout
from engram_server.model.heads.ood import OodDetector, OodScorer
from engram_server.model.kernels.linear import linear_from
from engram_server.model.lora import BatchedLora, Lora, LoraWeight, check_lora


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of a head on the summary of an image: b of its layers, P parts each."""

    layers: tuple[int, ...]  # (b,), of `Backbone.summary_layers`, ascending
    weight: Tensor  # (K, b, P, D)


Columns = tuple[tuple[int, int], ...]  # of a readout: the start and end of each part


@dataclass(frozen=True, slots=True)
class LayerHead:
    """The weights of a head on the readout of an image, bound to a backbone and a device.

    With many tasks, reading the weights takes most of the time. They are kept in half precision
    where that is exact, as it is for closed-form heads, and all columns are one product.
    """

    columns: Columns
    weight: Tensor  # (K, c)

    @classmethod
    def of(
        cls, backbone: Backbone, layers: LayerWeights | None, feature: Tensor | None
    ) -> "LayerHead | None":
        """Read layers, and the backbone's feature with the weight `feature` (K, D)."""
        columns, parts = [], []
        if feature is not None:
            columns.append((0, backbone.width))
            parts.append(feature)
        if layers is not None:
            _, height, width = backbone.summary_shape
            for layer in layers.layers:
                index = backbone.summary_layers.index(layer) * height
                start = (len(backbone.readout) + index) * width
                columns.append((start, start + height * width))
            parts.append(layers.weight.flatten(1))
        if not columns:
            return None
        weight = torch.cat([part.to(backbone.device) for part in parts], dim=1)
        return cls(tuple(columns), _halved(weight))

    def logits(self, read: Tensor, buffer: "FloatBuffer") -> Tensor:
        """Return its part of the logits, (n, K), of what its columns are in n readouts."""
        return F.linear(read, buffer.float(self.weight))


class FloatBuffer:
    """Memory that holds one weight at a time in float32.

    Allocating that memory for each of 256 tasks takes twice as long as their products.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def float(self, weight: Tensor) -> Tensor:
        """Convert a weight. The result is valid until the next call."""
        if weight.dtype == torch.float32 or torch.is_grad_enabled():
            return weight.float()
        if self._memory is None or self._memory.numel() < weight.numel():
            self._memory = torch.empty(weight.numel(), device=weight.device)
        return self._memory[: weight.numel()].view(weight.shape).copy_(weight)


def _halved(weight: Tensor) -> Tensor:
    """Convert to half precision if that is exact and the weight is not being trained."""
    if weight.requires_grad:
        return weight
    half = weight.half()
    return half if torch.equal(half.float(), weight.float()) else weight.float()


@dataclass(frozen=True, slots=True)
class TaskWeights:
    """The parameters of one task: L layers, m memory tokens, width D, K outputs.

    Without memory the task is a head and a class token; without both it is a head that reads the
    backbone's class token.
    """

    head_weight: Tensor  # (K, D)
    head_bias: Tensor | None = None  # (K,)
    class_token: Tensor | None = None  # (D,), without position
    memory: Tensor | None = None  # (L, m, D)
    placement: Placement = "pre_norm"
    lora: Lora = field(default_factory=dict)  # of the task row
    ood: OodDetector | None = None
    drift: DriftReference | None = None
    normalised: bool = False  # whether the head reads features divided by their length
    head_projection: Tensor | None = None  # (E, D): measures that length
    layers: LayerWeights | None = None  # added to the logits of the head
    feature_weight: Tensor | None = None  # (K, D), on the backbone's feature, beside a task row

    @classmethod
    def from_bundle(cls, bundle: TaskBundle) -> "TaskWeights":
        def tensor(name: str) -> Tensor | None:
            # A copy, because torch has no read-only tensors.
            array = bundle.get(name)
            return None if array is None else torch.tensor(array)

        ood, layers, tensors = None, None, bundle.tensors
        if bundle.manifest.layers is not None:
            layers = LayerWeights(bundle.manifest.layers, torch.tensor(tensors["layers.weight"]))
        if bundle.manifest.ood is not None:
            spec = bundle.manifest.ood
            limits = (spec.threshold, spec.angle, spec.softness)
            ood = OodDetector(tensors["ood.means"], tensors["ood.axes"], *limits)
        return cls(
            head_weight=torch.tensor(tensors["head.weight"]),
            head_bias=tensor("head.bias"),
            class_token=tensor("class_token"),
            memory=tensor("memory"),
            placement=bundle.manifest.placement,
            lora={
                target: LoraWeight(torch.tensor(a), torch.tensor(b))
                for target, (a, b) in bundle.lora.items()
            },
            ood=ood,
            drift=drift_reference(bundle),
            normalised=bundle.manifest.normalised is not None,
            head_projection=tensor("head.projection"),
            layers=layers,
            feature_weight=tensor("feature.weight"),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the trainable tensors that are present, by their names in a bundle."""
        tensors = {
            "head.weight": self.head_weight,
            "head.bias": self.head_bias,
            "head.projection": self.head_projection,
            "layers.weight": None if self.layers is None else self.layers.weight,
            "feature.weight": self.feature_weight,
            "class_token": self.class_token,
            "memory": self.memory,
        }
        for target, weight in self.lora.items():
            tensors |= dict(zip(lora_names(target), weight, strict=True))
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return all tensors as a bundle stores them, by name."""
        arrays = {name: tensor.detach().numpy() for name, tensor in self.tensors().items()}
        if self.ood is not None:
            arrays |= {"ood.means": self.ood.means, "ood.axes": self.ood.axes}
        return arrays if self.drift is None else arrays | self.drift.arrays()


def drift_reference(bundle: TaskBundle) -> DriftReference | None:
    spec = bundle.manifest.drift
    if spec is None:
        return None
    axes, centre = bundle.tensors["drift.axes"], bundle.tensors["drift.centre"]
    scores = None
    if spec.score_mean is not None and spec.score_deviation is not None:
        scores = spec.score_mean, spec.score_deviation
    return DriftReference(axes, centre, spec.images, bundle.get("drift.shares"), scores)


def drift_spec(reference: DriftReference | None) -> DriftSpec | None:
    """The entry of a manifest for reference statistics."""
    if reference is None:
        return None
    mean, deviation = reference.scores or (None, None)
    return DriftSpec(images=reference.images, score_mean=mean, score_deviation=deviation)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Task:
    """A task bound to a backbone and a device. Tasks are compared by identity."""

    head_weight: Tensor  # (K, D), float32; (K, n · D) for a `base` that reads several parts
    head_bias: Tensor | None  # (K,)
    token: Tensor | None = None  # (D,): its row in the first layer; None: head-only
    memory_keys: Tensor | None = None  # (L, H, m, d)
    memory_values: Tensor | None = None  # (L, H, m, d)
    ancestors: tuple["Task", ...] = ()  # all tasks it extends, directly or not
    lora: Lora = field(default_factory=dict)
    serial: int = field(default_factory=itertools.count().__next__)  # unique
    ood: OodScorer | None = None
    normalised: bool = False
    head_projection: Tensor | None = None  # (E, D), float32
    layer_head: LayerHead | None = None

    @property
    def tensors(self) -> list[Tensor]:
        head = (self.head_weight, self.head_bias, self.head_projection)
        own = (*head, self.token, self.memory_keys, self.memory_values)
        ood = [] if self.ood is None else self.ood.tensors
        lora = (tensor for change in self.lora.values() for tensor in change)
        layers = () if self.layer_head is None else (self.layer_head.weight,)
        return [*(tensor for tensor in own if tensor is not None), *lora, *layers, *ood]

    @property
    def reads_base(self) -> bool:
        """Whether its head or its out-of-distribution detector reads base rows."""
        return self.token is None or self.ood is not None or self.reads_layers

    @property
    def reads_layers(self) -> bool:
        """Whether its head reads the summary of an image, or its feature beside a row."""
        return self.layer_head is not None

    def logits(self, features: Tensor) -> Tensor:
        """Return logits (n, K) of features (n, D)."""
        if self.normalised:
            features = unit_length(features, self.head_projection)
        return F.linear(features, self.head_weight, self.head_bias)

    @property
    def requires_grad(self) -> bool:
        """Whether this task or an ancestor is being trained."""
        own = any(tensor.requires_grad for tensor in self.tensors)
        return own or any(task.requires_grad for task in self.ancestors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def lineage(self) -> tuple["Task", ...]:
        """The task itself, and its ancestors that have a row."""
        return (self, *(task for task in self.ancestors if task.token is not None))


def unit_length(features: Tensor, projection: Tensor | None) -> Tensor:
    """Divide each feature of (n, D) by its length, or by that of its projection."""
    measured = features if projection is None else F.linear(features, projection)
    lengths: Tensor = torch.linalg.vector_norm(measured, dim=-1, keepdim=True)
    return features / lengths


def prepare(backbone: Backbone, weights: TaskWeights, parents: Sequence[Task] = ()) -> Task:
    """Bind a task's weights to a backbone. Differentiable, so training uses it too."""
    if reason := missing_class_token(weights.tensors(), extends=bool(parents)):
        raise (ExtensionError if parents else TaskMismatch)(reason)
    _check_shapes(backbone, weights)
    device = backbone.device

    def in_float32(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, torch.float32)

    keys = values = token = None
    if weights.class_token is not None:
        token = backbone.embed_class_token(weights.class_token.to(device, backbone.dtype))
    if weights.memory is not None and weights.memory.shape[1]:
        memory = weights.memory.to(device, backbone.dtype)
        keys, values = _memory_states(backbone, memory, weights.placement)
    lora: Lora = {
        name: LoraWeight(*(tensor.to(device, backbone.dtype) for tensor in change))
        for name, change in weights.lora.items()
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
        ood=None if weights.ood is None else OodScorer.of(weights.ood, device),
        ancestors=tuple(ancestors),
        lora=lora,
        layer_head=LayerHead.of(backbone, weights.layers, weights.feature_weight),
    )


def base_task(backbone: Backbone) -> Task | None:
    if backbone.base is None:
        return None
    return Task(head_weight=backbone.base.weight, head_bias=backbone.base.bias)


def feature_layout(backbone: Backbone) -> FeatureLayout:
    """Return the layout of `Backbone.features_of`."""
    return FeatureLayout(backbone.width, backbone.summary_parts)


def readout_task(backbone: Backbone) -> Task:
    """Return a task that reads everything: its features are the readout with the summary."""
    layers, parts, width = backbone.summary_shape
    columns = (len(backbone.readout) + layers * parts) * width
    device = backbone.device
    nothing = LayerHead(((0, 0),), torch.zeros(1, 0, device=device))
    return Task(torch.zeros(1, columns, device=device), None, layer_head=nothing)


def _memory_states(
    backbone: Backbone, memory: Tensor, placement: Placement
) -> tuple[Tensor, Tensor]:
    """Return keys and values of memory (L, m, D), each (L, H, m, d)."""
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
            f"the head's bias is {tuple(weights.head_bias.shape)}, but {head.shape[0]} outputs "
            f"need ({head.shape[0]},)"
        )
    projection = weights.head_projection
    if projection is not None:
        fits = projection.ndim == 2 and projection.shape[1] == width
        check("head's projection", projection, fits, f"(E, {width})")
    if weights.layers is not None:
        _check_layers(backbone, weights.layers, outputs=head.shape[0])
    feature = weights.feature_weight
    if feature is not None:
        check("weight on the feature", feature, feature.shape == head.shape, f"(K, {width})")
    token, memory = weights.class_token, weights.memory
    if token is not None:
        check("class token", token, token.shape == (width,), f"({width},)")
    check_lora(backbone, weights.lora)
    if memory is None:
        return
    fits = memory.ndim == 3 and (memory.shape[0], memory.shape[2]) == (layers, width)
    check("memory", memory, fits, f"({layers}, m, {width})")
    if weights.placement not in PLACEMENTS:
        raise TaskMismatch(
            f"Unknown memory placement '{weights.placement}'. Valid placements: "
            f"{', '.join(PLACEMENTS)}."
        )


def _check_layers(backbone: Backbone, weights: LayerWeights, outputs: int) -> None:
    _, parts, width = backbone.summary_shape
    readable = backbone.summary_layers
    for layer in weights.layers:
        if layer not in readable:
            raise TaskMismatch(
                f"the head reads layer {layer}, but backbone '{backbone.name}' summarises layers "
                f"{', '.join(map(str, readable))}"
            )
    needed = (outputs, len(weights.layers), parts, width)
    if weights.weight.shape != needed:
        raise TaskMismatch(
            f"the head's weight on layers is {tuple(weights.weight.shape)}, but backbone "
            f"'{backbone.name}' needs {needed}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class TaskStack:
    """Tasks with rows and all their ancestors, stacked for a pass.

    T tasks with at most M memory tokens each, inherited ones included. `lineage[t]` lists the class
    tokens that task t attends to: its own first, then those of its ancestors, padded by -1. A stack
    refers to tasks by serial number and does not keep them alive.
    """

    index: dict[int, int]  # serial → position in the stack
    tokens: Tensor  # (T, D)
    memory_keys: Tensor | None  # (L, T, H, M, d)
    memory_values: Tensor | None  # (L, T, H, M, d)
    memory_bias: Tensor | None  # (T, 1, M): -inf beyond the memory of a task
    lineage: npt.NDArray[np.int64]  # (T, A)
    loras: BatchedLora | None

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> "TaskStack":
        """Stack distinct tasks with rows; their ancestors with rows must be among them."""
        index = {task.serial: place for place, task in enumerate(tasks)}
        lines = [[index[member.serial] for member in task.lineage] for task in tasks]
        lineage = np.full((len(tasks), max(map(len, lines))), -1, dtype=np.int64)
        for row, line in zip(lineage, lines, strict=True):
            row[: len(line)] = line
        keys, values, bias = _stack_memory(tasks)
        tokens = torch.stack([task.token for task in tasks if task.token is not None])
        loras = BatchedLora.of([task.lora for task in tasks])
        return cls(index, tokens, keys, values, bias, lineage, loras)

    def __len__(self) -> int:
        return len(self.index)

    def position(self, task: Task) -> int:
        return self.index[task.serial]

    @property
    def nbytes(self) -> int:
        tensors = (self.tokens, self.memory_keys, self.memory_values, self.memory_bias)
        loras = 0 if self.loras is None else self.loras.nbytes
        return loras + sum(tensor.nbytes for tensor in tensors if tensor is not None)


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
    """Concatenate per-task lists of (L, H, m, d) to one padded (L, T, H, M, d)."""
    layers, heads, _, width = like.shape
    stacked = []
    for parts in parts_of_tasks:
        gap = longest - sum(part.shape[2] for part in parts)
        if gap:
            parts = [*parts, like.new_zeros(layers, heads, gap, width)]
        stacked.append(torch.cat(parts, dim=2))
    return torch.stack(stacked, dim=1)


class StackCache:
    """Caches the stacks of recent task sets, within a budget of bytes.

    A stack is dropped when one of its tasks is. Not thread-safe: the thread that runs the passes
    owns it.
    """

    def __init__(self, capacity_bytes: int = 256 * 2**20) -> None:
        self._capacity = capacity_bytes
        self._stacks: OrderedDict[tuple[int, ...], TaskStack] = OrderedDict()
        self._bytes = 0
        self._watched: dict[int, weakref.ref[Task]] = {}
        # The garbage collector appends in any thread; the owning thread removes.
        self._gone: deque[int] = deque()

    def stack_of(self, requested: Iterable[Task]) -> TaskStack | None:
        """Return the stack of the tasks with rows and their ancestors; None if there are none."""
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
