"""The masked pass: every task requested of every image, in one run through the backbone.

Rows of all tokens, `[base rows of all cold images | task rows of all (image, task) pairs]`, are one
matrix through LayerNorm, QKV, projection and MLP. Only attention tells them apart: base rows attend
to the base rows of their image and to nothing else, so they run the plain fused kernel; a task row
attends to the base rows of its image, to itself and its ancestors, and to own and inherited memory.
No mask over the whole sequence is ever built. A task's adapter adds to what maps make of its rows.

Shapes: B cold images, S base rows of an image, R task rows, D width, H heads of width d, I = H · d,
L layers, T tasks of the stack, M memory tokens, A lineage (a task and its ancestors).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from server.model.adapters import AdaptedMap, LowRank
from server.model.backbone import ACTIVATIONS, Backbone, Geometry, Layer
from server.model.context import ContextBatch
from server.model.kernels import RaggedAttention, ragged_attention
from server.model.linear import PackedWeight, linear
from server.model.readout import Readout, read
from server.model.rows import AdaptedRows, Grouping, RowPlan
from server.model.tasks import StackCache, Task, TaskStack


@dataclass(frozen=True, slots=True)
class TaskLogits:
    """One task's answers in a pass: row i of `values` is about image `images[i]`."""

    task: Task
    images: list[int]
    values: Tensor  # (n, K) float32
    features: Tensor  # (n, D) float32: what the head read
    known: Tensor | None  # (n,) bool: looks like what the task was made of; None: it cannot tell


@dataclass(frozen=True, slots=True)
class PassResult:
    logits: list[TaskLogits]
    contexts: ContextBatch | None  # of the cold images, if they are kept
    last_layer: "LastLayer | None"  # None where no row went through the layers
    readout: Readout | None  # of the cold images, if anybody reads them


def masked_pass(
    backbone: Backbone,
    pixels: Tensor | None,
    warm: ContextBatch | None,
    requested: Sequence[Sequence[Task]],
    stacks: StackCache,
    *,
    keep_contexts: bool = False,
) -> PassResult:
    """Answers `requested[i]`, the distinct tasks of image i: cold images first, then warm ones.

    `pixels` are the cold images as `Backbone.embed_images` takes them. To train tasks, `encode`
    cold images first and pass them as warm: gradients then run through task rows only.
    """
    images = 0 if pixels is None else len(pixels)
    stack = stacks.stack_of(task for tasks in requested for task in tasks)
    task_rows = None
    if stack is not None:
        plan = RowPlan.of(stack, requested, images, backbone.device, backbone.dtype)
        task_rows = TaskRows(stack, plan, warm)
    base_is_read = keep_contexts or any(
        task.reads_base for tasks in requested[:images] for task in tasks
    )
    layers = _Layers(backbone, task_rows, base_is_read, keep_contexts)
    base, tasks = layers.run(pixels)

    readout = contexts = None
    if len(base) and layers.last is not None:
        states = layers.last.base
        readout = read(backbone, base, images, states.queries, states.keys)
        if keep_contexts:
            contexts = ContextBatch(tuple(layers.states), readout.values, readout.looked)
    features = _features(backbone, readout, images, warm)
    logits = []
    for task, of in images_by_task(requested, with_rows=False).items():
        # `base` reads all parts; a head-only task reads the first, `Backbone.feature`.
        logits.append(_head(task, of, features[of, : task.head_weight.shape[1]], features))
    if task_rows is not None:
        final = backbone.final_norm(tasks).float()
        # Ancestors that nobody asked for have rows but no answer.
        for task, of in images_by_task(requested, with_rows=True).items():
            logits.append(_head(task, of, final[task_rows.find(task, of)], features))
    return PassResult(logits, contexts, layers.last, readout)


def encode(backbone: Backbone, pixels: Tensor) -> ContextBatch:
    """The contexts of images (B, 3, H, W): all of a pass that no task changes."""
    with torch.no_grad():
        result = masked_pass(
            backbone, pixels, None, [[]] * len(pixels), StackCache(), keep_contexts=True
        )
    assert result.contexts is not None
    return result.contexts


class States(NamedTuple):
    """Rows as attention takes them."""

    queries: Tensor
    keys: Tensor
    values: Tensor


class LastLayer(NamedTuple):
    """What attention took in the last layer: enough to tell where tasks looked (`explaining`)."""

    base: States  # (B, H, S, d); queries of those rows only that are read
    own: States  # of task rows, (R, H, d)
    task_rows: "TaskRows | None"


