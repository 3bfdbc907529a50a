"""Configurations as they are on the hub, with Hugging Face's own image processors."""

from engram_server.model.preprocessing import Preprocessing
from engram_server.model.preprocessing.huggingface import from_huggingface
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

PROCESSORS = {
    "ViTImageProcessor": ViTImageProcessorPil,
    "DeiTImageProcessor": DeiTImageProcessorPil,
    "CLIPImageProcessor": CLIPImageProcessorPil,
    "BitImageProcessor": BitImageProcessorPil,
    "SiglipImageProcessor": SiglipImageProcessorPil,
}
# What is on the hub: a name, the class, and the keys of the file.
CONFIGS = {
    "vit": ("ViTImageProcessor", {}),
    "vit old": ("ViTImageProcessor", {"size": 224, "resample": 2, "image_mean": [0.5, 0.4, 0.3]}),
    "vit list": ("ViTImageProcessor", {"size": [96, 160], "resample": 1}),
    "vit timm": (
        "ViTImageProcessor",
        {
            "size": {"shortest_edge": 248},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": {"height": 224, "width": 224},
        },
    ),
    "vit nearest": ("ViTImageProcessor", {"size": {"height": 65, "width": 64}, "resample": 0}),
    "deit": ("DeiTImageProcessor", {}),
    "deit imagenet": (
        "DeiTImageProcessor",
        {
            "size": 438,
            "crop_size": 384,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
    ),
    "clip": ("CLIPImageProcessor", {}),
    "clip old": ("CLIPImageProcessor", {"size": 224, "crop_size": 224, "resample": 3}),
    "clip square": ("CLIPImageProcessor", {"size": 100, "default_to_square": True}),
    "clip smaller than crop": ("CLIPImageProcessor", {"size": 90, "crop_size": 101}),
    "clip crop only": ("CLIPImageProcessor", {"do_resize": False, "crop_size": [75, 50]}),
    "dinov2": (
        "BitImageProcessor",
        {
            "size": {"shortest_edge": 256},
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
        },
    ),
    "dinov2 518": ("BitImageProcessor", {"size": {"shortest_edge": 518}, "crop_size": 518}),
    "siglip": ("SiglipImageProcessor", {}),
    "siglip 384": ("SiglipImageProcessor", {"size": {"height": 384, "width": 384}, "resample": 3}),
    "siglip edge": ("SiglipImageProcessor", {"size": 96}),
    "bit box": ("BitImageProcessor", {"size": 61, "crop_size": 48, "resample": 4}),
    "bit hamming": ("BitImageProcessor", {"size": 61, "crop_size": 49, "resample": 5}),
}
SMALL = Preprocessing(
    resize=(24, 32), resample="bicubic", crop=None, rescale=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3
)
AS_IT_IS = Preprocessing(
    resize=None, resample="bicubic", crop=None, rescale=1 / 255, mean=(0.0,) * 3, std=(1.0,) * 3
)


def pair(name):
    """Our preprocessing and Hugging Face's processor of one configuration."""
    kind, keys = CONFIGS[name]
    ours = from_huggingface({"image_processor_type": kind, **keys})
    return ours, PROCESSORS[kind](**keys)
