"""Heads from class names: the text tower that was trained beside a vision tower, run once.

A model such as CLIP answers how well a text fits an image by the cosine between two embeddings,
times a scale, plus a bias where it has one (SigLIP). The text's side depends on no image, so it is
a head; the image's side is what `TaskWeights.normalised` heads read. Nothing of the text tower is
needed afterwards.

Shapes: K classes, D width, E the width of the space shared with texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig
from transformers.utils.hub import cached_file

from server.errors import BrokenCheckpoint, NoTextTower, UnteachableExamples
from server.model.examples import TaughtProblem
from server.model.families.loading import quiet_transformers
from server.model.families.mapped import stored_dtype
from server.model.text_head import TextHead

PLAIN_TEMPLATE: Final = "{}"
_VISION: Final = "vision_model"  # where these models have the tower that is served
_BATCH: Final = 64  # texts of a run
_SHOWN: Final = 60
_VOCABULARIES: Final = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class TextFamily:
    """How the models of one `model_type` read texts, and what their scores mean."""

    model: str  # class in transformers, with get_text_features() and logit_scale
    padding: str  # as it was trained: to the longest text, or always to the most it reads
    problem: TaughtProblem


# By Hugging Face's `model_type`.
TEXT_FAMILIES: Final[Mapping[str, TextFamily]] = {
    "clip": TextFamily("CLIPModel", "longest", "single_label"),
    "metaclip_2": TextFamily("MetaClip2Model", "longest", "single_label"),
    # Trained by one sigmoid for each pair of an image and a text.
    "siglip": TextFamily("SiglipModel", "max_length", "multi_label"),
}


@dataclass(frozen=True, slots=True)
class TextTower:
    """A model's text tower, which is in memory only while it reads."""

    name: str  # the folder, or the name on the hub
    family: TextFamily

    @property
    def problem(self) -> TaughtProblem:
        return self.family.problem

    def read(self, classes: Sequence[str], templates: Sequence[str] = ()) -> TextHead:
        """A head of class names; the embeddings of all templates of a name are averaged.

        Raises UnteachableExamples where names or templates cannot be read.
        """
        templates = tuple(templates) or (PLAIN_TEMPLATE,)
        _check(classes, templates)
        return _text_head(self.name, self.family, classes, templates)


def open_text_tower(name_or_folder: str | Path) -> TextTower | None:
    """None where the folder or name has no text tower. Reads the configuration alone."""
    try:
        config = AutoConfig.from_pretrained(str(name_or_folder))
    except (OSError, ValueError, KeyError):
        return None
    family = TEXT_FAMILIES.get(config.model_type)
    if family is None or family.model not in (config.architectures or ()):
        return None
    return TextTower(str(name_or_folder), family)


def no_text_tower(backbone: str) -> NoTextTower:
    return NoTextTower(
        f"the backbone '{backbone}' has no text tower, so it reads no names of classes: give "
        f"photos, or use a whole model of {', '.join(sorted(TEXT_FAMILIES))}"
    )


def _text_head(
    name: str, family: TextFamily, classes: Sequence[str], templates: tuple[str, ...]
) -> TextHead:
    tokenizer, model = _read(name, family)
    prompts = [template.replace("{}", one) for one in classes for template in templates]
    embedded = _embed(model, tokenizer, family, prompts)  # (K · templates, E)
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


def _check(classes: Sequence[str], templates: Sequence[str]) -> None:
    if len(set(classes)) != len(classes):
        twice = next(one for one in classes if list(classes).count(one) > 1)
        raise UnteachableExamples(f"the class '{twice[:_SHOWN]}' is named twice")
    if not all(one.strip() for one in classes):
        raise UnteachableExamples("a class has no name")
    for template in templates:
        if "{}" not in template:
            raise UnteachableExamples(
                f"the template '{template[:_SHOWN]}' has no place for the name of a class; write "
                f"{{}} there"
            )


def _read(name: str, family: TextFamily) -> tuple[Any, Any]:
    """The tokenizer and the whole model of a folder; what reads texts is in float32."""
    if not any(_has(name, file) for file in _VOCABULARIES):
        # Transformers would make up an empty one.
        raise NoTextTower(
            f"{name}: there is no tokenizer ({', '.join(_VOCABULARIES)}), so texts cannot be read; "
            f"copy it from where the model came from"
        )
    try:
        # Found by name only now: a server that reads no names need not import tokenizers.
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise NoTextTower(
            f"{name}: the tokenizer of the text tower cannot be read, so texts cannot be: {reason}"
        ) from error
    model_class: Any = getattr(transformers, family.model)
    try:
        with quiet_transformers():
            model, loading = model_class.from_pretrained(
                name, output_loading_info=True, dtype=stored_dtype(name)
            )
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise BrokenCheckpoint(f"{name}: the weights cannot be loaded: {reason}") from error
    missing = sorted(key for key in loading["missing_keys"] if not key.startswith(f"{_VISION}."))
    if missing:
        raise BrokenCheckpoint(
            f"{name}: {len(missing)} weights of the text tower are missing from the checkpoint: "
            f"{', '.join(missing[:3])}"
        )
    for part, module in model.named_children():
        if part != _VISION:  # whose pages are mapped and never read
            module.float()
    return tokenizer, model.eval()


def _has(name: str, file: str) -> bool:
    try:
        return cached_file(name, file, _raise_exceptions_for_missing_entries=False) is not None
    except OSError:
        return False


@torch.no_grad()
def _embed(
    model: Any,  # noqa: ANN401 - of transformers
    tokenizer: Any,  # noqa: ANN401
    family: TextFamily,
    texts: Sequence[str],
) -> Tensor:
    """Unit vectors (n, E), in float64."""
    most = model.config.text_config.max_position_embeddings
    rows = []
    for start in range(0, len(texts), _BATCH):
        chunk = list(texts[start : start + _BATCH])
        longest, text = max((len(ids), text) for text, ids in _tokens(tokenizer, chunk))
        if longest > most:
            raise UnteachableExamples(
                f"'{text[:_SHOWN]}' has {longest} tokens, and the text tower reads {most}; shorten "
                f"it"
            )
        tokens = tokenizer(chunk, padding=family.padding, max_length=most, return_tensors="pt")
        features = model.get_text_features(**tokens).pooler_output.double()
        rows.append(features / features.norm(dim=-1, keepdim=True))
    return torch.cat(rows)


def _tokens(tokenizer: Any, texts: list[str]) -> list[tuple[str, list[int]]]:  # noqa: ANN401
    return list(zip(texts, tokenizer(texts)["input_ids"], strict=True))
