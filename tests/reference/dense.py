"""The paper's table, executed as it reads: the slow truth that the masked pass is checked against.

One token list per image, one key list, one dense boolean mask filled cell by cell, plain softmax.
The backbone is the Hugging Face model itself, whose own submodules embed, normalise and project.
Each family's parts are in `trunks`. Nothing here is shared with or copied from the code under
test.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.reference.trunks import TRUNKS, Layer, Trunk


@dataclass
class ReferenceTask:
    """One task. Without a class token it is a head on the backbone's own class token."""

    head_weight: Tensor  # (K, D)
    head_bias: Tensor | None = None  # (K,)
    class_token: Tensor | None = None  # (D,)
    memory: Tensor | None = None  # (L, m, D)
    placement: str = "pre_norm"
    parents: tuple[str, ...] = ()  # direct ones; ancestors follow
    # Of the class token's row: projection -> (L, in, r), (L, r, out)
    lora: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # Of the summary of a layer's normalised input: layer -> (K, parts, D)
    layers: dict[int, Tensor] = field(default_factory=dict)
    feature: Tensor | None = None  # (K, D): of the backbone's feature, beside the class token's row


class Token(NamedTuple):
    """What a row of queries or a column of keys stands for."""

    kind: str  # "base", "class" or "memory"
    task: str | None
    index: int


# ---------------------------------------------------------------------------------------------
# Which token attends to which


def ancestors(name: str, tasks: Mapping[str, ReferenceTask]) -> set[str]:
    """Parents, their parents, and so on."""
    found: set[str] = set()
    for parent in tasks[name].parents:
        found |= {parent} | ancestors(parent, tasks)
    return found


def query_tokens(base_tokens: int, tasks: Mapping[str, ReferenceTask]) -> list[Token]:
    """[base tokens | C_1 ... C_T]; head-only tasks have no token."""
    tokens = [Token("base", None, i) for i in range(base_tokens)]
    for name, task in tasks.items():
        if task.class_token is not None:
            tokens.append(Token("class", name, 0))
    return tokens


def key_tokens(base_tokens: int, tasks: Mapping[str, ReferenceTask]) -> list[Token]:
    """The queries, then every M_k."""
    tokens = query_tokens(base_tokens, tasks)
    for name, task in tasks.items():
        if task.memory is not None:
            tokens += [Token("memory", name, i) for i in range(task.memory.shape[1])]
    return tokens


def may_attend(query: Token, key: Token, tasks: Mapping[str, ReferenceTask]) -> bool:
    """One cell of the paper's table."""
    if key.kind == "base":
        return True
    if query.kind == "base":
        return False
    assert query.task is not None
    return key.task == query.task or key.task in ancestors(query.task, tasks)


def dense_mask(
    queries: list[Token], keys: list[Token], tasks: Mapping[str, ReferenceTask]
) -> Tensor:
    mask = torch.zeros(len(queries), len(keys), dtype=torch.bool)
    for row, query in enumerate(queries):
        for column, key in enumerate(keys):
            mask[row, column] = may_attend(query, key, tasks)
    return mask


# ---------------------------------------------------------------------------------------------
# The forward pass


class _Pass(NamedTuple):
    trunk: Trunk
    rows: Tensor  # (B, queries, D) after the final norm
    weights: list[Tensor]  # per layer (B, heads, queries, keys)
    queries: list[Token]
    inputs: list[Tensor]  # per layer (B, base tokens, D), normalised


def _checked(tasks: Mapping[str, ReferenceTask]) -> None:
    for name, task in tasks.items():
        if task.placement not in ("pre_norm", "post_norm"):
            raise ValueError(f"task {name}: no placement {task.placement!r}")
        if task.memory is not None and task.class_token is None:
            raise ValueError(f"task {name}: memory without a class token to read it")
        if task.lora and task.class_token is None:
            raise ValueError(f"task {name}: LoRA without a class token")


def _memory_inputs(layer: Layer, index: int, tasks: Mapping[str, ReferenceTask]) -> list[Tensor]:
    """What each task's memory adds to the keys' and values' input in layer `index`: (m, D) each."""
    inputs = []
    for task in tasks.values():
        if task.memory is None:
            continue
        memory = task.memory[index]
        inputs.append(layer.norm1(memory) if task.placement == "pre_norm" else memory)
    return inputs


