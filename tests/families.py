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
    DINOv3ViTConfig,
    DINOv3ViTModel,
    IJepaConfig,
    IJepaForImageClassification,
    IJepaModel,
    MetaClip2Config,
    MetaClip2Model,
    MetaClip2VisionConfig,
    MetaClip2VisionModel,
    PreTrainedConfig,
    PreTrainedModel,
    RadioConfig,
    RadioModel,
    SiglipConfig,
    SiglipForImageClassification,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    Tipsv2Config,
    Tipsv2Model,
    Tipsv2VisionConfig,
    Tipsv2VisionModel,
    ViTConfig,
    ViTForImageClassification,
    ViTMAEConfig,
    ViTMAEForPreTraining,
    ViTMAEModel,
    ViTModel,
)

CLASSES = 7
_WITH_TEXT = (CLIPConfig, MetaClip2Config, SiglipConfig, Tipsv2Config)
GEOMETRY = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
IMAGE = {"image_size": 32, "patch_size": 8}
PROJECTION = 20

_VIT = {**GEOMETRY, **IMAGE, "intermediate_size": 64}
_DINO = {**GEOMETRY, **IMAGE, "mlp_ratio": 2}
_DINO3 = {**_VIT, "num_register_tokens": 2}
_CLIP = {**_VIT, "projection_dim": PROJECTION}
_MAE = {**_VIT, "mask_ratio": 0.0}  # as it is served: with all patches
_RADIO = {**_DINO, "mlp_ratio": 2.0, "num_cls_tokens": 2, "num_registers": 3, "max_img_size": 64}
_TEXT = {
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

    @property
    def classifies(self) -> bool:
        """Whether its head has labels; another's is an embedding."""
        return "ForImageClassification" in self.model.__name__


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
    "dinov3": Family(DINOv3ViTModel, DINOv3ViTConfig, _DINO3, has_head=False),
    "dinov3-gated": Family(
        DINOv3ViTModel,
        DINOv3ViTConfig,
        {
            **_VIT,
            "use_gated_mlp": True,
            "hidden_act": "silu",
            "num_register_tokens": 0,
            "num_attention_heads": 2,
            "key_bias": True,
        },
        has_head=False,
    ),
    "clip-vision": Family(CLIPVisionModel, CLIPVisionConfig, _CLIP, has_head=False),
    "clip-projection": Family(CLIPVisionModelWithProjection, CLIPVisionConfig, _CLIP),
    "clip": Family(CLIPModel, CLIPConfig, _CLIP),
    "metaclip2": Family(MetaClip2Model, MetaClip2Config, _CLIP),
    "metaclip2-vision": Family(MetaClip2VisionModel, MetaClip2VisionConfig, _CLIP, has_head=False),
    "siglip-vision": Family(SiglipVisionModel, SiglipVisionConfig, _VIT),
    "siglip-mean": Family(
        SiglipVisionModel, SiglipVisionConfig, {**_VIT, "vision_use_head": False}, has_head=False
    ),
    "siglip": Family(SiglipModel, SiglipConfig, {**_VIT, "hidden_act": "gelu_pytorch_tanh"}),
    "siglip-classes": Family(SiglipForImageClassification, SiglipConfig, _VIT),
    "tips": Family(Tipsv2Model, Tipsv2Config, _DINO),
    "tips-vision": Family(
        Tipsv2VisionModel,
        Tipsv2VisionConfig,
        {**_DINO, "use_swiglu_ffn": True, "num_register_tokens": 2},
        has_head=False,
    ),
    "ijepa": Family(IJepaForImageClassification, IJepaConfig, _VIT),
    "ijepa-headless": Family(IJepaModel, IJepaConfig, _VIT, has_head=False),
    "mae": Family(ViTMAEModel, ViTMAEConfig, _MAE, has_head=False),
    "mae-decoder": Family(
        ViTMAEForPreTraining,
        ViTMAEConfig,
        {**_MAE, "decoder_num_hidden_layers": 1, "decoder_hidden_size": 32},
        has_head=False,
    ),
    "radio": Family(RadioModel, RadioConfig, _RADIO, has_head=False),
}

