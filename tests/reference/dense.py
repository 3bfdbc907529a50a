"""The paper's table, executed as it reads: the slow truth that the masked pass is checked against.

One token list per image, one key list, one dense boolean mask filled cell by cell, plain softmax.
The backbone is the Hugging Face model itself, whose own submodules embed, normalise and project.
Nothing here is shared with, or taken from, the code under test.
"""

import cmath
import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


@dataclass
class ReferenceTask:
    """One task. Without a class token it is a head on the backbone's own class token."""

    head_weight: Tensor  # (K, D)
    head_bias: Tensor | None = None  # (K,)
    class_token: Tensor | None = None  # (D,)
    memory: Tensor | None = None  # (L, m, D)
    placement: str = "pre_norm"
    parents: tuple[str, ...] = ()  # direct ones; ancestors follow
    # Of the class token's row: map ("query", "output", "up", "down") -> (L, in, r), (L, r, out)
    adapter: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Token(NamedTuple):
    """What a row of queries or a column of keys stands for."""

    kind: str  # "base", "class" or "memory"
    task: str | None
    index: int


# ---------------------------------------------------------------------------------------------
# Where each family keeps its parts


@dataclass(frozen=True)
class Layer:
    norm1: nn.Module
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear
    scale1: nn.Module
    norm2: nn.Module
    up: Callable[[Tensor], Tensor]
    activation: Callable[[Tensor], Tensor]
    down: nn.Linear
    scale2: nn.Module


@dataclass(frozen=True)
class Trunk:
    embed: Callable[[Tensor], Tensor]  # pixels -> base tokens, before any further norm
    class_position: Tensor  # (D,) position embedding of the backbone's class token
    before: nn.Module  # norm of the embedded tokens; identity except in CLIP
    layers: list[Layer]
    heads: int
    after: nn.Module  # final norm
    base: Callable[[Tensor], Tensor] | None  # normed base tokens (B, S, D) -> (B, K)
    turn: Callable[[Tensor, Tensor], Tensor] | None = None  # by position: base tokens of a head
    # What a head without a class token reads of the normed base tokens (B, S, D), and its weights
    # on them (B, H, S); without any, the first token and its attention in the last layer.
    pool: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None


def _mlp(mlp: nn.Module) -> tuple[Callable, Callable, nn.Linear]:
    """Up, activation and down of an MLP; a gate is the first half of what goes up."""
    if hasattr(mlp, "fc1"):
        return mlp.fc1, mlp.activation_fn, mlp.fc2
    if not hasattr(mlp, "gate_proj"):
        return mlp.up_proj, mlp.act_fn, mlp.down_proj

    def up(rows: Tensor) -> Tensor:
        return torch.cat([mlp.gate_proj(rows), mlp.up_proj(rows)], dim=-1)

    def gated(raised: Tensor) -> Tensor:
        gate, rest = raised.chunk(2, dim=-1)
        return mlp.act_fn(gate) * rest

    return up, gated, mlp.down_proj


def _vit_layer(layer: nn.Module) -> Layer:
    attention, same = layer.attention, nn.Identity()
    return Layer(
        layer.layernorm_before,
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        same,
        layer.layernorm_after,
        *_mlp(layer.mlp),
        same,
    )


def _dinov2_layer(layer: nn.Module) -> Layer:
    attention = layer.attention
    return Layer(
        layer.norm1,
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.o_proj,
        layer.layer_scale1,
        layer.norm2,
        *_mlp(layer.mlp),
        layer.layer_scale2,
    )


def _clip_layer(layer: nn.Module) -> Layer:
    attention, same = layer.self_attn, nn.Identity()
    return Layer(
        layer.layer_norm1,
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        attention.out_proj,
        same,
        layer.layer_norm2,
        *_mlp(layer.mlp),
        same,
    )


def _embed(embeddings: nn.Module, pixels: Tensor) -> Tensor:
    """Base tokens; position embeddings are interpolated only for a size not the model's own."""
    own = embeddings.image_size
    own = (own, own) if isinstance(own, int) else tuple(own)
    return embeddings(pixels, interpolate_pos_encoding=tuple(pixels.shape[-2:]) != own)