def _split(x: Tensor, heads: int) -> Tensor:
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, heads, width // heads).transpose(1, 2)


@dataclass(frozen=True)
class _Rows:
    """What each row of a layer is: the task of its LoRA, and its position."""

    index: int
    queries: list[Token]
    tasks: Mapping[str, ReferenceTask]
    rotate_base: Callable[[Tensor], Tensor] | None

    def rotate(self, heads: Tensor) -> Tensor:
        """Rotate queries or keys (B, H, Q, d) of base tokens, which come first."""
        if self.rotate_base is None:
            return heads
        base = sum(token.kind == "base" for token in self.queries)
        return torch.cat([self.rotate_base(heads[:, :, :base]), heads[:, :, base:]], dim=2)

    def change(self, name: str, rows: Tensor, made: Tensor) -> Tensor:
        """Add x A B of each row's task to `made`, a linear layer of `rows` (B, Q, in)."""
        changed = []
        for place, token in enumerate(self.queries):
            row = made[:, place]
            lora = {} if token.task is None else self.tasks[token.task].lora
            if name in lora:
                a, b = lora[name]
                row = row + rows[:, place] @ (a[self.index] @ b[self.index])
            changed.append(row)
        return torch.stack(changed, dim=1)


def _attend(
    layer: Layer, heads: int, inputs: Tensor, key_inputs: Tensor, mask: Tensor, rows: _Rows
) -> tuple[Tensor, Tensor]:
    query = _split(rows.change("query", inputs, layer.query(inputs)), heads)  # (B, H, Q, d)
    query = rows.rotate(query)
    key = rows.rotate(_split(layer.key(key_inputs), heads))  # (B, H, K, d)
    value = _split(layer.value(key_inputs), heads)  # (B, H, K, d)
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    attended = (weights @ value).transpose(1, 2).flatten(2)  # (B, Q, D)
    return rows.change("output", attended, layer.scale1(layer.output(attended))), weights


def _feed_forward(layer: Layer, inputs: Tensor, rows: _Rows) -> Tensor:
    hidden = layer.activation(rows.change("up", inputs, layer.up(inputs)))
    return rows.change("down", hidden, layer.scale2(layer.down(hidden)))


def _run(model: PreTrainedModel, pixel_values: Tensor, tasks: Mapping[str, ReferenceTask]) -> _Pass:
    _checked(tasks)
    trunk = TRUNKS[model.config.model_type](model)
    base = trunk.embed(pixel_values)  # (B, S, D)
    batch = base.shape[0]
    new = [task.class_token for task in tasks.values() if task.class_token is not None]
    placed = [(token + trunk.class_position).expand(batch, 1, -1) for token in new]
    hidden = trunk.before(torch.cat([base, *placed], dim=1))  # (B, S + T, D)

    queries = query_tokens(base.shape[1], tasks)
    mask = dense_mask(queries, key_tokens(base.shape[1], tasks), tasks)
    rotate = None if trunk.rotate is None else partial(trunk.rotate, pixel_values)
    all_weights, all_inputs = [], []
    for index, layer in enumerate(trunk.layers):
        inputs = layer.norm1(hidden)
        all_inputs.append(inputs[:, : base.shape[1]])
        rows = _Rows(index, queries, tasks, rotate)
        memory = [rows.expand(batch, -1, -1) for rows in _memory_inputs(layer, index, tasks)]
        attended, weights = _attend(
            layer, trunk.heads, inputs, torch.cat([inputs, *memory], dim=1), mask, rows
        )
        hidden = hidden + attended
        hidden = hidden + _feed_forward(layer, layer.norm2(hidden), rows)
        all_weights.append(weights)
    return _Pass(trunk, trunk.after(hidden), all_weights, queries, all_inputs)


