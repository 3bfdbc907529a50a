"""Values of a JSON file, checked."""

from collections.abc import Sequence
from typing import TypeGuard

from server.errors import BackboneError


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object, length: int) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple) and len(value) == length


def edge(name: str, value: object) -> int:
    if is_int(value):
        return value
    raise BackboneError(f"{name} is {value!r}; its edges are whole numbers of pixels.")


def pair(name: str, value: object) -> tuple[int, int]:
    if _is_list(value, 2):
        return edge(name, value[0]), edge(name, value[1])
    raise BackboneError(f"{name} is {value!r}; it is a height and a width.")


def triple(name: str, value: object) -> tuple[float, float, float]:
    if _is_list(value, 3):
        return number(name, value[0]), number(name, value[1]), number(name, value[2])
    raise BackboneError(f"{name} is {value!r}; it has three numbers: red, green and blue.")


def number(name: str, value: object) -> float:
    if isinstance(value, float) or (is_int(value) and abs(value) < 2**64):
        return float(value)
    raise BackboneError(f"{name} is {value!r}; it is a number.")