def _vit_trunk(model: PreTrainedModel) -> Trunk:
    trunk = model.base_model
    if hasattr(model, "classifier"):

        def base(rows: Tensor) -> Tensor:
            return model.classifier(rows[:, 0])

    elif hasattr(model, "cls_classifier"):

        def base(rows: Tensor) -> Tensor:
            by_class = model.cls_classifier(rows[:, 0])
            by_distillation = model.distillation_classifier(rows[:, 1])
            return (by_class + by_distillation) / 2

    else:
        base = None
    return Trunk(
        embed=lambda pixels: _embed(trunk.embeddings, pixels),
        class_position=trunk.embeddings.position_embeddings[0, 0],
        before=nn.Identity(),
        layers=[_vit_layer(layer) for layer in trunk.layers],
        heads=model.config.num_attention_heads,
        after=trunk.layernorm,
        base=base,
    )


def _dinov2_trunk(model: PreTrainedModel) -> Trunk:
    trunk = model.base_model
    first_patch = 1 + getattr(model.config, "num_register_tokens", 0)

    def base(rows: Tensor) -> Tensor:
        features = [rows[:, 0], rows[:, first_patch:].mean(dim=1)]
        return model.classifier(torch.cat(features, dim=1))

    return Trunk(
        embed=trunk.embeddings,
        class_position=trunk.embeddings.position_embeddings[0, 0],
        before=nn.Identity(),
        layers=[_dinov2_layer(layer) for layer in trunk.encoder.layer],
        heads=model.config.num_attention_heads,
        after=trunk.layernorm,
        base=base if hasattr(model, "classifier") else None,
    )


def _clip_trunk(model: PreTrainedModel) -> Trunk:
    trunk = getattr(model, "vision_model", model)
    projection = getattr(model, "visual_projection", None)
    return Trunk(
        embed=lambda pixels: _embed(trunk.embeddings, pixels),
        class_position=trunk.embeddings.position_embedding.weight[0],
        before=trunk.pre_layrnorm,
        layers=[_clip_layer(layer) for layer in trunk.encoder.layers],
        heads=trunk.config.num_attention_heads,
        after=trunk.post_layernorm,
        base=None if projection is None else lambda rows: projection(rows[:, 0]),
    )


