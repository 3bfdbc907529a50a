"""Tiny random models of every backbone family, as Hugging Face builds them.

Every parameter is drawn so that it matters: no LayerNorm is the identity, no bias or layer scale
is neutral, no position embedding is zero. A term dropped anywhere moves the outputs.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

CLASSES = 7
GEOMETRY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGE = {"image_size": 32, "patch_size": 8}
PROJECTION = 20

_VIT = {**GEOMETRY, **IMAGE, "intermediate_size": 64}
_DINO = {**GEOMETRY, **IMAGE, "mlp_ratio": 2}
_CLIP = {**_VIT, "projection_dim": PROJECTION}
_CLIP_TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 8,
    "bos_token_id": 48,
    "eos_token_id": 49,
    "projection_dim": PROJECTION,
}


@dataclass(frozen=True)
class Family:
    """How one family is built: its model class, its configuration class and tiny settings."""

    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]
    settings: dict = field(default_factory=dict)
    has_head: bool = True


_TABLE = {
    "vit": Family(ViTForImageClassification, ViTConfig, _VIT),
    "vit-headless": Family(ViTModel, ViTConfig, _VIT, has_head=False),
    "vit-no-qkv-bias": Family(ViTForImageClassification, ViTConfig, {**_VIT, "qkv_bias": False}),
    "deit": Family(
        DeiTForImageClassification, DeiTConfig, {**_VIT, "hidden_size": 48, "num_hidden_layers": 2}
    ),
    "deit-teacher": Family(DeiTForImageClassificationWithTeacher, DeiTConfig, _VIT),
    "dinov2": Family(Dinov2ForImageClassification, Dinov2Config, _DINO),
    "dinov2-headless": Family(Dinov2Model, Dinov2Config, _DINO, has_head=False),
    "dinov2-swiglu": Family(
        Dinov2ForImageClassification,
        Dinov2Config,
        {**_DINO, "use_swiglu_ffn": True, "num_attention_heads": 2},
    ),
    "dinov2-registers": Family(
        Dinov2WithRegistersForImageClassification,
        Dinov2WithRegistersConfig,
        {**_DINO, "num_register_tokens": 3, "num_hidden_layers": 4},
    ),
    "clip-vision": Family(CLIPVisionModel, CLIPVisionConfig, _CLIP, has_head=False),
    "clip-projection": Family(CLIPVisionModelWithProjection, CLIPVisionConfig, _CLIP),
    "clip": Family(CLIPModel, CLIPConfig, _CLIP),
}

FAMILIES = list(_TABLE)
FAMILIES_WITH_HEAD = [name for name, family in _TABLE.items() if family.has_head]
FAMILIES_WITHOUT_HEAD = [name for name, family in _TABLE.items() if not family.has_head]


def build(family: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A random model of `family` in evaluation mode; `overrides` change its configuration."""
    entry = _TABLE[family]
    settings = {**entry.settings, **overrides}
    if entry.has_head and family not in ("clip", "clip-projection"):
        settings.setdefault("num_labels", CLASSES)
    if entry.config is CLIPConfig:
        config = CLIPConfig(
            vision_config=settings, text_config=_CLIP_TEXT, projection_dim=PROJECTION
        )
    else:
        config = entry.config(**settings)
    model = entry.model(config).eval()
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter of `model` a value that shows in the output."""
    generator = torch.Generator().manual_seed(seed)

    def noise(parameter: Tensor, scale: float, around: float = 0.0) -> None:
        parameter.copy_(around + scale * torch.randn(parameter.shape, generator=generator))

    done: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            if isinstance(module, nn.LayerNorm) and name == "weight":
                noise(parameter, 0.3, around=1.0)
            elif name == "lambda1":  # layer scale
                noise(parameter, 0.2, around=0.7)
            elif isinstance(module, nn.Linear | nn.Conv2d) and name == "weight":
                noise(parameter, parameter[0].numel() ** -0.5)
            elif name == "bias":
                noise(parameter, 0.2)
            else:  # tokens and position embeddings
                noise(parameter, 0.5)


_MEAN_STD = {
    "imagenet": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    "clip": ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]),
    "half": ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5]),
}
_PROCESSORS = {  # model_type -> (processor class, crops, resample, mean and std)
    "vit": ("ViTImageProcessor", False, 2, "half"),
    "deit": ("DeiTImageProcessor", True, 3, "imagenet"),
    "dinov2": ("BitImageProcessor", True, 3, "imagenet"),
    "dinov2_with_registers": ("BitImageProcessor", True, 3, "imagenet"),
    "clip": ("CLIPImageProcessor", True, 3, "clip"),
    "clip_vision_model": ("CLIPImageProcessor", True, 3, "clip"),
}


def preprocessor_config(model: PreTrainedModel) -> dict:
    """The settings a checkpoint of this family is published with, for its own image size."""
    name, crops, resample, statistics = _PROCESSORS[model.config.model_type]
    mean, std = _MEAN_STD[statistics]
    height, width = image_size(model)
    exact = {"height": height, "width": width}
    settings = {
        "image_processor_type": name,
        "do_resize": True,
        "size": {"shortest_edge": max(height, width)} if crops else exact,
        "resample": resample,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": mean,
        "image_std": std,
    }
    if crops:
        settings |= {"do_center_crop": True, "crop_size": exact}
    if name != "ViTImageProcessor":
        settings["do_convert_rgb"] = True
    return settings


def save(model: PreTrainedModel, folder: Path | str) -> Path:
    """Write `model` as its users publish it: weights, configuration, preprocessing."""
    folder = Path(folder)
    model.save_pretrained(folder)
    text = json.dumps(preprocessor_config(model), indent=2)
    (folder / "preprocessor_config.json").write_text(text)
    return folder


def vision_config(model: PreTrainedModel) -> PreTrainedConfig:
    return getattr(model.config, "vision_config", model.config)


def image_size(model: PreTrainedModel) -> tuple[int, int]:
    size = vision_config(model).image_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def image_batch(
    model: PreTrainedModel, n: int, seed: int = 0, size: int | tuple[int, int] | None = None
) -> Tensor:
    """`n` random normalised images of the model's own size, or of `size`: (n, 3, H, W)."""
    size = (size, size) if isinstance(size, int) else size
    height, width = size or image_size(model)
    return torch.randn(n, 3, height, width, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def unmodified_base(model: PreTrainedModel, pixel_values: Tensor, **options) -> Tensor:
    """What the family's own head answers, by Hugging Face's own forward: (B, K)."""
    if isinstance(model, CLIPModel):
        return model.get_image_features(pixel_values, **options).pooler_output
    if isinstance(model, CLIPVisionModelWithProjection):
        return model(pixel_values, **options).image_embeds
    return model(pixel_values, **options).logits


@torch.no_grad()
def unmodified_class_token(model: PreTrainedModel, pixel_values: Tensor, **options) -> Tensor:
    """The class token after the final norm, by Hugging Face's own forward: (B, D)."""
    if isinstance(model, CLIPModel | CLIPVisionModelWithProjection):
        model = model.vision_model
    if isinstance(model, CLIPVisionModel):
        return model(pixel_values, **options).pooler_output
    return model.base_model(pixel_values, **options).last_hidden_state[:, 0]
