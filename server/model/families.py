"""Reading Hugging Face Vision Transformers into the packed `Backbone`, one table entry per family.

An entry names where a family keeps its parts; nothing is subclassed or patched. Weights are read
from the model that `from_pretrained` has built, never from checkpoint keys, so every renaming that
transformers does while loading is already done.

A `CLIPForImageClassification` loads as its vision tower: its classifier averages patch rows before
the final norm, which is not a readout we serve.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from server.errors import BackboneError, BrokenCheckpoint, NoClassToken, NotAVisionTransformer
from server.model.backbone import (
    ACTIVATIONS,
    Backbone,
    BaseHead,
    Embedding,
    Geometry,
    Layer,
    Problem,
    fingerprint,
    named_tensors,
)
from server.model.preprocessing import Preprocessing

# Hugging Face's names of activations, as ours.
_ACTIVATION_NAMES: Final[Mapping[str, str]] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

# Parts of a checkpoint no pass of ours reads, so they may be missing.
_UNUSED_WEIGHTS: Final = ("pooler.", "mask_token", "text_model.", "text_projection", "logit_scale")

_WITHOUT_CLASS_TOKEN: Final = frozenset(
    {"siglip", "siglip2", "siglip_vision_model", "siglip2_vision_model", "swin", "swinv2", "pvt"}
)


@dataclass(frozen=True, slots=True)
class BlockPaths:
    """Where one block of a family keeps its parts."""

    norm1: str
    query: str
    key: str
    value: str
    out: str
    norm2: str
    up: str = "mlp.fc1"
    down: str = "mlp.fc2"
    scale1: str | None = None  # layer scale after attention
    scale2: str | None = None  # layer scale after the MLP


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family keeps its trunk and what its classes' heads read."""

    trunks: Mapping[str, str]  # class name → path of the trunk inside it; the first is the default
    blocks: str
    block: BlockPaths
    final_norm: str
    processor: str  # image processor whose defaults hold where the folder has no configuration
    embedding_norm: str | None = None
    antialias: bool = False  # how it interpolates position embeddings
    head: Callable[[PreTrainedModel], BaseHead | None] = lambda model: None
    config: Callable[[PretrainedConfig], PretrainedConfig] = lambda config: config


def _labels(config: PretrainedConfig) -> tuple[str, ...]:
    names: dict[Any, str] = config.id2label or {}
    return tuple(names[index] for index in sorted(names))


def _problem(config: PretrainedConfig) -> Problem:
    named: dict[str | None, Problem] = {
        "regression": "regression",
        "multi_label_classification": "multi_label",
    }
    return named.get(config.problem_type, "single_label")


def _linear_head(model: PreTrainedModel, reads_patches: bool = False) -> BaseHead | None:
    classifier = getattr(model, "classifier", None)
    if not isinstance(classifier, nn.Linear):
        return None
    return BaseHead(
        _packed(classifier.weight),
        None if classifier.bias is None else _packed(classifier.bias),
        _labels(model.config),
        _problem(model.config),
        ("class", "patches") if reads_patches else ("class",),
    )


def _class_and_patches_head(model: PreTrainedModel) -> BaseHead | None:
    return _linear_head(model, reads_patches=True)


def _deit_head(model: PreTrainedModel) -> BaseHead | None:
    """DeiT with a teacher averages two heads: one head over both rows with halved weights."""
    first: Any = getattr(model, "cls_classifier", None)
    if first is None:
        return _linear_head(model)
    second: Any = model.distillation_classifier
    return BaseHead(
        torch.cat([_packed(first.weight), _packed(second.weight)], dim=1) / 2,
        (_packed(first.bias) + _packed(second.bias)) / 2,
        _labels(model.config),
        _problem(model.config),
        ("class", "distillation"),
    )


def _clip_head(model: PreTrainedModel) -> BaseHead | None:
    """CLIP's projection into the space it shares with text: an embedding, not a classifier."""
    projection: Any = getattr(model, "visual_projection", None)
    if projection is None:
        return None
    weight = _packed(projection.weight)
    labels = tuple(f"dim_{index}" for index in range(weight.shape[0]))
    return BaseHead(weight, None, labels, "embedding")