def _turned(config: PreTrainedConfig, pixels: Tensor, rows: Tensor) -> Tensor:
    """Rotary positions as complex numbers: (B, H, S, d), of which the patches are the last.

    Number i of a head is the real part and i + d / 2 the imaginary part. The first half of these
    numbers turns with the height of a patch's centre, the second with its breadth.
    """
    height, width = (side // config.patch_size for side in pixels.shape[-2:])
    quarter = rows.shape[-1] // 4
    turns = []
    for row in range(height):
        for column in range(width):
            centre = (2 * (row + 0.5) / height - 1, 2 * (column + 0.5) / width - 1)
            angles = [
                2 * math.pi * place / config.rope_theta ** (step / quarter)
                for place in centre
                for step in range(quarter)
            ]
            turns.append([cmath.exp(1j * angle) for angle in angles])
    turn = torch.tensor(turns, dtype=torch.complex128)  # (patches, d / 2)
    before, patches = rows[:, :, : -len(turns)], rows[:, :, -len(turns) :].double()
    real, imaginary = patches.chunk(2, dim=-1)
    turned = torch.complex(real, imaginary) * turn
    patches = torch.cat([turned.real, turned.imag], dim=-1).to(rows.dtype)
    return torch.cat([before, patches], dim=2)


def _dinov3_trunk(model: PreTrainedModel) -> Trunk:
    return Trunk(
        embed=model.embeddings,
        class_position=torch.zeros(model.config.hidden_size),
        before=nn.Identity(),
        layers=[_dinov2_layer(layer) for layer in model.model.layer],
        heads=model.config.num_attention_heads,
        after=model.norm,
        base=None,
        turn=lambda pixels, rows: _turned(model.config, pixels, rows),
    )


def _tips_trunk(model: PreTrainedModel) -> Trunk:
    trunk = getattr(model, "vision_model", model)
    return Trunk(
        embed=trunk.embeddings,
        class_position=trunk.embeddings.position_embeddings[0, 0],
        before=nn.Identity(),
        layers=[_dinov2_layer(layer) for layer in trunk.encoder.layer],
        heads=trunk.config.num_attention_heads,
        after=trunk.layernorm,
        base=(lambda rows: rows[:, 0]) if hasattr(model, "text_model") else None,
    )


def _radio_trunk(model: PreTrainedModel) -> Trunk:
    return Trunk(
        embed=lambda pixels: model.embeddings(model.input_conditioner(pixels)),
        class_position=torch.zeros(model.config.hidden_size),
        before=nn.Identity(),
        layers=[_dinov2_layer(layer) for layer in model.encoder.layer],
        heads=model.config.num_attention_heads,
        after=nn.Identity(),
        base=None,
    )


def _mae_trunk(model: PreTrainedModel) -> Trunk:
    trunk = model.base_model

    def embed(pixels: Tensor) -> Tensor:
        patches = (pixels.shape[-2] // trunk.config.patch_size) * (
            pixels.shape[-1] // trunk.config.patch_size
        )
        in_order = torch.arange(patches).expand(len(pixels), -1)
        return trunk.embeddings(pixels, noise=in_order, interpolate_pos_encoding=True)[0]

    return replace(_vit_trunk(model), embed=embed)


def _ijepa_trunk(model: PreTrainedModel) -> Trunk:
    trunk, classifier = model.base_model, getattr(model, "classifier", None)
    heads = model.config.num_attention_heads
    return Trunk(
        embed=lambda pixels: _embed(trunk.embeddings, pixels),
        class_position=torch.zeros(model.config.hidden_size),
        before=nn.Identity(),
        layers=[_vit_layer(layer) for layer in trunk.layers],
        heads=heads,
        after=trunk.layernorm,
        base=None if classifier is None else lambda rows: classifier(rows.mean(dim=1)),
        pool=lambda rows: _mean(rows, heads),
    )


def _siglip_trunk(model: PreTrainedModel) -> Trunk:
    trunk, classifier = getattr(model, "vision_model", model), getattr(model, "classifier", None)
    heads = trunk.config.num_attention_heads

    def pool(rows: Tensor) -> tuple[Tensor, Tensor]:
        probe = trunk.head.probe.expand(len(rows), -1, -1)
        _, weights = trunk.head.attention(probe, rows, rows, average_attn_weights=False)
        return trunk.head(rows), weights[:, :, 0]

    if classifier is not None:

        def base(rows: Tensor) -> Tensor:
            return classifier(rows.mean(dim=1))

    else:
        base = trunk.head if trunk.use_head else None
    return Trunk(
        embed=lambda pixels: _embed(trunk.embeddings, pixels),
        class_position=torch.zeros(trunk.config.hidden_size),
        before=nn.Identity(),
        layers=[_clip_layer(layer) for layer in trunk.encoder.layers],
        heads=heads,
        after=trunk.post_layernorm,
        base=base,
        pool=pool if trunk.use_head else lambda rows: _mean(rows, heads),
    )


def _mean(rows: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    batch, count, _ = rows.shape
    return rows.mean(dim=1), torch.full((batch, heads, count), 1 / count)


_TRUNKS: dict[str, Callable[[PreTrainedModel], Trunk]] = {
    "vit": _vit_trunk,
    "deit": _vit_trunk,
    "dinov2": _dinov2_trunk,
    "dinov2_with_registers": _dinov2_trunk,
    "dinov3_vit": _dinov3_trunk,
    "clip": _clip_trunk,
    "clip_vision_model": _clip_trunk,
    "metaclip_2": _clip_trunk,
    "metaclip_2_vision_model": _clip_trunk,
    "siglip": _siglip_trunk,
    "siglip_vision_model": _siglip_trunk,
    "tipsv2": _tips_trunk,
    "tipsv2_vision_model": _tips_trunk,
    "ijepa": _ijepa_trunk,
    "vit_mae": _mae_trunk,
    "radio": _radio_trunk,
}


# ---------------------------------------------------------------------------------------------
# Who attends to whom


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


def _checked(tasks: Mapping[str, ReferenceTask]) -> None:
    for name, task in tasks.items():
        if task.placement not in ("pre_norm", "post_norm"):
            raise ValueError(f"task {name}: no placement {task.placement!r}")
        if task.memory is not None and task.class_token is None:
            raise ValueError(f"task {name}: memory without a class token to read it")
        if task.adapter and task.class_token is None:
            raise ValueError(f"task {name}: an adapter without a class token to act on")


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
    """What each row of a layer stands for: whose adapter it goes through, and where it lies."""

    index: int
    queries: list[Token]
    tasks: Mapping[str, ReferenceTask]
    turn_base: Callable[[Tensor], Tensor] | None

    def turn(self, heads: Tensor) -> Tensor:
        """Queries or keys (B, H, Q, d) with those of base tokens, which come first, turned."""
        if self.turn_base is None:
            return heads
        base = sum(token.kind == "base" for token in self.queries)
        return torch.cat([self.turn_base(heads[:, :, :base]), heads[:, :, base:]], dim=2)

    def change(self, name: str, rows: Tensor, made: Tensor) -> Tensor:
        """What a map `made` of `rows` (B, Q, in), row by row with its adapter's x A B added."""
        changed = []
        for place, token in enumerate(self.queries):
            row = made[:, place]
            adapter = {} if token.task is None else self.tasks[token.task].adapter
            if name in adapter:
                a, b = adapter[name]
                row = row + rows[:, place] @ (a[self.index] @ b[self.index])
            changed.append(row)
        return torch.stack(changed, dim=1)


def _attend(
    layer: Layer, heads: int, inputs: Tensor, key_inputs: Tensor, mask: Tensor, rows: _Rows
) -> tuple[Tensor, Tensor]:
    query = _split(rows.change("query", inputs, layer.query(inputs)), heads)  # (B, H, Q, d)
    query = rows.turn(query)
    key = rows.turn(_split(layer.key(key_inputs), heads))  # (B, H, K, d)
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
    trunk = _TRUNKS[model.config.model_type](model)
    base = trunk.embed(pixel_values)  # (B, S, D)
    batch = base.shape[0]
    new = [task.class_token for task in tasks.values() if task.class_token is not None]
    placed = [(token + trunk.class_position).expand(batch, 1, -1) for token in new]
    hidden = trunk.before(torch.cat([base, *placed], dim=1))  # (B, S + T, D)

    queries = query_tokens(base.shape[1], tasks)
    mask = dense_mask(queries, key_tokens(base.shape[1], tasks), tasks)
    turn = None if trunk.turn is None else partial(trunk.turn, pixel_values)
    all_weights = []
    for index, layer in enumerate(trunk.layers):
        inputs = layer.norm1(hidden)
        rows = _Rows(index, queries, tasks, turn)
        memory = [rows.expand(batch, -1, -1) for rows in _memory_inputs(layer, index, tasks)]
        attended, weights = _attend(
            layer, trunk.heads, inputs, torch.cat([inputs, *memory], dim=1), mask, rows
        )
        hidden = hidden + attended
        hidden = hidden + _feed_forward(layer, layer.norm2(hidden), rows)
        all_weights.append(weights)
    return _Pass(trunk, trunk.after(hidden), all_weights, queries)


def _read(name: str, done: _Pass) -> Tensor:
    """What a task's head reads, (B, D): its class token's row, or the backbone's own summary."""
    token = Token("class", name, 0)
    if token in done.queries:
        return done.rows[:, done.queries.index(token)]
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
            adapter={name: (a.to(dtype), b.to(dtype)) for name, (a, b) in task.adapter.items()},
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
    """Logits (B, K) of every task, and of `base` where the model has a head of its own.

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
