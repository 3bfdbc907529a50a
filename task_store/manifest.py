"""The manifest: everything about a task that is not a tensor, as strict JSON."""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    field_validator,
)

from task_store.errors import MalformedBundle
from task_store.limits import DEFAULT_LIMITS, Limits

FORMAT: Literal[1] = 1
# Far more than the labels of any task need, and parsed in a fraction of a second.
MAX_JSON_VALUES = 500_000
_MAX_KEYS = 64

ProblemType = Literal["single_label", "multi_label", "regression", "embedding"]
Placement = Literal["pre_norm", "post_norm"]
AdaptedMap = Literal["query", "output", "up", "down"]
Resample = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Label = Annotated[str, StringConstraints(min_length=1)]
Pixels = Annotated[int, Field(ge=1, le=65536)]

_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)")


class _Part(BaseModel):
    # Unknown keys are refused: a misspelt `extend` must not silently become "no parents".
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class PreprocessingSpec(_Part):
    """How an image becomes the backbone's input; docs/reference/bundle-format.md defines each step.

    Nothing has a default: a task trained with other values than the reader guesses would answer,
    and answer wrongly.
    """

    resize: tuple[Pixels, Pixels] | Pixels | None  # (height, width) exactly; int: shortest edge
    resample: Resample
    crop: tuple[Pixels, Pixels] | None  # centre crop (height, width)
    rescale: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @field_validator("std")
    @classmethod
    def _positive(cls, value: tuple[float, float, float]) -> tuple[float, float, float]:
        if min(value) <= 0:
            raise ValueError("every value must be above zero, because pixels are divided by it")
        return value

    @classmethod
    def of(cls, value: object) -> "PreprocessingSpec":
        """The spec from itself, a mapping, or any dataclass with the same fields."""
        if isinstance(value, cls):
            return value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            value = dataclasses.asdict(value)
        return cls.model_validate(value)

    def difference(self, other: "PreprocessingSpec") -> str | None:
        """The name of the first field in which the two disagree, or None.

        Floats are compared with a little room: 1/255 has been written with 7 digits and with 17.
        """
        for name in type(self).model_fields:
            if not _same(getattr(self, name), getattr(other, name)):
                return name
        return None


class BackboneRef(_Part):
    """The frozen model the task was trained on."""

    name: str = Field(min_length=1)
    fingerprint: Digest