_VIT_BLOCK: Final = BlockPaths(
    norm1="layernorm_before",
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    out="attention.o_proj",
    norm2="layernorm_after",
)
_DINO_BLOCK: Final = replace(
    _VIT_BLOCK,
    norm1="norm1",
    norm2="norm2",
    scale1="layer_scale1.lambda1",
    scale2="layer_scale2.lambda1",
)
_CLIP_BLOCK: Final = BlockPaths(
    norm1="layer_norm1",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.out_proj",
    norm2="layer_norm2",
)
_CLIP: Final = Family(
    trunks={
        "CLIPVisionModel": "",
        "CLIPVisionModelWithProjection": "vision_model",
        "CLIPModel": "vision_model",
        "CLIPForImageClassification": "vision_model",
    },
    blocks="encoder.layers",
    block=_CLIP_BLOCK,
    final_norm="post_layernorm",
    processor="CLIPImageProcessor",
    embedding_norm="pre_layrnorm",
    head=_clip_head,
    config=lambda config: getattr(config, "vision_config", config),
)

FAMILIES: Final[Mapping[str, Family]] = {
    "vit": Family(
        trunks={"ViTModel": "", "ViTForImageClassification": "vit"},
        blocks="layers",
        block=_VIT_BLOCK,
        final_norm="layernorm",
        processor="ViTImageProcessor",
        head=_linear_head,
    ),
    "deit": Family(
        trunks={
            "DeiTModel": "",
            "DeiTForImageClassification": "deit",
            "DeiTForImageClassificationWithTeacher": "deit",
        },
        blocks="layers",
        block=_VIT_BLOCK,
        final_norm="layernorm",
        processor="DeiTImageProcessor",
        head=_deit_head,
    ),
    "dinov2": Family(
        trunks={"Dinov2Model": "", "Dinov2ForImageClassification": "dinov2"},
        blocks="encoder.layer",
        block=_DINO_BLOCK,
        final_norm="layernorm",
        processor="BitImageProcessor",
        head=_class_and_patches_head,
    ),
    "dinov2_with_registers": Family(
        trunks={
            "Dinov2WithRegistersModel": "",
            "Dinov2WithRegistersForImageClassification": "dinov2_with_registers",
        },
        blocks="encoder.layer",
        block=_DINO_BLOCK,
        final_norm="layernorm",
        processor="BitImageProcessor",
        antialias=True,
        head=_class_and_patches_head,
    ),
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
}


def load_backbone(
    name_or_folder: str | Path, *, image_size: int | tuple[int, int] | None = None
) -> Backbone:
    """Reads a Hugging Face Vision Transformer, from a folder or by its hub name, in float32.

    `image_size` other than the trained one interpolates the position embeddings; left out, it is
    what the model's own preprocessing produces.
    """
    name = str(name_or_folder)
    config, family = _read_config(name)
    model, trunk = _read_model(name, config, family)
    vision_config = family.config(config)
    trained_size = _pair(vision_config.image_size)
    preprocessing = _read_preprocessing(name, family, trained_size)
    if image_size is not None:
        preprocessing = preprocessing.with_size(_pair(image_size))
    try:
        return _pack(name, model, trunk, family, vision_config, preprocessing)
    except BackboneError as error:
        raise type(error)(f"{name}: {error}") from error


def _read_config(name: str) -> tuple[PretrainedConfig, Family]:
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise BackboneError(f"{name}: there is no such folder; name a folder with a config.json")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BackboneError(
            f"{name}: no readable model configuration in a folder or hub model of this name "
            f"({reason})"
        ) from error
    family = FAMILIES.get(config.model_type)
    if family is None and config.model_type in _WITHOUT_CLASS_TOKEN:
        raise NoClassToken(
            f"{name}: '{config.model_type}' has no class token, and tasks are read from class "
            "tokens; use a ViT, DeiT, DINOv2 or CLIP model"
        )
    if family is None:
        raise NotAVisionTransformer(
            f"{name}: '{config.model_type}' is not a Vision Transformer we read; "
            f"we read {', '.join(sorted(FAMILIES))}"
        )
    return config, family


