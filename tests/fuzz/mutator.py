"""Damage to bytes and to JSON, the same for the same seed."""

import copy
import json
import random
import struct
from collections.abc import Sequence
from typing import Any

# Where sizes, counts and signs go wrong.
NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
# What a value may be instead of itself, as JSON is written.
VALUES = (
    "null", "true", "0", "-1", "1e400", "-1e400", "1e-400", "NaN", "Infinity", "9" * 400, "0.1e5",
    str(2**31), str(2**63), str(-(2**63) - 1), '""', '"a"', '"\\u0000"', '"\\ud800"', '"é"', "[]",
    "{}", "[[]]", "[null]", '{"":0}', "[" * 300 + "]" * 300, '{"a":' * 300 + "0" + "}" * 300,
    json.dumps("x" * 3000), "[" + "0," * 2000 + "0]", '"../../etc/passwd"', '"a/b/c"', '"a@b@1"',
    '"multitask"', '"base"', '"sha256:' + "0" * 64 + '"', "3.0e38", "-0",
)  # fmt: skip


class Mutator:
    """A stream of damaged copies."""

    def __init__(self, seed: object) -> None:
        self.dice = random.Random(str(seed))

    # Bytes

    def damaged(self, data: bytes, others: Sequence[bytes] = ()) -> bytes:
        """`data` with one to four things wrong; the first bytes suffer most."""
        made = bytearray(data)
        for _ in range(self.dice.choice((1, 1, 1, 2, 4))):
            self._damage(made, others)
        return bytes(made)

    def _place(self, size: int) -> int:
        """Anywhere, and often near the beginning, where formats keep their sizes."""
        if self.dice.random() < 0.5:
            size = min(size, 128)
        return self.dice.randrange(size) if size else 0

    def _damage(self, made: bytearray, others: Sequence[bytes]) -> None:
        start = self._place(len(made))
        length = self.dice.choice((1, 1, 2, 4, 16, 256, 4096))
        how = self.dice.randrange(9)
        if how == 0 and made:
            made[start] ^= 1 << self.dice.randrange(8)
        elif how == 1:
            made[start : start + length] = self.dice.randbytes(min(length, 64))
        elif how == 2:
            form = self.dice.choice(("<I", ">I", "<H", ">H"))
            number = self.dice.choice(NUMBERS) & (0xFFFF if form[1] == "H" else 0xFFFFFFFF)
            made[start : start + struct.calcsize(form)] = struct.pack(form, number)
        elif how == 3:
            del made[start : start + length]
        elif how == 4:
            made[start:start] = made[start : start + length] * self.dice.choice((1, 2, 8))
        elif how == 5:
            made[start:start] = self.dice.randbytes(min(length, 64))
        elif how == 6:
            del made[start:]
        elif how == 7 and others:
            other = self.dice.choice(others)
            made[start:] = other[self._place(len(other)) :]
        else:
            byte = self.dice.choice((0, 0x20, 0x7F, 0xFF, self.dice.randrange(256)))
            made[start : start + length] = bytes([byte]) * length

    # JSON

    def damaged_json(self, document: Any) -> bytes:
        """The text of a document of which one to three parts are something else."""
        made = copy.deepcopy(document)
        marks: dict[str, str] = {}
        for _ in range(self.dice.choice((1, 1, 2, 3))):
            self._damage_part(made, marks)
        text = json.dumps(made)
        for mark, value in marks.items():
            text = text.replace(json.dumps(mark), value)
        data = text.encode("utf-8", "surrogatepass")
        return self.damaged(data) if self.dice.random() < 0.2 else data

    def _damage_part(self, document: Any, marks: dict[str, str]) -> None:
        """Put a mark, which text is put for later, somewhere in a list or an object."""
        inner = document
        while True:
            places = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not places:
                return
            place = self.dice.choice(places)
            if not isinstance(inner[place], list | dict) or self.dice.random() < 0.3:
                break
            inner = inner[place]
        how = self.dice.random()
        mark = f"mark-{len(marks)}"
        if how < 0.15:
            del inner[place]
        elif how < 0.3 and isinstance(inner, dict):
            inner[self.dice.choice(("x", "", "__class__", "name", "data", "é"))] = inner[place]
        elif how < 0.4 and isinstance(inner, list):
            inner[:] = inner * self.dice.choice((2, 40))
        else:
            marks[mark] = self.dice.choice(VALUES)
            inner[place] = mark