class _Layers:
    """The layers of one pass over its rows."""

    def __init__(
        self,
        backbone: Backbone,
        task_rows: "TaskRows | None",
        base_is_read: bool,
        keep_contexts: bool,
    ) -> None:
        self._backbone = backbone
        self._geometry = backbone.geometry
        self._task_rows = task_rows
        self._read_rows = backbone.readout_rows if base_is_read else 0  # of an image, in the end
        self._keep_contexts = keep_contexts
        self._feed_forward = _compiled_feed_forward() if backbone.compiled else _feed_forward
        self.states: list[Tensor] = []  # per layer (2, B, H, S, d), if contexts are kept
        self.last: LastLayer | None = None

    def run(self, pixels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Final rows: base rows that are read (B · n, D) and task rows (R, D)."""
        images, rows = self._embed(pixels)
        finished = self._geometry.tokens
        for index, layer in enumerate(self._backbone.blocks if len(rows) else ()):
            if images and index == self._geometry.layers - 1:
                # After the last layer few base rows are read: the others only give keys and values.
                finished = self._read_rows
            rows = self._layer(index, layer, rows, images, finished)
        read = images * self._read_rows
        return rows[:read], rows[read:]

    def _embed(self, pixels: Tensor | None) -> tuple[int, Tensor]:
        """The cold images that anybody asks for something, and all rows of the first layer."""
        parts = []
        images = 0
        if pixels is not None and (self._read_rows or self._task_rows is not None):
            images = len(pixels)
            parts.append(self._backbone.embed_images(pixels).flatten(0, 1))
        if self._task_rows is not None:
            parts.append(self._task_rows.first())
        if not parts:
            return 0, self._backbone.embedding.patch_weight.new_empty(0, self._geometry.width)
        return images, _joined(parts)

    def _layer(self, index: int, layer: Layer, rows: Tensor, images: int, finished: int) -> Tensor:
        """`rows` after one layer; of every image only the first `finished` base rows go on."""
        geometry = self._geometry
        normed = geometry.norm(rows, layer.norm1_weight, layer.norm1_bias)
        base, own = _states(geometry, layer, normed, images, finished)
        rotary = self._backbone.rotary
        if rotary is not None and images:
            base = base._replace(queries=rotary.turn(base.queries), keys=rotary.turn(base.keys))
        adapters = None if self._task_rows is None else self._task_rows.adapters(index)
        if adapters is not None:
            own = adapters.adapt_queries(own, normed[images * geometry.tokens :])
        self.last = LastLayer(base, own, self._task_rows)
        if self._keep_contexts and images:
            self.states.append(torch.stack([base.keys, base.values]))
        attended = []
        if images and finished:
            of_base = F.scaled_dot_product_attention(*base)  # (B, H, finished, d)
            attended.append(of_base.transpose(1, 2).reshape(images * finished, -1))
        if self._task_rows is not None:
            attended.append(self._task_rows.attend(index, own, base))
        rows = _drop_unfinished(rows, images, geometry.tokens, finished)
        taken = _joined(attended)
        mixed = linear(taken, layer.out_weight, layer.out_bias)
        if adapters is None:
            return self._feed_forward(rows + mixed, layer, geometry)
        adapters.add("output", taken, mixed)
        return _feed_forward(rows + mixed, layer, geometry, adapters)


def _states(
    geometry: Geometry, layer: Layer, normed: Tensor, images: int, finished: int
) -> tuple[States, States]:
    """States of base rows by image, (B, H, S, d), and of task rows, (R, H, d)."""
    heads, width, inner = geometry.heads, geometry.head_width, geometry.attention_width
    weight = layer.qkv_weight
    if finished == geometry.tokens or isinstance(weight, PackedWeight):  # which has no parts
        states = linear(normed, weight, layer.qkv_bias)
        queries, keys, values = states.view(len(normed), 3, heads, width).unbind(1)
        queries = _drop_unfinished(queries, images, geometry.tokens, finished)
    else:
        states = linear(normed, weight[inner:], layer.qkv_bias[inner:])
        keys, values = states.view(len(normed), 2, heads, width).unbind(1)
        going_on = _drop_unfinished(normed, images, geometry.tokens, finished)
        queries = linear(going_on, weight[:inner], layer.qkv_bias[:inner])
        queries = queries.view(len(going_on), heads, width)

    def by_image(rows: Tensor, each: int) -> Tensor:
        return rows[: images * each].view(images, each, heads, width).transpose(1, 2)

    base = States(
        by_image(queries, finished),
        by_image(keys, geometry.tokens),
        by_image(values, geometry.tokens),
    )
    first_own = images * geometry.tokens
    return base, States(queries[images * finished :], keys[first_own:], values[first_own:])


def _drop_unfinished(rows: Tensor, images: int, tokens: int, finished: int) -> Tensor:
    """The first `finished` base rows of every image, and all task rows."""
    if finished == tokens:
        return rows
    base, tasks = rows[: images * tokens], rows[images * tokens :]
    kept = base.view(images, tokens, *rows.shape[1:])[:, :finished].flatten(0, 1)
    return torch.cat([kept, tasks])


def _feed_forward(
    rows: Tensor, layer: Layer, geometry: Geometry, adapters: "LayerAdapters | None" = None
) -> Tensor:
    """The second half of a layer."""
    normed = geometry.norm(rows, layer.norm2_weight, layer.norm2_bias)
    raised = linear(normed, layer.up_weight, layer.up_bias)
    if adapters is not None:
        adapters.add("up", normed, raised)
    hidden = ACTIVATIONS[geometry.activation](raised)
    lowered = linear(hidden, layer.down_weight, layer.down_bias)
    if adapters is not None:
        adapters.add("down", hidden, lowered)
    return rows + lowered


@cache
def _compiled_feed_forward() -> Callable[[Tensor, Layer, Geometry], Tensor]:
    return torch.compile(_feed_forward, dynamic=True)


class TaskRows:
    """The rows of (image, task) pairs, and what each of them attends to."""

    def __init__(self, stack: TaskStack, plan: RowPlan, warm: ContextBatch | None) -> None:
        self._stack = stack
        self._plan = plan
        self._warm = warm
        self._memory_bias: Tensor | None = None
        if stack.memory_bias is not None:
            self._memory_bias = stack.memory_bias.index_select(0, plan.task_of_row)  # (R, 1, M)

    def first(self) -> Tensor:
        """The rows that enter the first layer, (R, D)."""
        return self._stack.tokens.index_select(0, self._plan.task_of_row)

    def find(self, task: Task, images: Sequence[int]) -> Tensor:
        """The numbers of a task's rows for some images."""
        return self._plan.rows_of(self._stack.place(task), images)

    def adapters(self, index: int) -> "LayerAdapters | None":
        """What adapters do to the rows in layer `index`; None where no task has one."""
        stack, adapted = self._stack.adapters, self._plan.adapted
        if stack is None or adapted is None:
            return None
        maps = {name: LowRank(a[index], b[index]) for name, (a, b) in stack.maps.items()}
        return LayerAdapters(maps, adapted, len(self._plan.task_of_row))

    def attend(self, index: int, own: States, base: States) -> Tensor:
        """What the rows take from layer `index`, (R, I)."""
        plan, stack = self._plan, self._stack
        kernel = ragged_attention(own.queries)
        if kernel is not None:
            return self._attend_by(kernel, index, own, base)
        weights = self.weights(index, own, base).to(own.queries.dtype)
        values = own.values[:, None] if plan.lineage is None else own.values[plan.lineage]
        tokens, members = base.keys.shape[2], values.shape[1]
        on_image, on_lineage, on_memory = weights.split_with_sizes(
            [tokens, members, weights.shape[-1] - tokens - members], dim=-1
        )
        groups = self._image_groups(index, base)
        taken = _joined([_weighted(on_image[each.rows], each.by, each.values) for each in groups])
        taken = taken + (on_lineage.transpose(1, 2)[..., None] * values).sum(dim=1)
        if stack.memory_values is not None:
            taken = taken + _weighted(on_memory, plan.by_task, stack.memory_values[index])
        return taken.flatten(1)

    def _attend_by(self, kernel: RaggedAttention, index: int, own: States, base: States) -> Tensor:
        """The same, without weights in between."""
        plan, stack = self._plan, self._stack
        memory = lineage = None
        if stack.memory_keys is not None and stack.memory_values is not None:
            memory = stack.memory_keys[index], stack.memory_values[index], stack.memory_bias
        if plan.lineage is not None and plan.lineage_bias is not None:
            lineage = plan.lineage, plan.lineage_bias
        taken = torch.empty_like(own.queries, memory_format=torch.contiguous_format)
        for each in self._image_groups(index, base):
            kernel(
                *(taken, own, (each.keys, each.values), memory, lineage),
                starts=each.starts,
                widest=each.by.width,
                tasks=plan.task_of_row,
            )
        return taken.flatten(1)

    def weights(self, index: int, own: States, base: States) -> Tensor:
        """Softmax weights on base rows, lineage and memory side by side, (R, H, S + A + M)."""
        plan, stack = self._plan, self._stack
        queries = own.queries * own.queries.shape[-1] ** -0.5
        keys = own.keys[:, None] if plan.lineage is None else own.keys[plan.lineage]  # (R, A, H, d)
        groups = self._image_groups(index, base)
        scores = [_joined([_scores(queries[each.rows], each.by, each.keys) for each in groups])]
        on_lineage = (queries[:, None] * keys).sum(dim=-1).transpose(1, 2)  # (R, H, A)
        scores.append(on_lineage if plan.lineage_bias is None else on_lineage + plan.lineage_bias)
        if stack.memory_keys is not None:
            on_memory = _scores(queries, plan.by_task, stack.memory_keys[index])
            scores.append(on_memory if self._memory_bias is None else on_memory + self._memory_bias)
        # One softmax over everything a row may see; in float32 whatever the precision of the rows.
        return torch.softmax(torch.cat(scores, dim=-1), dim=-1, dtype=torch.float32)

    def _image_groups(self, index: int, base: States) -> "list[_ImageGroup]":
        """Rows of cold images with the keys and values just made, of warm ones with theirs."""
        plan = self._plan
        groups = []
        if plan.cold.width:
            rows, starts = slice(0, plan.cold_rows), plan.starts[: plan.cold.groups + 1]
            groups.append(_ImageGroup(rows, starts, plan.cold, base.keys, base.values))
        if plan.warm.width and self._warm is not None:
            rows, starts = slice(plan.cold_rows, None), plan.starts[plan.cold.groups :]
            groups.append(_ImageGroup(rows, starts, plan.warm, *self._warm.states[index]))
        return groups


class LayerAdapters(NamedTuple):
    """The adapters of one layer, and the task rows they act on: the last `task_rows` of all."""

    maps: dict[AdaptedMap, LowRank]  # a (T, r, in), b (T, r, out)
    adapted: AdaptedRows
    task_rows: int

    def add(self, name: AdaptedMap, before: Tensor, after: Tensor) -> None:
        """To what a map made of rows `before`; in place, as base rows are most of `after`."""
        if name in self.maps:
            a, b = self.maps[name]
            padded = self.adapted.pad(before[len(before) - self.task_rows :])  # (T, width, in)
            self.adapted.add(padded @ a.mT @ b, after[len(after) - self.task_rows :])

    def adapt_queries(self, own: States, normed: Tensor) -> States:
        if "query" not in self.maps:
            return own
        queries = own.queries.flatten(1).clone()  # they share their memory with keys and values
        self.add("query", normed, queries)
        return own._replace(queries=queries.view_as(own.queries))


class _ImageGroup(NamedTuple):
    """Some task rows and the base rows of their images."""

    rows: slice
    starts: Tensor  # (images + 1,): the first row of each image, and the row after the last
    by: Grouping
    keys: Tensor  # (images, H, S, d)
    values: Tensor  # (images, H, S, d)


def _scores(queries: Tensor, group: Grouping, keys: Tensor) -> Tensor:
    """(R, H, d) rows in groups against each group's keys (groups, H, S, d): (R, H, S)."""
    padded = group.pad(queries).transpose(1, 2)  # (groups, H, width, d)
    return group.unpad((padded @ keys.transpose(2, 3)).transpose(1, 2))


def _weighted(weights: Tensor, group: Grouping, values: Tensor) -> Tensor:
    """(R, H, S) weights in groups over each group's values (groups, H, S, d): (R, H, d)."""
    padded = group.pad(weights).transpose(1, 2)  # (groups, H, width, S)
    return group.unpad((padded @ values).transpose(1, 2))


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenated, without a copy where there is nothing to concatenate."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _features(
    backbone: Backbone, readout: Readout | None, cold: int, warm: ContextBatch | None
) -> Tensor:
    """What was read of each image, (images, parts · D); zeros where nobody reads cold ones."""
    parts = []
    if readout is not None:
        parts.append(readout.values)
    elif cold or warm is None:  # The place keeps the numbers of the images right.
        width = len(backbone.readout) * backbone.width
        parts.append(torch.zeros(cold, width, device=backbone.device))
    if warm is not None:
        parts.append(warm.readout)
    return _joined(parts)


def _head(task: Task, images: list[int], features: Tensor, base: Tensor) -> TaskLogits:
    """`features` are what the head reads, `base` what of the backbone's own rows was read."""
    values = task.logits(features)
    region, known = task.known, None
    if region is not None:
        known = region.distances(base[images, : region.width]) <= region.threshold
    return TaskLogits(task, images, values, features, known)


def images_by_task(
    requested: Sequence[Sequence[Task]], *, with_rows: bool
) -> dict[Task, list[int]]:
    """The images of each task, of those with rows of their own or of those without."""
    images_of: dict[Task, list[int]] = {}
    for image, tasks in enumerate(requested):
        for task in tasks:
            if (task.token is not None) == with_rows:
                images_of.setdefault(task, []).append(image)
    return images_of
