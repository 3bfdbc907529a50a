"""The masked pass: every requested task of every image, in one run through the backbone.

Read from top to bottom: `plain_layer` is a transformer layer, the rest is what a pass adds to it.

- `LayerLora`: LoRA on the linear layers, for task rows only.
- `TaskRows`: one row per (image, task) pair, and what it attends to.
- `_Layers`: the layers of a pass, with rotary embeddings, kept contexts and a pruned last layer.
- `masked_pass`: embeds the images, runs the layers and applies the heads.

The rows `[base rows of all cold images | task rows of all (image, task) pairs]` are one matrix in
LayerNorm, QKV, projection and MLP. Only attention differs: base rows attend to the base rows of
their image (plain SDPA); a task row attends to the base rows of its image, to itself and its
ancestors, and to own and inherited memory. No mask over the whole sequence is built.

Shapes: B cold images, S base rows per image, R task rows, D width, H heads of width d, I = H · d,
F hidden width of the MLP, L layers, T tasks of the stack, M memory tokens, A lineage (a task and
its ancestors).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from engram_bundle.schema import LoraTarget
from torch import Tensor

from engram_server.model.backbone import ACTIVATIONS, Backbone, Geometry, Layer
from engram_server.model.context import ContextBatch
from engram_server.model.kernels.dispatch import RaggedAttention, ragged_attention
from engram_server.model.kernels.linear import PackedWeight, Weight, linear
from engram_server.model.lora import LoraWeight
from engram_server.model.readout import Readout, read, summarise
from engram_server.model.rows import Grouping, LoraRows, RowPlan
from engram_server.model.tasks import Columns, FloatBuffer, StackCache, Task, TaskStack

# Apply one linear layer to rows: plainly, or with LoRA (`LayerLora.project`).
Project = Callable[[LoraTarget, Tensor, Weight, Tensor], Tensor]


# --- the plain transformer layer ------------------------------------------------------------------


def plain_layer(x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
    """Run one pre-norm transformer layer over the base rows of B images, (B · S, D)."""
    x = x + attention(norm1(x, layer, geometry), layer, geometry)
    x = x + mlp(norm2(x, layer, geometry), layer, geometry)
    return x  # noqa: RET504 - two lines that look alike


def attention(x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
    qkv = linear(x, layer.qkv_weight, layer.qkv_bias)  # (B · S, 3I)
    qkv = qkv.view(-1, geometry.tokens, 3, geometry.heads, geometry.head_width)
    queries, keys, values = qkv.permute(2, 0, 3, 1, 4)  # (B, H, S, d) each
    out = F.scaled_dot_product_attention(queries, keys, values)  # (B, H, S, d)
    out = out.transpose(1, 2).reshape(len(x), -1)  # (B · S, I)
    return linear(out, layer.out_weight, layer.out_bias)  # (B · S, D)


def project_plainly(target: LoraTarget, x: Tensor, weight: Weight, bias: Tensor) -> Tensor:
    return linear(x, weight, bias)


def mlp(x: Tensor, layer: Layer, geometry: Geometry, project: Project = project_plainly) -> Tensor:
    hidden = project("up", x, layer.up_weight, layer.up_bias)  # (R, F)
    hidden = ACTIVATIONS[geometry.activation](hidden)
    return project("down", hidden, layer.down_weight, layer.down_bias)  # (R, D)


def norm1(x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
    return geometry.norm(x, layer.norm1_weight, layer.norm1_bias)


def norm2(x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
    return geometry.norm(x, layer.norm2_weight, layer.norm2_bias)


def _add_mlp(x: Tensor, layer: Layer, geometry: Geometry) -> Tensor:
    """Run the second half of a layer, which is what `torch.compile` fuses."""
    return x + mlp(norm2(x, layer, geometry), layer, geometry)


@cache
def _compiled_add_mlp() -> Callable[[Tensor, Layer, Geometry], Tensor]:
    return torch.compile(_add_mlp, dynamic=True)


# --- LoRA on the linear layers of task rows -------------------------------------------------------


class States(NamedTuple):
    queries: Tensor
    keys: Tensor
    values: Tensor


class LayerLora(NamedTuple):
    weights: dict[LoraTarget, LoraWeight]  # a (T, r, in), b (T, r, out)
    lora_rows: LoraRows
    task_rows: int  # task rows are the last ones

    def project(self, target: LoraTarget, x: Tensor, weight: Weight, bias: Tensor) -> Tensor:
        """Apply a linear layer to all rows, plus LoRA to the task rows."""
        out = linear(x, weight, bias)
        self._add(target, x, out)
        return out

    def add_to_queries(self, task: States, normed: Tensor) -> States:
        if "query" not in self.weights:
            return task
        queries = task.queries.flatten(1).clone()  # they share memory with keys and values
        self._add("query", normed, queries)
        return task._replace(queries=queries.view_as(task.queries))

    def _add(self, target: LoraTarget, x: Tensor, out: Tensor) -> None:
        """Add x A B to `out`, in place because most rows of `out` are base rows."""
        if target in self.weights:
            a, b = self.weights[target]
            padded = self.lora_rows.pad(x[len(x) - self.task_rows :])  # (T, width, in)
            self.lora_rows.add(padded @ a.mT @ b, out[len(out) - self.task_rows :])


# --- task rows and their attention ----------------------------------------------------------------


class _ImageGroup(NamedTuple):
    rows: slice
    starts: Tensor  # (images + 1,): the first row of each image, and the row after the last
    by: Grouping
    keys: Tensor  # (images, H, S, d)
    values: Tensor  # (images, H, S, d)


class TaskRows:
    def __init__(self, stack: TaskStack, plan: RowPlan, warm: ContextBatch | None) -> None:
        self._stack = stack
        self._plan = plan
        self._warm = warm
        self._memory_bias: Tensor | None = None
        if stack.memory_bias is not None:
            self._memory_bias = stack.memory_bias.index_select(0, plan.task_of_row)  # (R, 1, M)

    def first(self) -> Tensor:
        """Return the rows that enter the first layer, (R, D)."""
        return self._stack.tokens.index_select(0, self._plan.task_of_row)

    def find(self, task: Task, images: Sequence[int]) -> Tensor:
        """Return the row numbers of a task for some images."""
        return self._plan.rows_of(self._stack.position(task), images)

    def lora(self, index: int) -> LayerLora | None:
        """Return the LoRA of layer `index`, or None if no task has any."""
        stacked, lora_rows = self._stack.loras, self._plan.lora_rows
        if stacked is None or lora_rows is None:
            return None
        weights = {name: LoraWeight(a[index], b[index]) for name, (a, b) in stacked.weights.items()}
        return LayerLora(weights, lora_rows, len(self._plan.task_of_row))

    def attend(self, index: int, task: States, base: States) -> Tensor:
        """Run the attention of the task rows in layer `index`, (R, I)."""
        plan, stack = self._plan, self._stack
        kernel = ragged_attention(task.queries)
        if kernel is not None:
            return self._attend_by(kernel, index, task, base)
        weights = self.weights(index, task, base).to(task.queries.dtype)  # (R, H, S + A + M)
        values = task.values[:, None] if plan.lineage is None else task.values[plan.lineage]
        tokens, members = base.keys.shape[2], values.shape[1]
        on_image, on_lineage, on_memory = weights.split_with_sizes(
            [tokens, members, weights.shape[-1] - tokens - members], dim=-1
        )
        groups = self._image_groups(index, base)
        out = _joined([_weighted(on_image[each.rows], each.by, each.values) for each in groups])
        out = out + (on_lineage.transpose(1, 2)[..., None] * values).sum(dim=1)
        if stack.memory_values is not None:
            out = out + _weighted(on_memory, plan.by_task, stack.memory_values[index])
        return out.flatten(1)  # (R, I)

    def _attend_by(self, kernel: RaggedAttention, index: int, task: States, base: States) -> Tensor:
        """Do the same with one fused kernel, which stores no weights."""
        plan, stack = self._plan, self._stack
        memory = lineage = None
        if stack.memory_keys is not None and stack.memory_values is not None:
            memory = stack.memory_keys[index], stack.memory_values[index], stack.memory_bias
        if plan.lineage is not None and plan.lineage_bias is not None:
            lineage = plan.lineage, plan.lineage_bias
        out = torch.empty_like(task.queries, memory_format=torch.contiguous_format)
        for each in self._image_groups(index, base):
            kernel(
                *(out, task, (each.keys, each.values), memory, lineage),
                starts=each.starts,
                widest=each.by.width,
                tasks=plan.task_of_row,
            )
        return out.flatten(1)

    def weights(self, index: int, task: States, base: States) -> Tensor:
        """Return softmax weights on base rows, lineage and memory, (R, H, S + A + M)."""
        plan, stack = self._plan, self._stack
        queries = task.queries * task.queries.shape[-1] ** -0.5
        # (R, A, H, d)
        keys = task.keys[:, None] if plan.lineage is None else task.keys[plan.lineage]
        groups = self._image_groups(index, base)
        scores = [_joined([_scores(queries[each.rows], each.by, each.keys) for each in groups])]
        on_lineage = (queries[:, None] * keys).sum(dim=-1).transpose(1, 2)  # (R, H, A)
        scores.append(on_lineage if plan.lineage_bias is None else on_lineage + plan.lineage_bias)
        if stack.memory_keys is not None:
            on_memory = _scores(queries, plan.by_task, stack.memory_keys[index])
            scores.append(on_memory if self._memory_bias is None else on_memory + self._memory_bias)
        # One softmax over everything a row may see, in float32 whatever the precision of the rows.
        return torch.softmax(torch.cat(scores, dim=-1), dim=-1, dtype=torch.float32)

    def _image_groups(self, index: int, base: States) -> list[_ImageGroup]:
        """Pair rows of cold images with new keys and values, of warm images with cached ones."""
        plan = self._plan
        groups = []
        if plan.cold.width:
            rows, starts = slice(0, plan.cold_rows), plan.starts[: plan.cold.groups + 1]
            groups.append(_ImageGroup(rows, starts, plan.cold, base.keys, base.values))
        if plan.warm.width and self._warm is not None:
            rows, starts = slice(plan.cold_rows, None), plan.starts[plan.cold.groups :]
            groups.append(_ImageGroup(rows, starts, plan.warm, *self._warm.states[index]))
        return groups


def _scores(queries: Tensor, group: Grouping, keys: Tensor) -> Tensor:
    """Multiply grouped rows (R, H, d) by the keys of their group (groups, H, S, d): (R, H, S)."""
    padded = group.pad(queries).transpose(1, 2)  # (groups, H, width, d)
    return group.unpad((padded @ keys.transpose(2, 3)).transpose(1, 2))


def _weighted(weights: Tensor, group: Grouping, values: Tensor) -> Tensor:
    """Apply grouped weights (R, H, S) to the values of their group (groups, H, S, d): (R, H, d)."""
    padded = group.pad(weights).transpose(1, 2)  # (groups, H, width, S)
    return group.unpad((padded @ values).transpose(1, 2))


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Concatenate, without a copy if there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


# --- all layers of a pass -------------------------------------------------------------------------


class LastLayer(NamedTuple):
    """The inputs of the last layer's attention, from which `explaining` computes attention maps."""

    base: States  # (B, H, S, d); the queries of kept rows only
    task: States  # (R, H, d)
    task_rows: TaskRows | None


