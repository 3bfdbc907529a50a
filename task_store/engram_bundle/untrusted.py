"""Text from untrusted files: parse it strictly, and show it safely."""

import json
from typing import Any

from pydantic import ValidationError

from engram_bundle.errors import MalformedBundle

# How long a JSON parser takes for each mark, relative to a number: measured.
JSON_COSTS = {",": 1, "[": 5, "{": 5, ":": 5}
# Far more than the labels of any task need, and parsed in a fraction of a second.
MAX_JSON_COST = 500_000


def parse_json(text: str, *, what: str) -> dict[str, Any]:
    """Parse a JSON object; raise MalformedBundle for repeated keys, NaN or deep nesting."""
    # Checked before parsing, because a parser holds the interpreter lock until it is done.
    if sum(cost * text.count(mark) for mark, cost in JSON_COSTS.items()) > MAX_JSON_COST:
        raise MalformedBundle(
            f"{what} has more than {MAX_JSON_COST} JSON values; each list, object and member "
            f"counts as five."
        )
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except RecursionError:
        raise MalformedBundle(f"{what} is JSON nested too deeply to read.") from None
    except ValueError as error:
        raise MalformedBundle(f"{what} is not valid JSON: {printable(str(error), 120)}.") from None
    if not isinstance(value, dict):
        raise MalformedBundle(f"{what} must be a JSON object, not {type(value).__name__}.")
    return value


def printable(text: str, most: int = 60) -> str:
    """Escape and shorten text so that it is safe in a message or a terminal."""
    safe = ascii(text)[1:-1]
    return safe if len(safe) <= most else safe[: most - 1] + "…"


def first_error(error: ValidationError) -> tuple[str, str]:
    """Return where the first validation error is (`labels.2`) and its message."""
    first = error.errors(include_url=False, include_input=False)[0]
    # Without pydantic's names for the members of a union, such as `tuple[…]`.
    parts = (str(part) for part in first["loc"])
    where = ".".join(part for part in parts if "[" not in part and "constrained" not in part)
    return where, first["msg"].removeprefix("Value error, ")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key '{key}' appears twice")
        result[key] = value
    return result


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
