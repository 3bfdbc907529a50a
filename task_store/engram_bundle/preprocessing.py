"""Preprocessing: how an image becomes the backbone's input."""

import dataclasses
import math
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from engram_bundle.schema import Resample

MAX_EDGE = 4096
Edge = Annotated[int, Field(ge=1, le=MAX_EDGE, strict=True)]
Positive = Annotated[float, Field(gt=0)]

# Revalidating turns the model's subclass, which also runs the steps, into this class.
_CONFIG = ConfigDict(extra="forbid", allow_inf_nan=False, revalidate_instances="subclass-instances")


@dataclass(frozen=True, slots=True, config=_CONFIG)
class PreprocessingSpec:
    """The six values that define preprocessing; docs/reference/bundle-format.md defines each step.

    There are no defaults: a task that was trained with other values than the reader assumes would
    give wrong answers without any error.
    """

    resize: tuple[Edge, Edge] | Edge | None  # (height, width) exactly; int: shortest edge
    resample: Resample
    crop: tuple[Edge, Edge] | None  # centre crop (height, width), black around smaller images
    rescale: Positive  # usually 1/255
    mean: tuple[float, float, float]
    std: tuple[Positive, Positive, Positive]

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; equal preprocessing gives equal dictionaries."""
        values: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return values

    def difference(self, other: "PreprocessingSpec") -> str | None:
        """Return the name of the first field that differs, or None."""
        for field in dataclasses.fields(PreprocessingSpec):
            if not _is_close(getattr(self, field.name), getattr(other, field.name)):
                return field.name
        return None


_ADAPTER = TypeAdapter(PreprocessingSpec)


def _is_close(a: object, b: object) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_is_close(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        # Some writers store 1/255 with 7 digits.
        return math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-9)
    return a == b