def _patches(model: PreTrainedModel, pixel_values: Tensor) -> int:
    size = getattr(model.config, "vision_config", model.config).patch_size
    height, width = (size, size) if isinstance(size, int) else size
    return (pixel_values.shape[2] // height) * (pixel_values.shape[3] // width)


def _summary(inputs: Tensor, patches: int) -> list[Tensor]:
    """Class token (if there are tokens before the patches), mean and deviation: (B, D) each."""
    prefix = inputs.shape[1] - patches
    on_patches = inputs[:, prefix:]
    mean = sum(on_patches[:, place] for place in range(patches)) / patches
    squares = sum((on_patches[:, place] - mean) ** 2 for place in range(patches)) / patches
    return [*([inputs[:, 0]] if prefix else []), mean, squares.sqrt()]


def _read(name: str, done: _Pass) -> Tensor:
    """What a task's head reads, (B, D): its class token's row, or the backbone's own summary."""
    token = Token("class", name, 0)
    if token in done.queries:
        return done.rows[:, done.queries.index(token)]
    return _feature(done)


def _feature(done: _Pass) -> Tensor:
    if done.trunk.pool is None:
        return done.rows[:, 0]
    return done.trunk.pool(_base_rows(done))[0]


def _base_rows(done: _Pass) -> Tensor:
    return done.rows[:, : sum(token.kind == "base" for token in done.queries)]


def _attention(name: str, done: _Pass) -> Tensor:
    """Of what a task's head reads, (B, layers, heads, keys); a pooling's stands in every layer."""
    stacked = torch.stack(done.weights, dim=1)  # (B, L, H, queries, keys)
    token = Token("class", name, 0)
    if token in done.queries:
        return stacked[:, :, :, done.queries.index(token)]
    if done.trunk.pool is None:
        return stacked[:, :, :, 0]
    weights = done.trunk.pool(_base_rows(done))[1]  # (B, H, S)
    padded = torch.zeros_like(stacked[:, :, :, 0])
    padded[..., : weights.shape[-1]] = weights[:, None]
    return padded


def _in_dtype(
    model: PreTrainedModel, tasks: Mapping[str, ReferenceTask], dtype: torch.dtype
) -> tuple[PreTrainedModel, dict[str, ReferenceTask]]:
    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(dtype)

    cast_tasks = {
        name: replace(
            task,
            head_weight=task.head_weight.to(dtype),
            head_bias=cast(task.head_bias),
            class_token=cast(task.class_token),
            memory=cast(task.memory),
            lora={name: (a.to(dtype), b.to(dtype)) for name, (a, b) in task.lora.items()},
            layers={layer: weight.to(dtype) for layer, weight in task.layers.items()},
            feature=cast(task.feature),
        )
        for name, task in tasks.items()
    }
    return copy.deepcopy(model).to(dtype), cast_tasks


def dense_forward(
    model: PreTrainedModel,
    pixel_values: Tensor,
    tasks: Mapping[str, ReferenceTask],
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Logits (B, K) of every task, and of `base` if the model has a head.

    `dtype` runs everything in another precision. Gradients reach the tasks' tensors.
    """
    if dtype is not None:
        model, tasks = _in_dtype(model, tasks, dtype)
        pixel_values = pixel_values.to(dtype)
    done = _run(model, pixel_values, tasks)
    logits = {}
    for name, task in tasks.items():
        logits[name] = _read(name, done) @ task.head_weight.T
        if task.head_bias is not None:
            logits[name] = logits[name] + task.head_bias
        if task.feature is not None:
            logits[name] = logits[name] + _feature(done) @ task.feature.T
        for layer, weight in task.layers.items():
            summary = _summary(done.inputs[layer], _patches(model, pixel_values))
            for part, values in enumerate(summary):
                logits[name] = logits[name] + values @ weight[:, part].T
    if done.trunk.base is not None:
        logits["base"] = done.trunk.base(_base_rows(done))
    return logits


def attention_of(
    model: PreTrainedModel, pixel_values: Tensor, tasks: Mapping[str, ReferenceTask]
) -> dict[str, Tensor]:
    """Per task the attention of what its head reads: (B, layers, heads, keys).

    Keys are in the order of `key_tokens`: base tokens, class tokens of all tasks, all memory.
    """
    done = _run(model, pixel_values, tasks)
    return {name: _attention(name, done) for name in tasks}