class AdapterSpec(_Part):
    """Which maps of the task's row an adapter changes, and how much it can."""

    rank: int = Field(ge=1)
    maps: tuple[AdaptedMap, ...] = Field(min_length=1, max_length=len(get_args(AdaptedMap)))

    @field_validator("maps")
    @classmethod
    def _unique(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("the same map is named twice")
        return value


class KnownSpec(_Part):
    """How far from the middles of what it was made of a task's feature may lie.

    docs/reference/bundle-format.md has the formula.
    """

    threshold: float = Field(gt=0)


class Manifest(_Part):
    """Everything about a task that is not a tensor."""

    format: Literal[1] = FORMAT
    description: str = ""
    problem: ProblemType
    labels: tuple[Label, ...] = Field(default=(), fail_fast=True)
    placement: Placement = "pre_norm"
    adapter: AdapterSpec | None = None
    backbone: BackboneRef
    preprocessing: PreprocessingSpec
    extends: tuple[Digest, ...] = Field(default=(), fail_fast=True)
    # By what the head's weights and biases were divided, so that scores are calibrated.
    temperature: float | None = Field(default=None, gt=0)
    # The head reads a feature divided by its length, where `head.projection` maps it to.
    normalised: Literal[True] | None = None
    known: KnownSpec | None = None
    metrics: dict[str, float] = Field(default_factory=dict, fail_fast=True)
    training: dict[str, JsonValue] = Field(default_factory=dict)
    license: str | None = None
    # Never filled in by us: two exports of the same training must have the same digest.
    created: str | None = None

    @field_validator("extends")
    @classmethod
    def _unique(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) != len(value):
            raise ValueError("the same parent is named twice")
        return value

    @field_validator("created")
    @classmethod
    def _timestamp(cls, value: str | None) -> str | None:
        if value is not None:
            if not _TIMESTAMP.fullmatch(value):
                raise ValueError("must be an RFC 3339 time such as 2025-01-31T12:00:00Z")
            datetime.fromisoformat(value)
        return value

    def to_json(self) -> str:
        """Canonical text: sorted keys, no spaces, absent values left out."""
        values = {k: v for k, v in self.model_dump(mode="json").items() if v is not None}
        return json.dumps(
            values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )

    @classmethod
    def from_json(cls, text: str, limits: Limits = DEFAULT_LIMITS) -> "Manifest":
        """Read and check a manifest, or raise MalformedBundle."""
        loaded = loads_strictly(text, what="The manifest")
        parts = map(loaded.get, ("backbone", "preprocessing", "adapter", "known"))
        for part in (loaded, *parts):
            if isinstance(part, dict) and len(part) > _MAX_KEYS:
                # Each key that is not known would be an error of its own.
                raise MalformedBundle(f"The manifest has a part with {len(part)} keys.")
        try:
            manifest = cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise MalformedBundle(_first_problem(error)) from None
        manifest.check(limits)
        return manifest

    def check(self, limits: Limits = DEFAULT_LIMITS) -> None:
        """Refuse what is too long or not storable, with MalformedBundle."""
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
                    f"The manifest's {where} has {len(text)} characters, more than the {most} "
                    f"allowed: shorten it."
                )
        for where, count, most in (
            ("extends", len(self.extends), limits.max_parents),
            ("metrics", len(self.metrics), limits.max_metrics),
            ("labels", len(self.labels), limits.max_classes),
        ):
            if count > most:
                raise MalformedBundle(
                    f"The manifest's {where} has {count} entries, more than the {most} allowed."
                )
        _check_training(self.training, limits)
        try:
            self.to_json().encode()
        except UnicodeEncodeError:
            raise MalformedBundle(
                "The manifest has text that is not valid Unicode (a lone surrogate): replace it."
            ) from None


def loads_strictly(text: str, *, what: str) -> dict[str, Any]:
    """A JSON object with no repeated keys, NaN or absurd nesting, or MalformedBundle."""
    if text.count(",") + 5 * sum(map(text.count, "[{:")) > MAX_JSON_VALUES:
        # Before it is parsed: a parser lets nothing else in the process run.
        raise MalformedBundle(
            f"{what} has more than {MAX_JSON_VALUES} values, where lists, objects and members "
            f"count five."
        )
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except RecursionError:
        raise MalformedBundle(f"{what} is JSON nested too deeply to read.") from None
    except ValueError as error:
        raise MalformedBundle(f"{what} is not valid JSON: {shown(str(error), 120)}.") from None
    if not isinstance(value, dict):
        raise MalformedBundle(f"{what} must be a JSON object, not {type(value).__name__}.")
    return value


def shown(text: str, most: int = 60) -> str:
    """Text from a stranger's file, safe to put into a message or a terminal."""
    safe = ascii(text)[1:-1]
    return safe if len(safe) <= most else safe[: most - 1] + "…"


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key '{key}' appears twice")
        result[key] = value
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        # Python's reader let it pass; other languages' would not: half a surrogate pair.
        return f"The manifest is not valid JSON: {shown(reason, 200)}."
    more = error.error_count() - 1
    tail = f" (and {more} more like it)" if more else ""
    return f"The manifest's {shown(where)} is wrong: {shown(reason, 200)}{tail}."


def _check_training(training: Mapping[str, JsonValue], limits: Limits) -> None:
    """Bounded in depth and size and free of infinities, which JSON readers elsewhere refuse."""
    layer: list[JsonValue] = [dict(training)]
    for _ in range(limits.max_training_depth):
        nested = (value for value in layer if isinstance(value, dict | list))
        layer = [
            x for value in nested for x in (value.values() if isinstance(value, dict) else value)
        ]
    if layer:
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
            f"The manifest's training takes {size} bytes of JSON, more than the "
            f"{limits.max_training_bytes} allowed: keep the details elsewhere and link to them."
        )


def _same(a: object, b: object) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9)
    return a == b
