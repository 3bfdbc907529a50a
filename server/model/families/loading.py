"""`load_backbone`: a model folder, or a name on the hub, to a `Backbone`."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from server.errors import BackboneError, BrokenCheckpoint, NotAVisionTransformer
from server.model.backbone import (
    ACTIVATIONS,
    Backbone,
    Embedding,
    Geometry,
    Layer,
    fingerprint,
    named_tensors,
)
from server.model.families.known import FAMILIES, MISSING, BlockPaths, Family, packed
from server.model.families.mapped import give_back_pages, stored_dtype
from server.model.preprocessing import Preprocessing
from server.model.preprocessing.huggingface import from_folder, from_huggingface
from server.model.rotary import Rotary

# Parts of a checkpoint that no pass of ours reads, so they may be missing.
_UNUSED_WEIGHTS: Final = ("pooler.", "mask_token")

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


_GATED: Final[Mapping[str, str]] = {"silu": "swiglu", "gelu": "geglu"}


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


def read_trunk(name_or_folder: str | Path) -> tuple[Any, Family]:
    """The unmodified vision tower of a folder or hub name, in float32."""
    config, family = _read_config(str(name_or_folder))
    _, trunk = _read_model(str(name_or_folder), config, family)
    return trunk.float(), family


def _read_config(name: str) -> tuple[PretrainedConfig, Family]:
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise BackboneError(f"{name}: there is no such folder; name a folder with a config.json")
    try:
        # The type first: configurations of others may need code or packages that are not here.
        model_type = PretrainedConfig.get_config_dict(name)[0].get("model_type")
        family = FAMILIES.get(str(model_type))
        if family is not None:
            config: PretrainedConfig = AutoConfig.from_pretrained(name)
            return config, family
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BackboneError(
            f"{name}: no readable model configuration in a folder or hub model of this name "
            f"({reason})"
        ) from error
    reason = MISSING.get(str(model_type), "is not a Vision Transformer we know")
    raise NotAVisionTransformer(
        f"{name}: a model of the type '{model_type}' cannot be served: it {reason}; "
        f"we read {', '.join(sorted(FAMILIES))}"
    )


def _read_model(
    name: str, config: PretrainedConfig, family: Family
) -> tuple[PreTrainedModel, nn.Module]:
    architecture = (config.architectures or [""])[0]
    if architecture not in family.trunks:
        architecture = next(iter(family.trunks))
    model_class: Any = getattr(transformers, architecture)
    try:
        with quiet_transformers():
            model, loading = model_class.from_pretrained(
                name,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                dtype=stored_dtype(name),
            )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BrokenCheckpoint(f"{name}: the weights cannot be loaded: {reason}") from error
    for key, stored, expected in sorted(loading["mismatched_keys"]):
        raise BrokenCheckpoint(
            f"{name}: '{key}' is {tuple(stored)} in the checkpoint, but the configuration makes it "
            f"{tuple(expected)}"
        )
    unused = (*_UNUSED_WEIGHTS, *family.unused_weights)
    missing = sorted(
        key for key in loading["missing_keys"] if not any(part in key for part in unused)
    )
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise BrokenCheckpoint(
            f"{name}: {len(missing)} weights of {architecture} are missing from the checkpoint: "
            f"{shown}"
        )
    trunk = _submodule(model, family.trunks[architecture])
    _widen(trunk, _submodule(trunk, family.blocks))
    return model.eval(), trunk


def _widen(trunk: nn.Module, blocks: nn.Module) -> None:
    """All but the blocks to float32: those are widened one at a time, when they are packed."""
    inside = {id(parameter) for parameter in blocks.parameters()}
    for parameter in trunk.parameters():
        if id(parameter) not in inside:
            parameter.data = parameter.data.float()


@contextmanager
def quiet_transformers() -> Iterator[None]:
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
        folder: Path | None = Path(name)
    else:
        path = cached_file(
            name, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False
        )
        folder = None if path is None else Path(path).parent
    stored = None if folder is None else from_folder(folder, family.processor)
    if stored is not None:
        return stored
    default = from_huggingface({"image_processor_type": family.processor})
    return default.with_size(trained_size)


# --- from the modules of a loaded model to the packed `Backbone` ----------------------------------


def _pack(
    name: str,
    model: PreTrainedModel,
    trunk: nn.Module,
    family: Family,
    config: PretrainedConfig,
    preprocessing: Preprocessing,
) -> Backbone:
    blocks = tuple(_take(block, family.block) for block in _submodule(trunk, family.blocks))
    norm = None if family.final_norm is None else _submodule(trunk, family.final_norm)
    embedding = family.embedding(trunk)
    stored = Backbone(
        name=Path(name).name,
        fingerprint="",  # of what is stored, below
        geometry=_geometry(config, blocks[0], embedding, preprocessing.output_size),
        preprocessing=preprocessing,
        embedding=embedding,
        blocks=blocks,
        final_norm_weight=None if norm is None else packed(norm.weight),
        final_norm_bias=None if norm is None else packed(norm.bias),
        base=family.head(model),
        pooling=family.pooling(trunk),
    )
    _check(stored)
    return replace(
        stored,
        fingerprint=fingerprint(stored),
        embedding=_placed(embedding, stored.geometry, family, _pair(config.image_size)),
        rotary=_rotary(stored.geometry),
    )


def _placed(
    embedding: Embedding, geometry: Geometry, family: Family, trained_size: tuple[int, int]
) -> Embedding:
    """With position embeddings of this image size."""
    positions = embedding.patch_positions
    if positions is None:
        return embedding
    if geometry.image_size == trained_size and len(positions) == geometry.patches:
        return embedding
    return replace(embedding, patch_positions=family.resample(positions, geometry.grid))


def _rotary(geometry: Geometry) -> Rotary | None:
    base = geometry.rotary_base
    if base is None:
        return None
    return Rotary.of(geometry.grid, geometry.prefix_tokens, geometry.head_width, base)


def _geometry(
    config: PretrainedConfig, first: Layer, embedding: Embedding, image_size: tuple[int, int]
) -> Geometry:
    activation = _ACTIVATION_NAMES.get(str(config.hidden_act))
    if getattr(config, "use_swiglu_ffn", False):
        activation = "swiglu"
    elif getattr(config, "use_gated_mlp", False):
        activation = _GATED.get(str(activation))
    if activation not in ACTIVATIONS:
        raise NotAVisionTransformer(
            f"the activation '{config.hidden_act}' of its MLP is not one we compute; "
            f"we compute {', '.join(sorted(ACTIVATIONS))}"
        )
    attention_width = first.out_weight.shape[1]
    if attention_width % config.num_attention_heads:
        raise BrokenCheckpoint(
            f"an attention width of {attention_width} cannot be split into "
            f"{config.num_attention_heads} heads"
        )
    head_width = attention_width // config.num_attention_heads
    rotary_base = getattr(config, "rope_theta", None)
    if rotary_base is not None and head_width % 4:
        raise BrokenCheckpoint(
            f"rotary positions of two directions need heads of a multiple of 4, not of {head_width}"
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
        head_width=head_width,
        width=config.hidden_size,
        prefix_tokens=(embedding.class_token is not None) + embedding.other_prefix.shape[0],
        activation=activation,
        epsilon=config.layer_norm_eps,
        rotary_base=rotary_base,
    )


def _take(block: nn.Module, paths: BlockPaths) -> Layer:
    """One block packed, and let go of: never are there two copies of more than one block.

    Weights of a float32 file are its pages, mapped. Those that were packed by copying are given
    back to the system, or they would count until the model is gone.
    """
    layer = _block(block, paths)
    kept = {tensor.data_ptr() for _, tensor in named_tensors(layer)}
    for owner in block.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.data_ptr() not in kept:
                give_back_pages(parameter)
            setattr(owner, name, None)
    return layer


def _block(block: nn.Module, paths: BlockPaths) -> Layer:
    norm1, norm2 = _submodule(block, paths.norm1), _submodule(block, paths.norm2)
    qkv_weight, qkv_bias = _stacked(block, paths.query, paths.key, paths.value)
    out_weight, out_bias = _scaled(block, paths.out, paths.scale1)
    if hasattr(_submodule(block, "mlp"), "gate_proj"):  # SwiGLU: gate and up side by side
        up_weight, up_bias = _stacked(block, "mlp.gate_proj", "mlp.up_proj")
        down_weight, down_bias = _scaled(block, "mlp.down_proj", paths.scale2)
    else:
        up_weight, up_bias = _linear(_submodule(block, paths.up))
        down_weight, down_bias = _scaled(block, paths.down, paths.scale2)
    return Layer(
        norm1_weight=packed(norm1.weight),
        norm1_bias=packed(norm1.bias),
        qkv_weight=qkv_weight,
        qkv_bias=qkv_bias,
        out_weight=out_weight,
        out_bias=out_bias,
        norm2_weight=packed(norm2.weight),
        norm2_bias=packed(norm2.bias),
        up_weight=up_weight,
        up_bias=up_bias,
        down_weight=down_weight,
        down_bias=down_bias,
    )


def _stacked(block: nn.Module, *paths: str) -> tuple[Tensor, Tensor]:
    """Linear maps as one, each written to its place at once.

    Widened copies in between would leave holes among the weights that nothing fits into.
    """
    linears = [_submodule(block, path) for path in paths]
    rows = [linear.weight.shape[0] for linear in linears]
    weight, bias = torch.empty(sum(rows), linears[0].weight.shape[1]), torch.zeros(sum(rows))
    places = weight.split_with_sizes(rows), bias.split_with_sizes(rows)
    for linear, its_weight, its_bias in zip(linears, *places, strict=True):
        its_weight.copy_(linear.weight.detach())
        if linear.bias is not None:
            its_bias.copy_(linear.bias.detach())
    return weight, bias


def _scaled(block: nn.Module, linear: str, scale: str | None) -> tuple[Tensor, Tensor]:
    """A linear map with the layer scale behind it folded in."""
    module = _submodule(block, linear)
    weight, bias = _linear(module)
    if scale is None:
        return weight, bias
    owner, _, parameter = scale.rpartition(".")
    factor = packed(getattr(_submodule(block, owner), parameter))
    # What was widened is ours already, and need not be copied once more.
    into = None if module.weight.dtype == torch.float32 else weight
    return torch.mul(weight, factor[:, None], out=into), bias * factor


def _linear(linear: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401 - a module of the checkpoint
    weight = packed(linear.weight)
    bias = torch.zeros(weight.shape[0]) if linear.bias is None else packed(linear.bias)
    return weight, bias


def _submodule(module: nn.Module, path: str) -> Any:  # noqa: ANN401 - a module of the checkpoint
    return module.get_submodule(path)


def _check(backbone: Backbone) -> None:
    geometry, base = backbone.geometry, backbone.base
    if not _finite(*(tensor for _, tensor in backbone.named_tensors())):
        raise BrokenCheckpoint("some weights are not finite numbers (NaN or infinity)")
    patch_height, patch_width = geometry.patch_size
    if backbone.embedding.patch_weight.shape[1] != 3 * patch_height * patch_width:
        raise NotAVisionTransformer("only models of three colour channels are read")
    if base is None:
        return
    expected = (len(base.labels), len(base.reads) * geometry.width)
    if tuple(base.weight.shape) != expected:
        raise BrokenCheckpoint(
            f"the classifier's weights are {tuple(base.weight.shape)}, but {len(base.labels)} "
            f"labels over {expected[1]} features need {expected}"
        )
    if not _finite(base.weight, base.bias):
        raise BrokenCheckpoint("some weights of the classifier are not finite numbers")


def _finite(*tensors: Tensor | None) -> bool:
    """By the smallest and the largest value, which any NaN would be: no mask is made for it."""
    ends = [
        torch.stack(tensor.aminmax()) for tensor in tensors if tensor is not None and len(tensor)
    ]
    return not ends or bool(torch.isfinite(torch.stack(ends)).all())


def _pair(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)
