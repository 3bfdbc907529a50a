"""Rotary positions: where a patch lies is told by turning its queries and keys.

A pair of numbers of a head is turned by an angle that grows with the height or the breadth at which
the patch lies, so a score depends on how far two patches are apart. Only patches lie somewhere:
prefix rows, rows of tasks and memory are not turned.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """The turns of all base rows of an image. Number i of a head is paired with i + d / 2."""

    cosines: Tensor  # (S, d); 1 for prefix rows
    sines: Tensor  # (S, d); 0 for prefix rows; the first half negated, as `turn` takes it

    @classmethod
    def of(cls, grid: tuple[int, int], prefix: int, head_width: int, base: float) -> "Rotary":
        """Patch centres from -1 to 1 in each direction, turned by `base`'s powers of a circle.

        A quarter of a head's numbers takes the first direction and a quarter the second; the other
        half is what they are paired with.
        """
        steps = torch.arange(head_width // 4, dtype=torch.float32) * 4 / head_width
        frequencies = base**-steps  # (d / 4,)
        rows, columns = ((torch.arange(n) + 0.5) * 2 / n - 1 for n in grid)
        centres = torch.cartesian_prod(rows, columns)  # (patches, 2)
        angles = (2 * math.pi * centres[:, :, None] * frequencies).flatten(1)  # (patches, d / 2)
        angles = torch.cat([torch.zeros(prefix, angles.shape[1]), angles])
        cosines, sines = angles.cos(), angles.sin()
        return cls(torch.cat([cosines, cosines], dim=1), torch.cat([-sines, sines], dim=1))

    def turn(self, rows: Tensor) -> Tensor:
        """Queries or keys (…, n, d) of the first n base rows of images."""
        count, width = rows.shape[-2:]
        swapped = rows.roll(width // 2, dims=-1)
        return torch.addcmul(rows * self.cosines[:count], swapped, self.sines[:count])
