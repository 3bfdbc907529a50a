"""`load_backbone`: convert a model folder, or a model on the Hugging Face hub, to a `Backbone`."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from engram_server.errors import BackboneError, BrokenCheckpoint, NotAVisionTransformer
from engram_server.model.backbone import (
    ACTIVATIONS,
    Backbone,
    Embedding,
    Geometry,
    Layer,
    fingerprint,
    named_tensors,
)
from engram_server.model.families.hub import (
    find_file,
    release_pages,
    split_revision,
    stored_dtype,
)
from engram_server.model.families.registry import FAMILIES, UNSUPPORTED, BlockPaths, Family, packed
from engram_server.model.kernels.cpu_features import disable_unusable_amx
from engram_server.model.preprocessing import Preprocessing
from engram_server.model.preprocessing.huggingface import from_folder, from_huggingface
from engram_server.model.rotary import Rotary

# Parts of a checkpoint that the pass does not use, so they may be missing.
_UNUSED_WEIGHTS: Final = ("pooler.", "mask_token")

# Hugging Face's names of activations to ours.
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
    """Load a Hugging Face Vision Transformer, from a folder or by its hub name, in float32.

    A hub name may have a revision: `org/name@revision`.

    An `image_size` other than the trained one interpolates the position embeddings. The default is
    the output size of the model's preprocessing.
    """
    disable_unusable_amx()
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
    """Load the unmodified vision tower of a model, in float32."""
    config, family = _read_config(str(name_or_folder))
    _, trunk = _read_model(str(name_or_folder), config, family)
    return trunk.float(), family


def _read_config(name: str) -> tuple[PretrainedConfig, Family]:
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise BackboneError(
            f"Folder '{name}' does not exist. Pass a folder that contains a config.json."
        )
    repository, revision = split_revision(name)
    try:
        # The type first: other configurations may need code or packages that are not installed.
        found, _ = PretrainedConfig.get_config_dict(repository, revision=revision)
        model_type = found.get("model_type")
        family = FAMILIES.get(str(model_type))
        if family is not None:
            config: PretrainedConfig = AutoConfig.from_pretrained(repository, revision=revision)
            return config, family
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BackboneError(
            f"Cannot read the model configuration of '{name}' from a folder or the hub: {reason}"
        ) from error
    reason = UNSUPPORTED.get(str(model_type), "is not a supported Vision Transformer")
    raise NotAVisionTransformer(
        f"{name}: model type '{model_type}' cannot be served because it {reason}. "
        f"Supported types: {', '.join(sorted(FAMILIES))}."
    )


def _read_model(
    name: str, config: PretrainedConfig, family: Family
) -> tuple[PreTrainedModel, nn.Module]:
    architecture = (config.architectures or [""])[0]
    if architecture not in family.trunks:
        architecture = next(iter(family.trunks))
    model = load_model(name, architecture, (*_UNUSED_WEIGHTS, *family.unused_weights))
    trunk = _submodule(model, family.trunks[architecture])
    of_blocks = {id(parameter) for parameter in _submodule(trunk, family.blocks).parameters()}
    for parameter in trunk.parameters():
        if id(parameter) not in of_blocks:  # those are converted when they are packed
            parameter.data = parameter.data.float()
    return model, trunk


def load_model(name: str, architecture: str, unused: Sequence[str]) -> Any:  # noqa: ANN401
    """Load an unmodified model; only weights with an `unused` part in their name may be missing."""
    model_class: Any = getattr(transformers, architecture)
    repository, revision = split_revision(name)
    try:
        with _quiet_transformers():
            model, loading = model_class.from_pretrained(
                repository,
                revision=revision,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                dtype=stored_dtype(name),
            )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BrokenCheckpoint(f"{name}: cannot load the weights: {reason}") from error
    for key, stored, expected in sorted(loading["mismatched_keys"]):
        raise BrokenCheckpoint(
            f"{name}: '{key}' is {tuple(stored)} in the checkpoint, but {tuple(expected)} in the "
            f"configuration"
        )
    missing = sorted(
        key for key in loading["missing_keys"] if not any(part in key for part in unused)
    )
    if missing:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise BrokenCheckpoint(
            f"{name}: the checkpoint lacks {len(missing)} weights of {architecture}: {shown}"
        )
    return model.eval()


@contextmanager
def _quiet_transformers() -> Iterator[None]:
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
        path = find_file(name, "preprocessor_config.json")
        folder = None if path is None else Path(path).parent
    stored = None if folder is None else from_folder(folder, family.processor)
    if stored is not None:
        return stored
    default = from_huggingface({"image_processor_type": family.processor})
    return default.with_size(trained_size)


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
        name=Path(split_revision(name)[0]).name,
        fingerprint="",  # set below, from the stored weights
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
    geometry, rotary = stored.geometry, None
    if (base := geometry.rotary_base) is not None:
        rotary = Rotary.of(geometry.grid, geometry.prefix_tokens, geometry.head_width, base)
    return replace(
        stored,
        fingerprint=fingerprint(stored),
        embedding=_placed(embedding, geometry, family, _pair(config.image_size)),
        rotary=rotary,
    )


def _placed(
    embedding: Embedding, geometry: Geometry, family: Family, trained_size: tuple[int, int]
) -> Embedding:
    """Resample the position embeddings to this image size."""
    positions = embedding.patch_positions
    if positions is None:
        return embedding
    if geometry.image_size == trained_size and len(positions) == geometry.patches:
        return embedding
    return replace(embedding, patch_positions=family.resample(positions, geometry.grid))


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
            f"activation '{config.hidden_act}' of the MLP is not supported. "
            f"Supported: {', '.join(sorted(ACTIVATIONS))}."
        )
    attention_width = first.out_weight.shape[1]
    if attention_width % config.num_attention_heads:
        raise BrokenCheckpoint(
            f"attention width {attention_width} is not divisible by "
            f"{config.num_attention_heads} heads"
        )
    head_width = attention_width // config.num_attention_heads
    rotary_base = getattr(config, "rope_theta", None)
    if rotary_base is not None and head_width % 4:
        raise BrokenCheckpoint(
            f"rotary position embedding needs a head width divisible by 4, not {head_width}"
        )
    patch_size = _pair(config.patch_size)
    if image_size[0] < patch_size[0] or image_size[1] < patch_size[1]:
        raise BackboneError(
            f"image size {image_size[0]}×{image_size[1]} is smaller than one patch of "
            f"{patch_size[0]}×{patch_size[1]}. Use a larger image size."
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
    """Pack one block and release its memory, so that at most one block exists twice.

    Weights of a float32 file are mapped pages. Pages that were copied are released, because they
    would otherwise stay in memory until the model is deleted.
    """
    layer = _block(block, paths)
    kept = {tensor.data_ptr() for _, tensor in named_tensors(layer)}
    for owner in block.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if parameter.data_ptr() not in kept:
                release_pages(parameter)
            setattr(owner, name, None)
    return layer


def _block(block: nn.Module, paths: BlockPaths) -> Layer:
    norm1, norm2 = _submodule(block, paths.norm1), _submodule(block, paths.norm2)
    qkv_weight, qkv_bias = _stacked(block, paths.query, paths.key, paths.value)
    out_weight, out_bias = _scaled(block, paths.out, paths.scale1)
    if hasattr(_submodule(block, "mlp"), "gate_proj"):  # SwiGLU: gate and up stacked
        paths = replace(paths, down="mlp.down_proj")
        up_weight, up_bias = _stacked(block, "mlp.gate_proj", "mlp.up_proj")
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
    """Stack linear layers into one, each copied directly to its rows.

    Intermediate float32 copies would fragment the memory between the weights.
    """
    linears = [_submodule(block, path) for path in paths]
    rows = [linear.weight.shape[0] for linear in linears]
    weight, bias = torch.empty(sum(rows), linears[0].weight.shape[1]), torch.zeros(sum(rows))
    parts = weight.split_with_sizes(rows), bias.split_with_sizes(rows)
    for linear, its_weight, its_bias in zip(linears, *parts, strict=True):
        its_weight.copy_(linear.weight.detach())
        if linear.bias is not None:
            its_bias.copy_(linear.bias.detach())
    return weight, bias


def _scaled(block: nn.Module, linear: str, scale: str | None) -> tuple[Tensor, Tensor]:
    """Return a linear layer with its layer scale folded in."""
    module = _submodule(block, linear)
    weight, bias = _linear(module)
    if scale is None:
        return weight, bias
    owner, _, parameter = scale.rpartition(".")
    factor = packed(getattr(_submodule(block, owner), parameter))
    # A converted weight is already a copy and can be modified in place.
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
        raise BrokenCheckpoint("some weights are not finite (NaN or infinity)")
    patch_height, patch_width = geometry.patch_size
    if backbone.embedding.patch_weight.shape[1] != 3 * patch_height * patch_width:
        raise NotAVisionTransformer("only models with three colour channels are supported")
    if base is None:
        return
    expected = (len(base.labels), len(base.reads) * geometry.width)
    if tuple(base.weight.shape) != expected:
        raise BrokenCheckpoint(
            f"the classifier's weight is {tuple(base.weight.shape)}, but {len(base.labels)} "
            f"labels and {expected[1]} features need {expected}"
        )
    if not _finite(base.weight, base.bias):
        raise BrokenCheckpoint("some weights of the classifier are not finite (NaN or infinity)")


def _finite(*tensors: Tensor | None) -> bool:
    """Check the minimum and maximum, which propagate NaN; this needs no mask."""
    ends = [
        torch.stack(tensor.aminmax()) for tensor in tensors if tensor is not None and len(tensor)
    ]
    return not ends or bool(torch.isfinite(torch.stack(ends)).all())


def _pair(size: int | tuple[int, int] | list[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)
