"""Rotary position embedding: queries and keys of patches are rotated by the position of the patch.

Each pair of values of a head is rotated by an angle that grows with the row or the column of the
patch, so a score depends on the distance between two patches. Prefix tokens, task rows and memory
have no position and are not rotated.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotations of all base rows of an image. Value i of a head is paired with i + d / 2."""

    cosines: Tensor  # (S, d); 1 for prefix rows
    sines: Tensor  # (S, d); 0 for prefix rows; the first half is negated for `rotate`

    @classmethod
    def of(cls, grid: tuple[int, int], prefix: int, head_width: int, base: float) -> "Rotary":
        """Compute the rotations for patch centres from -1 to 1 in each direction.

        A quarter of a head's values encodes the row and a quarter the column; the other half is
        what they are paired with.
        """
        steps = torch.arange(head_width // 4, dtype=torch.float32) * 4 / head_width
        frequencies = base**-steps  # (d / 4,)
        rows, columns = ((torch.arange(n) + 0.5) * 2 / n - 1 for n in grid)
        centres = torch.cartesian_prod(rows, columns)  # (patches, 2)
        angles = (2 * math.pi * centres[:, :, None] * frequencies).flatten(1)  # (patches, d / 2)
        angles = torch.cat([torch.zeros(prefix, angles.shape[1]), angles])
        cosines, sines = angles.cos(), angles.sin()
        return cls(torch.cat([cosines, cosines], dim=1), torch.cat([-sines, sines], dim=1))

    def rotate(self, rows: Tensor) -> Tensor:
        """Rotate queries or keys (…, n, d) of the first n base rows of images."""
        count, width = rows.shape[-2:]
        swapped = rows.roll(width // 2, dims=-1)
        return torch.addcmul(rows * self.cosines[:count], swapped, self.sines[:count])
