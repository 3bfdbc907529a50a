"""Small pictures of examples, so that people can look at what a task was taught."""

import io
from typing import Final

import numpy as np
from PIL import Image

from engram_server.model.preprocessing.resizing import Pixels

LONGEST: Final = 96  # pixels
_QUALITY: Final = 75  # about 2 kB for a photo, 5 kB for noise; `BundleLimits` allows 16 kB


def encode_thumbnail(rgb: Pixels, size: tuple[int, int]) -> bytes:
    """Return a WebP file; `size` is that of the original, whose proportions it gets back.

    The same pixels give the same bytes.
    """
    scale = min(1.0, LONGEST / max(size))
    width, height = (max(1, round(edge * scale)) for edge in size)
    out = io.BytesIO()
    picture = Image.fromarray(np.ascontiguousarray(rgb))
    small = picture.resize((width, height), Image.Resampling.LANCZOS)
    small.save(out, "WEBP", quality=_QUALITY, method=4)
    return out.getvalue()