def _read_model(
    name: str, config: PretrainedConfig, family: Family
) -> tuple[PreTrainedModel, nn.Module]:
    architecture = (config.architectures or [""])[0]
    if architecture not in family.trunks:
        architecture = next(iter(family.trunks))
    model_class: Any = getattr(transformers, architecture)
    try:
        with _quiet_transformers():
            model, loading = model_class.from_pretrained(
                name, output_loading_info=True, ignore_mismatched_sizes=True, dtype=torch.float32
            )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BrokenCheckpoint(f"{name}: the weights cannot be loaded: {reason}") from error
    for key, stored, expected in sorted(loading["mismatched_keys"]):
        raise BrokenCheckpoint(
            f"{name}: '{key}' is {tuple(stored)} in the checkpoint, but the configuration makes it "
            f"{tuple(expected)}"
        )
    missing = sorted(
        key for key in loading["missing_keys"] if not any(part in key for part in _UNUSED_WEIGHTS)
    )
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise BrokenCheckpoint(
            f"{name}: {len(missing)} weights of {architecture} are missing from the checkpoint: "
            f"{shown}"
        )
    return model.eval(), _submodule(model, family.trunks[architecture])


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Loading reports and bars are for people at a notebook; what is wrong we say ourselves."""
    settings: Any = transformers.utils.logging
    verbosity, bar = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity(logging.CRITICAL)
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        if bar:
            settings.enable_progress_bar()


def _read_preprocessing(name: str, family: Family, trained_size: tuple[int, int]) -> Preprocessing:
    if Path(name).is_dir():
        found = Preprocessing.from_folder(Path(name))
    else:
        path = cached_file(
            name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False
        )
        found = None if path is None else Preprocessing.from_folder(Path(path).parent)
    if found is not None:
        return found
    default = Preprocessing.from_huggingface({"image_processor_type": family.processor})
    return default.with_size(trained_size)


def _pack(
    name: str,
    model: PreTrainedModel,
    trunk: nn.Module,
    family: Family,
    config: PretrainedConfig,
    preprocessing: Preprocessing,
) -> Backbone:
    blocks = tuple(_block(block, family.block) for block in _submodule(trunk, family.blocks))
    norm = _submodule(trunk, family.final_norm)
    final_norm = _packed(norm.weight), _packed(norm.bias)
    geometry = _geometry(config, blocks[0], preprocessing.output_size)
    stored = _embedding(trunk, family)
    geometry = replace(geometry, prefix_tokens=1 + stored.other_prefix.shape[0])
    _check(geometry, stored, blocks, final_norm)
    base = family.head(model)
    if base is not None:
        _check_head(base, geometry)
    positions = stored.patch_positions
    if geometry.image_size != _pair(config.image_size):
        positions = _interpolated(positions, geometry.grid, family.antialias)
    return Backbone(
        name=Path(name).name,
        fingerprint=fingerprint(geometry, stored, blocks, *final_norm),
        geometry=geometry,
        preprocessing=preprocessing,
        embedding=replace(stored, patch_positions=positions),
        blocks=blocks,
        final_norm_weight=final_norm[0],
        final_norm_bias=final_norm[1],
        base=base,
    )


def _geometry(config: PretrainedConfig, first: Layer, image_size: tuple[int, int]) -> Geometry:
    activation = _ACTIVATION_NAMES.get(str(config.hidden_act))
    if getattr(config, "use_swiglu_ffn", False):
        activation = "swiglu"
    if activation not in ACTIVATIONS:
        raise NotAVisionTransformer(
            f"the activation '{config.hidden_act}' is not one we compute; "
            f"we compute {', '.join(sorted(ACTIVATIONS))}"
        )
    attention_width = first.out_weight.shape[1]
    if attention_width % config.num_attention_heads:
        raise BrokenCheckpoint(
            f"an attention width of {attention_width} cannot be split into "
            f"{config.num_attention_heads} heads"
        )
    patch_size = _pair(config.patch_size)
    if image_size[0] < patch_size[0] or image_size[1] < patch_size[1]:
        raise BackboneError(
            f"an image of {image_size[0]}×{image_size[1]} pixels holds no patch of "
            f"{patch_size[0]}×{patch_size[1]}; choose a larger image size"
        )
    return Geometry(
        image_size=image_size,
        patch_size=patch_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        head_width=attention_width // config.num_attention_heads,
        width=config.hidden_size,
        prefix_tokens=1,
        activation=activation,
        epsilon=config.layer_norm_eps,
    )


def _embedding(trunk: nn.Module, family: Family) -> Embedding:
    module: Any = trunk.embeddings
    if family.embedding_norm is not None:  # CLIP
        patch, norm = module.patch_embedding, _submodule(trunk, family.embedding_norm)
        class_token, positions = module.class_embedding, module.position_embedding.weight
    else:
        patch, norm = module.patch_embeddings.projection, None
        class_token, positions = module.cls_token, module.position_embeddings[0]
    positions = _packed(positions)
    others = []
    if hasattr(module, "distillation_token"):  # has a position of its own, after the class token's
        others.append(_packed(module.distillation_token)[0] + positions[1:2])
    patch_positions = positions[1 + len(others) :]
    if getattr(module, "register_tokens", None) is not None:  # joins after positions were added
        others.append(_packed(module.register_tokens)[0])
    width = positions.shape[1]
    return Embedding(
        patch_weight=_packed(patch.weight).flatten(1),
        patch_bias=torch.zeros(width) if patch.bias is None else _packed(patch.bias),
        class_token=_packed(class_token).reshape(width),
        class_position=positions[0],
        other_prefix=torch.cat(others) if others else torch.empty(0, width),
        patch_positions=patch_positions,
        norm_weight=None if norm is None else _packed(norm.weight),
        norm_bias=None if norm is None else _packed(norm.bias),
    )


def _block(block: nn.Module, paths: BlockPaths) -> Layer:
    norm1, norm2 = _submodule(block, paths.norm1), _submodule(block, paths.norm2)
    parts = [_linear(_submodule(block, path)) for path in (paths.query, paths.key, paths.value)]
    out_weight, out_bias = _scaled(block, paths.out, paths.scale1)
    if hasattr(_submodule(block, "mlp"), "gate_proj"):  # SwiGLU: gate and up side by side
        gate = _linear(_submodule(block, "mlp.gate_proj"))
        up = _linear(_submodule(block, "mlp.up_proj"))
        up_weight, up_bias = torch.cat([gate[0], up[0]]), torch.cat([gate[1], up[1]])
        down_weight, down_bias = _scaled(block, "mlp.down_proj", paths.scale2)
    else:
        up_weight, up_bias = _linear(_submodule(block, paths.up))
        down_weight, down_bias = _scaled(block, paths.down, paths.scale2)
    return Layer(
        norm1_weight=_packed(norm1.weight),
        norm1_bias=_packed(norm1.bias),
        qkv_weight=torch.cat([weight for weight, _ in parts]),
        qkv_bias=torch.cat([bias for _, bias in parts]),
        out_weight=out_weight,
        out_bias=out_bias,
        norm2_weight=_packed(norm2.weight),
        norm2_bias=_packed(norm2.bias),
        up_weight=up_weight,
        up_bias=up_bias,
        down_weight=down_weight,
        down_bias=down_bias,
    )


def _scaled(block: nn.Module, linear: str, scale: str | None) -> tuple[Tensor, Tensor]:
    """A linear map with the layer scale behind it folded in."""
    weight, bias = _linear(_submodule(block, linear))
    if scale is None:
        return weight, bias
    owner, _, parameter = scale.rpartition(".")
    factor = _packed(getattr(_submodule(block, owner), parameter))
    return weight * factor[:, None], bias * factor


def _linear(linear: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - a module of the checkpoint
    weight = _packed(linear.weight)
    bias = torch.zeros(weight.shape[0]) if linear.bias is None else _packed(linear.bias)
    return weight, bias


def _packed(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous()


def _submodule(module: nn.Module, path: str) -> Any:  # noqa: ANN401 - a module of the checkpoint
    return module.get_submodule(path)


def _interpolated(positions: Tensor, grid: tuple[int, int], antialias: bool) -> Tensor:
    """Position embeddings of the trained, square grid of patches, resampled to another one."""
    side = round(positions.shape[0] ** 0.5)
    if (side, side) == grid:
        return positions
    if side * side != positions.shape[0]:
        raise BackboneError(
            f"the {positions.shape[0]} trained positions are not a square, so they cannot be "
            f"resampled to {grid[0]}×{grid[1]}; leave image_size out"
        )
    square = positions.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    resampled = F.interpolate(
        square, size=grid, mode="bicubic", align_corners=False, antialias=antialias
    )
    return resampled.permute(0, 2, 3, 1).reshape(grid[0] * grid[1], -1).contiguous()


def _check(
    geometry: Geometry,
    embedding: Embedding,
    blocks: tuple[Layer, ...],
    final_norm: tuple[Tensor, Tensor],
) -> None:
    parts: list[Embedding | Layer] = [embedding, *blocks]
    tensors = [*final_norm, *(tensor for part in parts for _, tensor in named_tensors(part))]
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        raise BrokenCheckpoint("some weights are not finite numbers (NaN or infinity)")
    if embedding.patch_weight.shape[1] != 3 * geometry.patch_size[0] * geometry.patch_size[1]:
        raise NotAVisionTransformer("only models of three colour channels are read")


def _check_head(base: BaseHead, geometry: Geometry) -> None:
    expected = (len(base.labels), len(base.reads) * geometry.width)
    if tuple(base.weight.shape) != expected:
        raise BrokenCheckpoint(
            f"the classifier's weights are {tuple(base.weight.shape)}, but {len(base.labels)} "
            f"labels over {expected[1]} features need {expected}"
        )
    if not all(
        bool(torch.isfinite(part).all()) for part in (base.weight, base.bias) if part is not None
    ):
        raise BrokenCheckpoint("some weights of the classifier are not finite numbers")


def _pair(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)
