"""Small pictures of examples, so that people can look at what a task was taught."""

import io
from typing import Final

from PIL import Image

LONGEST: Final = 96  # pixels
_QUALITY: Final = 75
_LOWEST_QUALITY: Final = 20
_MOST_BYTES: Final = 16 * 1024  # as in `BundleLimits`


def encode_thumbnail(rgb: Image.Image, size: tuple[int, int]) -> bytes:
    """Return a WebP file; `size` is that of the original, whose proportions it gets back.

    The same pixels give the same bytes.
    """
    scale = min(1.0, LONGEST / max(size))
    width, height = (max(1, round(edge * scale)) for edge in size)
    small = rgb.resize((width, height), Image.Resampling.LANCZOS)
    data = _saved(small, _QUALITY)
    return data if len(data) <= _MOST_BYTES else _saved(small, _LOWEST_QUALITY)


def _saved(image: Image.Image, quality: int) -> bytes:
    out = io.BytesIO()
    image.save(out, "WEBP", quality=quality, method=4)
    return out.getvalue()