FAMILIES = list(_TABLE)
# Of these the others differ in nothing that tasks meet: in names, or in what a head reads.
_SAME = ("metaclip2", "siglip-", "tips", "ijepa-", "mae")
KINDS = [name for name in FAMILIES if not name.startswith(_SAME)]
FAMILIES_WITH_HEAD = [name for name, family in _TABLE.items() if family.has_head]
FAMILIES_WITHOUT_HEAD = [name for name, family in _TABLE.items() if not family.has_head]
CLASSIFIERS = [name for name, family in _TABLE.items() if family.classifies]


def build(family: str, seed: int = 0, **overrides) -> PreTrainedModel:
    """A random model of `family` in evaluation mode; `overrides` change its configuration."""
    entry = _TABLE[family]
    settings = {**entry.settings, **overrides}
    labels = {"num_labels": CLASSES} if entry.classifies else {}
    if entry.config in _WITH_TEXT:
        towers = {"vision_config": settings, "text_config": _TEXT}
        config = entry.config(**towers, projection_dim=PROJECTION, **labels)
    else:
        config = entry.config(**settings, **labels)
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
    "dinov3_vit": ("DINOv3ViTImageProcessor", False, 2, "imagenet"),
    "clip": ("CLIPImageProcessor", True, 3, "clip"),
    "clip_vision_model": ("CLIPImageProcessor", True, 3, "clip"),
    "metaclip_2": ("CLIPImageProcessor", True, 3, "clip"),
    "metaclip_2_vision_model": ("CLIPImageProcessor", True, 3, "clip"),
    "siglip": ("SiglipImageProcessor", False, 3, "half"),
    "siglip_vision_model": ("SiglipImageProcessor", False, 3, "half"),
    "tipsv2": ("Tipsv2ImageProcessor", False, 2, None),
    "tipsv2_vision_model": ("Tipsv2ImageProcessor", False, 2, None),
    "ijepa": ("ViTImageProcessor", False, 2, "half"),
    "vit_mae": ("ViTImageProcessor", False, 2, "imagenet"),
    "radio": ("CLIPImageProcessor", True, 3, None),  # the model itself does it
}
# These interpolate positions by default; the others need an argument.
_INTERPOLATING = ("dinov2", "dinov3", "tipsv2", "radio")


def preprocessor_config(model: PreTrainedModel) -> dict:
    """The settings a checkpoint of this family is published with, for its own image size."""
    name, crops, resample, statistics = _PROCESSORS[model.config.model_type]
    mean, std = _MEAN_STD[statistics or "half"]
    height, width = image_size(model)
    exact = {"height": height, "width": width}
    settings = {
        "image_processor_type": name,
        "do_resize": True,
        "size": {"shortest_edge": max(height, width)} if crops else exact,
        "resample": resample,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": statistics is not None,
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


def trunk_of(model: PreTrainedModel) -> PreTrainedModel:
    """The vision tower without any head."""
    if isinstance(model, DINOv3ViTModel | RadioModel):  # what they call base model is a part of it
        return model
    return getattr(model, "vision_model", model.base_model)


def interpolating(model: PreTrainedModel) -> dict:
    """The arguments with which its forward accepts an image of another size."""
    needs_argument = not model.config.model_type.startswith(_INTERPOLATING)
    return {"interpolate_pos_encoding": True} if needs_argument else {}


@torch.no_grad()
def unmodified_base(model: PreTrainedModel, pixel_values: Tensor, **options) -> Tensor:
    """What the family's own head answers, by Hugging Face's own forward: (B, K)."""
    if hasattr(model, "get_image_features"):
        return model.get_image_features(pixel_values, **options).pooler_output
    if isinstance(model, CLIPVisionModelWithProjection):
        return model(pixel_values, **options).image_embeds
    if isinstance(model, SiglipVisionModel):
        return model(pixel_values, **options).pooler_output
    return model(pixel_values, **options).logits


@torch.no_grad()
def unmodified_feature(model: PreTrainedModel, pixel_values: Tensor, **options) -> Tensor:
    """What a head-only task reads, by Hugging Face's own forward: (B, D)."""
    trunk = trunk_of(model)
    done = trunk(pixel_values, **options)
    if isinstance(trunk, IJepaModel) or getattr(trunk, "use_head", True) is False:
        return done.last_hidden_state.mean(dim=1)
    if isinstance(trunk, CLIPVisionModel | MetaClip2VisionModel | SiglipVisionModel):
        return done.pooler_output
    return done.last_hidden_state[:, 0]
