"""File names and thumbnails of examples, as two tensors of a bundle.

`media.sizes` has the bytes of the name and of the thumbnail of each example, and `media.data` has
the names (UTF-8) and thumbnails (WebP) themselves, in turn and without holes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engram_bundle.errors import MalformedBundle
from engram_bundle.limits import BundleLimits

_SIZE: Final = "<u4"
_WEBP_HEADER: Final = 12  # RIFF, the length of what follows these eight bytes, WEBP


class Media(NamedTuple):
    """The file name and the WebP thumbnail of an example; empty if they are not kept."""

    name: str = ""
    thumbnail: bytes = b""

    @property
    def size(self) -> int:
        return len(self.name.encode()) + len(self.thumbnail)


NO_MEDIA: Final = Media()


def pack_media(media: Sequence[Media]) -> dict[str, NDArray[np.uint8]]:
    """Return the tensors; none if all names and thumbnails are empty."""
    pairs = [(name.encode(), thumbnail) for name, thumbnail in media]
    data = b"".join(part for pair in pairs for part in pair)
    if not data:
        return {}
    sizes = np.array([[len(part) for part in pair] for pair in pairs], _SIZE)
    return {"media.sizes": sizes.view(np.uint8), "media.data": np.frombuffer(data, np.uint8)}


def unpack_media(tensors: Mapping[str, NDArray[Any]]) -> tuple[Media, ...]:
    """Return the media of each example, as `check_media` accepts them; () if there are none."""
    if "media.sizes" not in tensors:
        return ()
    data, end, media = tensors["media.data"].tobytes(), 0, []
    for name_size, thumbnail_size in _sizes(tensors):
        start, middle = end, end + name_size
        end = middle + thumbnail_size
        media.append(Media(data[start:middle].decode(), data[middle:end]))
    return tuple(media)


def check_media(tensors: Mapping[str, NDArray[Any]], limits: BundleLimits) -> None:
    """Raise MalformedBundle unless sizes add up, names are UTF-8 and thumbnails are WebP files."""
    if "media.sizes" not in tensors:
        return
    sizes = _sizes(tensors)
    total, present = sum(map(sum, sizes)), len(tensors["media.data"])
    if total != present:
        raise MalformedBundle(
            f"Tensor 'media.sizes' adds up to {total} bytes, but 'media.data' has {present}."
        )
    for column, what, most in (
        (0, "file name", limits.max_name_bytes),
        (1, "thumbnail", limits.max_thumbnail_bytes),
    ):
        if (largest := max(pair[column] for pair in sizes)) > most:
            raise MalformedBundle(
                f"Tensor 'media.sizes' has a {what} of {largest} bytes; at most {most} are allowed."
            )
    try:
        media = unpack_media(tensors)
    except UnicodeDecodeError:
        raise MalformedBundle(
            "Tensor 'media.data' has a file name that is not valid UTF-8."
        ) from None
    if not all(_is_webp(each.thumbnail) for each in media if each.thumbnail):
        raise MalformedBundle("Tensor 'media.data' has a thumbnail that is not a WebP file.")


def _sizes(tensors: Mapping[str, NDArray[Any]]) -> list[list[int]]:
    sizes: list[list[int]] = np.ascontiguousarray(tensors["media.sizes"]).view(_SIZE).tolist()
    return sizes


def _is_webp(data: bytes) -> bool:
    length = int.from_bytes(data[4:8], "little")
    return (
        len(data) >= _WEBP_HEADER
        and data[:4] == b"RIFF"
        and data[8:12] == b"WEBP"
        and len(data) - 8 in (length, length + length % 2)
    )
