"""Zero-shot heads: the text tower of models like CLIP turns class names into a head, once.

CLIP scores a text and an image by the cosine of their embeddings, times a scale, plus a bias in
SigLIP. The text embedding does not depend on the image, so it is a head that reads normalised
features (`TaskWeights.normalised`). Serving the head does not need the text tower.

Shapes: K classes, D width, E the width of the space shared by images and texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from engram_bundle.schema import LabelledTaskType
from torch import Tensor
from transformers import AutoConfig

from engram_server.errors import NoTextTower, UnteachableExamples
from engram_server.model.families.hub import find_file, split_revision
from engram_server.model.families.loading import load_model
from engram_server.model.heads.text_head import TextHead

PLAIN_TEMPLATE: Final = "{}"
_VISION: Final = "vision_model"  # the path of the vision tower in these models
_BATCH: Final = 64  # texts per forward pass
_SHOWN: Final = 60
_VOCABULARIES: Final = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class TextFamily:
    """How models of one `model_type` read texts, and the task type of their scores."""

    model: str  # class in transformers, with get_text_features() and logit_scale
    padding: str  # as in training: to the longest text, or to the maximum length
    task_type: LabelledTaskType


# By Hugging Face's `model_type`.
TEXT_FAMILIES: Final[Mapping[str, TextFamily]] = {
    "clip": TextFamily("CLIPModel", "longest", "single_label"),
    "metaclip_2": TextFamily("MetaClip2Model", "longest", "single_label"),
    # Trained with a sigmoid per (image, text) pair.
    "siglip": TextFamily("SiglipModel", "max_length", "multi_label"),
}


@dataclass(frozen=True, slots=True)
class TextTower:
    """The text tower of a model, loaded only while it reads texts."""

    name: str  # the folder, or the name on the hub
    family: TextFamily

    @property
    def task_type(self) -> LabelledTaskType:
        return self.family.task_type

    def read(self, classes: Sequence[str], templates: Sequence[str] = ()) -> TextHead:
        """Compute a head from class names, averaged over the templates.

        Raises UnteachableExamples if a name or a template is not valid.
        """
        templates = tuple(templates) or (PLAIN_TEMPLATE,)
        _check(classes, templates)
        tokenizer, model = _read(self.name, self.family)
        prompts = [template.replace("{}", one) for one in classes for template in templates]
        embedded = _embed(model, tokenizer, self.family, prompts)  # (K · templates, E)
        means = embedded.view(len(classes), len(templates), -1).mean(dim=1)
        units = means / means.norm(dim=-1, keepdim=True)
        scale, bias = model.logit_scale.detach().double().exp(), getattr(model, "logit_bias", None)
        projection = getattr(model, "visual_projection", None)
        weight = scale * units
        if projection is not None:
            weight = weight @ projection.weight.detach().double()
        return TextHead(
            labels=tuple(classes),
            weight=weight.float().numpy(),
            bias=None if bias is None else np.full(len(classes), bias.item(), np.float32),
            projection=None if projection is None else projection.weight.detach().float().numpy(),
            templates=templates,
        )


def open_text_tower(name_or_folder: str | Path) -> TextTower | None:
    """Return the text tower of a model, or None if it has none; reads only the configuration."""
    repository, revision = split_revision(str(name_or_folder))
    try:
        config = AutoConfig.from_pretrained(repository, revision=revision)
    except (OSError, ValueError, KeyError):
        return None
    family = TEXT_FAMILIES.get(config.model_type)
    if family is None or family.model not in (config.architectures or ()):
        return None
    return TextTower(str(name_or_folder), family)


def no_text_tower(backbone: str) -> NoTextTower:
    return NoTextTower(
        f"Backbone '{backbone}' has no text tower and cannot read class names. Add images, or use "
        f"a complete {', '.join(sorted(TEXT_FAMILIES))} model."
    )


def _check(classes: Sequence[str], templates: Sequence[str]) -> None:
    if len(set(classes)) != len(classes):
        twice = next(one for one in classes if list(classes).count(one) > 1)
        raise UnteachableExamples(f"Class '{twice[:_SHOWN]}' is listed twice. Remove one.")
    if not all(one.strip() for one in classes):
        raise UnteachableExamples("A class name is empty. Name every class.")
    for template in templates:
        if "{}" not in template:
            raise UnteachableExamples(
                f"Template '{template[:_SHOWN]}' has no placeholder for the class name. Write {{}} "
                f"where the name belongs."
            )


def _read(name: str, family: TextFamily) -> tuple[Any, Any]:
    """Load the tokenizer and the model, with the text tower in float32."""
    if not any(_has(name, file) for file in _VOCABULARIES):
        # transformers would create an empty one.
        raise NoTextTower(
            f"{name}: no tokenizer found ({', '.join(_VOCABULARIES)}). Copy it from the original "
            f"model."
        )
    try:
        # A lazy attribute: a server that reads no class names never imports tokenizers.
        repository, revision = split_revision(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(repository, revision=revision)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise NoTextTower(
            f"{name}: cannot load the tokenizer of the text tower: {reason}"
        ) from error
    model = load_model(name, family.model, unused=(f"{_VISION}.",))
    for part, module in model.named_children():
        if part != _VISION:  # mapped and never read
            module.float()
    return tokenizer, model


def _has(name: str, file: str) -> bool:
    try:
        return find_file(name, file) is not None
    except OSError:
        return False


@torch.no_grad()
def _embed(
    model: Any,  # noqa: ANN401 - from transformers
    tokenizer: Any,  # noqa: ANN401
    family: TextFamily,
    texts: Sequence[str],
) -> Tensor:
    """Embed texts as unit vectors (n, E), in float64."""
    most = model.config.text_config.max_position_embeddings
    rows = []
    for start in range(0, len(texts), _BATCH):
        chunk = list(texts[start : start + _BATCH])
        lengths = [len(ids) for ids in tokenizer(chunk)["input_ids"]]
        longest, text = max(zip(lengths, chunk, strict=True))
        if longest > most:
            raise UnteachableExamples(
                f"'{text[:_SHOWN]}' has {longest} tokens; the text tower reads at most {most}. "
                f"Shorten it."
            )
        tokens = tokenizer(chunk, padding=family.padding, max_length=most, return_tensors="pt")
        features = model.get_text_features(**tokens).pooler_output.double()
        rows.append(features / features.norm(dim=-1, keepdim=True))
    return torch.cat(rows)
