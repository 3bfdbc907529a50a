"""Telling image files, and what people upload by mistake, by their first bytes."""

from collections.abc import Mapping

TIFF_STARTS = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PPM_STARTS = tuple(f"P{kind}{space}".encode() for kind in "123456fF" for space in " \t\r\n")

STARTS: Mapping[str, tuple[bytes, ...]] = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": TIFF_STARTS,
    "PPM": PPM_STARTS,
}
# Only for the error message: what people upload by mistake.
STRANGERS: Mapping[str, tuple[bytes, ...]] = {
    "a PDF document": (b"%PDF",),
    "a PostScript file": (b"%!PS", b"\xc5\xd0\xd3\xc6"),
    "a ZIP archive or office document": (b"PK\x03\x04",),
    "a gzip archive": (b"\x1f\x8b",),
    "an icon": (b"\0\0\1\0", b"\0\0\2\0"),
    "a Photoshop document": (b"8BPS",),
    "a JPEG 2000 image": (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"),
    "a JPEG XL image": (b"\xff\x0a", b"\0\0\0\x0cJXL "),
    "a Matroska or WebM video": (b"\x1a\x45\xdf\xa3",),
}
SUPPORTED = "supported are JPEG, PNG, WebP, GIF, BMP, TIFF, PPM and AVIF"


def recognise(data: bytes) -> str | None:
    for kind, starts in STARTS.items():
        if data.startswith(starts):
            return kind
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return "AVIF" if {b"avif", b"avis"} & _brands(data) else None


def _brands(data: bytes) -> set[bytes]:
    """The brands of an ISO media file: AVIF, HEIC and MP4 begin alike."""
    if data[4:8] != b"ftyp":
        return set()
    end = min(int.from_bytes(data[:4]), 256)
    return {data[start : start + 4] for start in (8, *range(16, end - 3, 4))}


def describe(data: bytes) -> str:
    if not data:
        return "nothing: there are no bytes"
    for name, starts in STRANGERS.items():
        if data.startswith(starts):
            return name
    if brands := _brands(data):
        heic = any(brand.startswith((b"hei", b"hev", b"mif")) for brand in brands)
        return "a HEIC image" if heic else "a video"
    head = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in head:
        return "an SVG drawing"
    if head.startswith((b"<!doctype html", b"<html")) or b"<html" in head:
        return "an HTML page"
    printable = all(byte >= 32 or byte in b"\t\r\n\f" for byte in head)
    return "text" if printable and _is_utf8(head[:256]) else "no image format known here"


def _is_utf8(head: bytes) -> bool:
    # A character may be cut at the end of the sample: what is valid before it decides.
    return "\ufffd" not in head.decode("utf-8", errors="replace")[:-1]
