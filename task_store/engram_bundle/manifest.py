"""The manifest: everything about a task that is not a tensor, as strict JSON."""

import itertools
import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Literal, Self

import pydantic
from pydantic import AfterValidator, Field, JsonValue, ValidationError, model_validator

from engram_bundle.errors import InvalidName, MalformedBundle
from engram_bundle.limits import DEFAULT_LIMITS, BundleLimits
from engram_bundle.names import Digest, check_task_name
from engram_bundle.preprocessing import PreprocessingSpec
from engram_bundle.schema import LoraTarget, Placement, TaskType
from engram_bundle.untrusted import first_error, parse_json, printable

FORMAT: Literal[1] = 1
_MAX_KEYS = 64
_OBJECTS = ("backbone", "preprocessing", "lora", "ood", "drift", "taught")

LayerIndex = Annotated[int, Field(ge=0)]
Label = Annotated[str, pydantic.StringConstraints(min_length=1)]

_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)")


def _unique(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) != len(values):
        raise ValueError("the same value is listed twice")
    return values


def _ascending(values: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if values is not None and any(one >= other for one, other in itertools.pairwise(values)):
        raise ValueError("the layers must be ascending and unique")
    return values


class _Part(pydantic.BaseModel):
    # Unknown keys are rejected: a misspelt `extend` must not silently mean "no parents".
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BackboneRef(_Part):
    """The frozen model that the task was trained on."""

    name: str = Field(min_length=1)
    fingerprint: Digest


class LoraSpec(_Part):
    """The rank of the LoRA on the task row, and the projections that it changes."""

    rank: int = Field(ge=1)
    targets: Annotated[tuple[LoraTarget, ...], AfterValidator(_unique)] = Field(min_length=1)


_Limit = Annotated[float | None, Field(gt=0, exclude_if=lambda value: value is None)]


class OodSpec(_Part):
    """Limits up to which an image counts as in distribution.

    docs/reference/bundle-format.md has the formulas.
    """

    threshold: _Limit = None  # on the distance
    angle: _Limit = None
    softness: _Limit = None

    @model_validator(mode="after")
    def _check_one_limit(self) -> Self:
        if self.threshold is None and self.angle is None:
            raise ValueError("needs threshold, angle or both")
        return self


class DriftSpec(_Part):
    """Marks the reference statistics of the training images, the tensors `drift.*`."""

    images: int = Field(ge=1)  # that they were computed from
    # Of the out-of-distribution scores of the training images; absent without a detector.
    score_mean: float | None = Field(default=None, exclude_if=lambda value: value is None)
    score_deviation: _Limit = None

    @model_validator(mode="after")
    def _check_both(self) -> Self:
        if (self.score_mean is None) != (self.score_deviation is None):
            raise ValueError("needs score_mean and score_deviation, or none of them")
        return self


class TaughtSpec(_Part):
    """Marks a head that was solved from examples or class names, and can be solved again."""

    templates: tuple[str, ...] = ()  # prompt templates for class names, {} for the name


class Manifest(_Part):
    format: Literal[1] = FORMAT
    name: str | None = None  # of the task; a server may publish it under another one
    description: str = ""
    task_type: TaskType
    labels: tuple[Label, ...] = Field(default=(), fail_fast=True)
    placement: Placement = "pre_norm"
    lora: LoraSpec | None = None
    backbone: BackboneRef
    preprocessing: PreprocessingSpec
    extends: Annotated[tuple[Digest, ...], AfterValidator(_unique)] = Field(
        default=(), fail_fast=True
    )
    # The calibration temperature. The head's weights and biases are already divided by it.
    temperature: float | None = Field(default=None, gt=0)
    # The head reads features divided by their length, measured after `head.projection`.
    normalised: Literal[True] | None = None
    # The layers whose summary the head also reads, with `layers.weight`.
    layers: Annotated[tuple[LayerIndex, ...] | None, AfterValidator(_ascending)] = Field(
        default=None, min_length=1
    )
    ood: OodSpec | None = None
    drift: DriftSpec | None = None
    taught: TaughtSpec | None = None
    metrics: dict[str, float] = Field(default_factory=dict, fail_fast=True)
    training: dict[str, JsonValue] = Field(default_factory=dict)
    license: str | None = None
    # Only set by authors: two exports of the same training must have the same digest.
    created: str | None = None

    @pydantic.field_validator("name")
    @classmethod
    def _check_name(cls, value: str | None) -> str | None:
        try:
            return None if value is None else check_task_name(value)
        except InvalidName as error:
            raise ValueError(str(error)) from None

    @pydantic.field_validator("created")
    @classmethod
    def _check_timestamp(cls, value: str | None) -> str | None:
        if value is not None:
            if not _TIMESTAMP.fullmatch(value):
                raise ValueError("must be an RFC 3339 time such as 2025-01-31T12:00:00Z")
            datetime.fromisoformat(value)
        return value

    def to_json(self) -> str:
        """Write canonical JSON: sorted keys, no spaces, no absent values."""
        values = {k: v for k, v in self.model_dump(mode="json").items() if v is not None}
        return json.dumps(
            values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )

    @classmethod
    def from_json(cls, text: str, limits: BundleLimits = DEFAULT_LIMITS) -> "Manifest":
        """Read and check a manifest, or raise MalformedBundle."""
        loaded = parse_json(text, what="The manifest")
        for part in (loaded, *map(loaded.get, _OBJECTS)):
            if isinstance(part, dict) and len(part) > _MAX_KEYS:
                # pydantic would report each unknown key as a separate error.
                raise MalformedBundle(
                    f"The manifest has an object with {len(part)} keys; at most {_MAX_KEYS} are "
                    f"allowed."
                )
        try:
            manifest = cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise MalformedBundle(_describe(error)) from None
        manifest.check(limits)
        return manifest

    def check(self, limits: BundleLimits = DEFAULT_LIMITS) -> None:
        """Raise MalformedBundle for text or lists beyond the limits, and for invalid Unicode."""
        texts: list[tuple[str, str, int]] = [
            ("description", self.description, limits.max_description_chars),
            ("license", self.license or "", limits.max_text_chars),
            ("backbone.name", self.backbone.name, limits.max_text_chars),
            *((f"labels.{i}", x, limits.max_label_chars) for i, x in enumerate(self.labels)),
            *(("metrics", name, limits.max_text_chars) for name in self.metrics),
        ]
        for where, text, most in texts:
            if len(text) > most:
                raise MalformedBundle(
                    f"The manifest's {where} has {len(text)} characters; at most {most} are "
                    f"allowed."
                )
        for where, count, most in (
            ("extends", len(self.extends), limits.max_parents),
            ("metrics", len(self.metrics), limits.max_metrics),
            ("labels", len(self.labels), limits.max_classes),
            ("layers", len(self.layers or ()), limits.max_layers),
        ):
            if count > most:
                raise MalformedBundle(
                    f"The manifest's {where} has {count} entries; at most {most} are allowed."
                )
        _check_training(self.training, limits)
        try:
            self.to_json().encode()
        except UnicodeEncodeError:
            raise MalformedBundle(
                "The manifest has text that is not valid Unicode (a lone surrogate): replace it."
            ) from None


def _describe(error: ValidationError) -> str:
    where, reason = first_error(error)
    if not where:
        # Python's parser accepts half a surrogate pair; parsers of other languages do not.
        return f"The manifest is not valid JSON: {printable(reason, 200)}."
    more = error.error_count() - 1
    tail = f" (and {more} more)" if more else ""
    return f"The manifest's {printable(where)} is invalid: {printable(reason, 200)}{tail}."


def _check_training(training: Mapping[str, JsonValue], limits: BundleLimits) -> None:
    """Bound depth and size, and reject infinities, which other JSON parsers reject."""
    level: list[JsonValue] = [dict(training)]
    for _ in range(limits.max_training_depth):
        nested = (value for value in level if isinstance(value, dict | list))
        level = [
            x for value in nested for x in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise MalformedBundle(
            f"The manifest's training is nested deeper than {limits.max_training_depth} "
            f"levels: flatten it."
        )
    try:
        size = len(json.dumps(training, allow_nan=False))
    except ValueError:
        raise MalformedBundle("The manifest's training has a number that is not finite.") from None
    if size > limits.max_training_bytes:
        raise MalformedBundle(
            f"The manifest's training takes {size} bytes of JSON; at most "
            f"{limits.max_training_bytes} are allowed: store the details elsewhere and link to "
            f"them."
        )