class _Layers:
    def __init__(
        self,
        backbone: Backbone,
        task_rows: TaskRows | None,
        *,
        base_is_read: bool,
        layers_are_read: bool,
        keep_contexts: bool,
    ) -> None:
        self._backbone = backbone
        self._geometry = backbone.geometry
        self._task_rows = task_rows
        self._read_rows = backbone.readout_rows if base_is_read else 0  # per image, at the end
        self._summary_layers = backbone.summary_layers if layers_are_read else ()
        self._keep_contexts = keep_contexts
        self._add_mlp = _compiled_add_mlp() if backbone.compiled else _add_mlp
        extras = task_rows is not None or keep_contexts or backbone.rotary is not None
        self._is_plain = not extras and not backbone.compiled
        self.states: list[Tensor] = []  # per layer (2, B, H, S, d), if contexts are kept
        self.summary: list[Tensor] = []  # per summarised layer (B, parts · D), if layers are read
        self.last: LastLayer | None = None

    def run(self, pixels: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the final rows: base rows that are read (B · n, D) and task rows (R, D)."""
        images, x = self._embed(pixels)
        for index, layer in enumerate(self._backbone.blocks if len(x) else ()):
            is_last = index == self._geometry.layers - 1
            if self._is_plain and not is_last:
                if index in self._summary_layers:
                    self._summarise(norm1(x, layer, self._geometry), images)
                x = plain_layer(x, layer, self._geometry)
                continue
            # After the last layer few base rows are read: the others only give keys and values.
            kept = self._read_rows if images and is_last else self._geometry.tokens
            x = self._layer(index, layer, x, images, kept)
        read = images * self._read_rows
        return x[:read], x[read:]

    def _embed(self, pixels: Tensor | None) -> tuple[int, Tensor]:
        """Return the number of cold images to run, and all rows of the first layer."""
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

    def _summarise(self, normed: Tensor, images: int) -> None:
        """Add the summary of a layer, whose normalised input this is."""
        base = normed[: images * self._geometry.tokens]
        by_image = base.view(images, -1, self._geometry.width)
        self.summary.append(summarise(self._backbone, by_image))

    def _layer(self, index: int, layer: Layer, x: Tensor, images: int, kept: int) -> Tensor:
        """`plain_layer` for base and task rows; returns the first `kept` base rows of an image."""
        geometry = self._geometry
        lora = None if self._task_rows is None else self._task_rows.lora(index)
        normed = norm1(x, layer, geometry)
        if images and index in self._summary_layers:
            self._summarise(normed, images)
        attended = self._attention(index, layer, normed, images, kept, lora)
        x = _pruned(x, images, geometry.tokens, kept) + attended
        if lora is None:
            return self._add_mlp(x, layer, geometry)
        return x + mlp(norm2(x, layer, geometry), layer, geometry, lora.project)

    def _attention(
        self, index: int, layer: Layer, x: Tensor, images: int, kept: int, lora: LayerLora | None
    ) -> Tensor:
        base, task = _states(self._geometry, layer, x, images, kept)
        rotary = self._backbone.rotary
        if rotary is not None and images:
            base = base._replace(queries=rotary.rotate(base.queries), keys=rotary.rotate(base.keys))
        if lora is not None:
            task = lora.add_to_queries(task, x[images * self._geometry.tokens :])
        self.last = LastLayer(base, task, self._task_rows)
        if self._keep_contexts and images:
            self.states.append(torch.stack([base.keys, base.values]))
        parts = []
        if images and kept:
            out = F.scaled_dot_product_attention(*base)  # (B, H, kept, d)
            parts.append(out.transpose(1, 2).reshape(images * kept, -1))  # (B · kept, I)
        if self._task_rows is not None:
            parts.append(self._task_rows.attend(index, task, base))  # (R, I)
        project = project_plainly if lora is None else lora.project
        return project("output", _joined(parts), layer.out_weight, layer.out_bias)


def _states(
    geometry: Geometry, layer: Layer, x: Tensor, images: int, kept: int
) -> tuple[States, States]:
    """Return the states of base rows by image, (B, H, S, d), and of task rows, (R, H, d)."""
    heads, width, inner = geometry.heads, geometry.head_width, geometry.attention_width
    weight = layer.qkv_weight
    if kept == geometry.tokens or isinstance(weight, PackedWeight):  # which cannot be sliced
        states = linear(x, weight, layer.qkv_bias)
        queries, keys, values = states.view(len(x), 3, heads, width).unbind(1)
        queries = _pruned(queries, images, geometry.tokens, kept)
    else:
        states = linear(x, weight[inner:], layer.qkv_bias[inner:])
        keys, values = states.view(len(x), 2, heads, width).unbind(1)
        pruned = _pruned(x, images, geometry.tokens, kept)
        queries = linear(pruned, weight[:inner], layer.qkv_bias[:inner])
        queries = queries.view(len(pruned), heads, width)

    def by_image(rows: Tensor, each: int) -> Tensor:
        return rows[: images * each].view(images, each, heads, width).transpose(1, 2)

    base = States(
        by_image(queries, kept), by_image(keys, geometry.tokens), by_image(values, geometry.tokens)
    )
    first = images * geometry.tokens
    return base, States(queries[images * kept :], keys[first:], values[first:])


def _pruned(rows: Tensor, images: int, tokens: int, kept: int) -> Tensor:
    """Return the first `kept` base rows of every image, and all task rows."""
    if kept == tokens:
        return rows
    base, tasks = rows[: images * tokens], rows[images * tokens :]
    first = base.view(images, tokens, *rows.shape[1:])[:, :kept].flatten(0, 1)
    return torch.cat([first, tasks])


# --- the pass -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskLogits:
    """The results of one task: row i of `values` belongs to image `images[i]`."""

    task: Task
    images: list[int]
    values: Tensor  # (n, K) float32
    features: Tensor  # (n, D) float32: the input of the head
    ood_scores: Tensor | None  # (n,); None: the task has no OOD detector


@dataclass(frozen=True, slots=True)
class PassResult:
    logits: list[TaskLogits]
    contexts: ContextBatch | None  # of the cold images, if they are kept
    last_layer: LastLayer | None  # None if no row went through the layers
    readout: Readout | None  # of the cold images, if a task reads them


def masked_pass(
    backbone: Backbone,
    pixels: Tensor | None,
    warm: ContextBatch | None,
    requested: Sequence[Sequence[Task]],
    stacks: StackCache,
    *,
    keep_contexts: bool = False,
) -> PassResult:
    """Run `requested[i]`, the distinct tasks of image i: cold images first, then warm ones.

    `pixels` are the cold images as `Backbone.embed_images` takes them. To train tasks, `encode`
    cold images first and pass them as warm, so that gradients flow through task rows only.
    """
    images = 0 if pixels is None else len(pixels)
    stack = stacks.stack_of(task for tasks in requested for task in tasks)
    task_rows = None
    if stack is not None:
        plan = RowPlan.of(stack, requested, images, backbone.device, backbone.dtype)
        task_rows = TaskRows(stack, plan, warm)
    cold = [task for tasks in requested[:images] for task in tasks]
    layers = _Layers(
        backbone,
        task_rows,
        base_is_read=keep_contexts or any(task.reads_base for task in cold),
        layers_are_read=keep_contexts or any(task.reads_layers for task in cold),
        keep_contexts=keep_contexts,
    )
    base, tasks = layers.run(pixels)

    readout = contexts = None
    if len(base) and layers.last is not None:
        states = layers.last.base
        readout = read(backbone, base, images, states.queries, states.keys, layers.summary)
        if keep_contexts:
            contexts = ContextBatch(tuple(layers.states), readout.values, readout.patch_attention)
    features = _features(backbone, readout, images, warm)
    columns = _ReadColumns(features)
    logits = []
    for task, of in images_by_task(requested, with_rows=False).items():
        # `base` reads all parts; a head-only task reads the first, `Backbone.feature`.
        logits.append(_head(task, of, features[of, : task.head_weight.shape[1]], columns))
    if task_rows is not None:
        final = backbone.final_norm(tasks).float()
        # Ancestors that were not requested have rows but no logits.
        for task, of in images_by_task(requested, with_rows=True).items():
            logits.append(_head(task, of, final[task_rows.find(task, of)], columns))
    return PassResult(logits, contexts, layers.last, readout)


def encode(backbone: Backbone, pixels: Tensor) -> ContextBatch:
    """Compute the contexts of images (B, 3, H, W), which no task changes."""
    with torch.no_grad():
        result = masked_pass(
            backbone, pixels, None, [[]] * len(pixels), StackCache(), keep_contexts=True
        )
    assert result.contexts is not None
    return result.contexts


def _features(
    backbone: Backbone, readout: Readout | None, cold: int, warm: ContextBatch | None
) -> Tensor:
    """Return the readout of each image, with zeros for what no task of a cold image reads."""
    parts = []
    if readout is not None:
        parts.append(readout.values)
    elif cold or warm is None:  # zeros keep the indices of the warm images right
        width = len(backbone.readout) * backbone.width
        parts.append(torch.zeros(cold, width, device=backbone.device))
    if warm is not None:
        if parts:  # contexts have a summary, cold images only if it is read
            parts[0] = F.pad(parts[0], (0, warm.readout.shape[1] - parts[0].shape[1]))
        parts.append(warm.readout)
    return _joined(parts)


class _ReadColumns:
    """Parts of readouts, gathered once for all tasks that read the same of the same images."""

    def __init__(self, readouts: Tensor) -> None:
        self.buffer = FloatBuffer()
        self._readouts = readouts
        self._gathered: dict[tuple[Columns, tuple[int, ...]], Tensor] = {}

    def get(self, columns: Columns, images: list[int]) -> Tensor:
        key = columns, tuple(images)
        if key not in self._gathered:
            parts = [self._readouts[images, start:end] for start, end in columns]
            self._gathered[key] = _joined(parts, dim=1)
        return self._gathered[key]


def _head(task: Task, images: list[int], features: Tensor, readouts: _ReadColumns) -> TaskLogits:
    """Apply a head to `features` and layers, and the OOD detector to the backbone's feature."""
    values = task.logits(features)
    head, scorer, ood_scores = task.layer_head, task.ood, None
    if head is not None:
        values = values + head.logits(readouts.get(head.columns, images), readouts.buffer)
    if scorer is not None:
        ood_scores = scorer.scores(readouts.get(((0, scorer.width),), images))
    return TaskLogits(task, images, values, features, ood_scores)


def images_by_task(
    requested: Sequence[Sequence[Task]], *, with_rows: bool
) -> dict[Task, list[int]]:
    """Group the images by task, for tasks with a task row or for tasks without."""
    images_of: dict[Task, list[int]] = {}
    for image, tasks in enumerate(requested):
        for task in tasks:
            if (task.token is not None) == with_rows:
                images_of.setdefault(task, []).append(image)
    return images_of
