"""Images that cameras, scanners and attackers produce, as the bytes of a file."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

ORIENTATION = 0x0112
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")


# Nothing here can write HEIC, so these are files of `heic_picture`: rotated by its own property and
# by an EXIF orientation, as phones do; and with an alpha plane that hides its upper third.
HEIC = Path(__file__).parent.parent / "data" / "drawn.heic"


def heic_picture() -> Image.Image:
    image = Image.new("RGB", (96, 64), (230, 220, 200))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 44, 96, 64), fill=(70, 130, 60))
    draw.ellipse((8, 8, 36, 36), fill=(220, 60, 40))
    draw.polygon(((50, 44), (66, 14), (82, 44)), fill=(40, 60, 160))
    return image


def heic_files() -> dict[str, bytes]:
    return {"HEIC": HEIC.read_bytes(), "HEIC alpha": HEIC.with_name("alpha.heic").read_bytes()}


def box(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def heic(
    items: list[tuple[bytes, tuple[int, int]]],
    references: list[tuple[bytes, int, list[int]]] = (),
    *,
    payloads: dict[int, bytes] | None = None,
    more: bytes = b"",
) -> bytes:
    """A HEIC file by hand: the kind and the size of each item, numbered from 1, the primary one.

    Every item has the coded picture of `HEIC`, or its payload. `more` is put into the `meta` box.
    """
    original = HEIC.read_bytes()
    start = original.index(b"hvcC") - 4
    config = original[start : start + int.from_bytes(original[start : start + 4])]
    coded = original[original.index(b"mdat") + 4 : original.rindex(b"Exif\0\0") - 4]
    data = [(payloads or {}).get(number, coded) for number in range(1, len(items) + 1)]
    full = bytes(4)
    infos = [
        box(b"infe", b"\x02\0\0\0", struct.pack(">HH4s", number, 0, kind), b"\0")
        for number, (kind, _) in enumerate(items, 1)
    ]
    sizes = [box(b"ispe", full, struct.pack(">II", *size)) for _, size in items]
    links = [
        struct.pack(">HBHH", number, 2, 0x8001, number + 1) for number in range(1, len(items) + 1)
    ]
    refs = [
        box(kind, struct.pack(f">HH{len(to)}H", number, len(to), *to))
        for kind, number, to in references
    ]

    def meta(at: int) -> bytes:
        places, begin = b"", at
        for number, body in enumerate(data, 1):
            places += struct.pack(">HHHII", number, 0, 1, begin, len(body))
            begin += len(body)
        return box(
            b"meta",
            full,
            box(b"hdlr", full, bytes(4), b"pict", bytes(13)),
            box(b"pitm", full, struct.pack(">H", 1)),
            box(b"iloc", full, b"\x44\0", struct.pack(">H", len(items)), places),
            box(b"iinf", full, struct.pack(">H", len(items)), *infos),
            *([box(b"iref", full, *refs)] if refs else []),
            box(
                b"iprp",
                box(b"ipco", config, *sizes),
                box(b"ipma", b"\0\0\0\1", struct.pack(">I", len(items)), *links),
            ),
            more,
        )

    head = box(b"ftyp", b"heic", bytes(4), b"mif1heic")
    start = len(head) + len(meta(0)) + 8
    return head + meta(start) + box(b"mdat", *data)


def grid_of(rows: int, columns: int, width: int, height: int) -> bytes:
    """The payload of a grid item."""
    return struct.pack(">BBBBHH", 0, 0, rows - 1, columns - 1, width, height)


def random_rgb(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth enough to look like a photo to a codec, and with extremes for the resizing filters."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 6), max(2, width // 6), 3), dtype=np.uint8)
    smooth = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = rng.integers(-40, 41, (height, width, 3))
    return Image.fromarray((np.asarray(smooth) + noise).clip(0, 255).astype(np.uint8))


def encode(image: Image.Image, format: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def decode(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def one_of_each(image: Image.Image) -> dict[str, bytes]:
    """The image in every supported format, and in the odd kinds of some."""
    files = {format: encode(image, format) for format in FORMATS}
    files["JPEG progressive"] = encode(image, "JPEG", progressive=True)
    files["PNG palette"] = encode(image.quantize(16), "PNG")
    files["PNG grey 16"] = encode(grey16(image), "PNG")
    files["TIFF lzw"] = encode(image, "TIFF", compression="tiff_lzw")
    files["TIFF float"] = encode(image.convert("F"), "TIFF")
    files["WEBP lossless"] = encode(image.convert("RGBA"), "WEBP", lossless=True)
    files["GIF animated"] = encode(
        image, "GIF", save_all=True, append_images=[ImageOps.invert(image)]
    )
    return files


def grey16(image: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)


def with_orientation(upright: Image.Image, orientation: int, format: str, **options) -> bytes:
    """A file that shows `upright` once its EXIF orientation is applied."""
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = upright.transpose(undo[orientation]) if orientation in undo else upright
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encode(stored, format, exif=exif, **options)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: bytes) -> bytes:
    """A PNG by hand, as Pillow cannot write it; colour 0 grey, 2 RGB, 4 grey + alpha."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            png_chunk(b"IHDR", header),
            *extra,
            png_chunk(b"IDAT", zlib.compress(rows)),
            png_chunk(b"IEND", b""),
        )
    )


def deep_png(values: np.ndarray, colour: int, *extra: bytes) -> bytes:
    """uint16 (H, W, C) as a 16-bit PNG."""
    height, width = values.shape[:2]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return png(width, height, 16, colour, rows, *extra)


def tiff12(values: list[int]) -> bytes:
    """One row of 12-bit grey, packed two pixels to three bytes."""
    bits = "".join(f"{value:012b}" for value in values)
    bits += "0" * (-len(bits) % 8)
    body = int(bits, 2).to_bytes(len(bits) // 8)
    tags = [(256, len(values)), (257, 1), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1)]
    tags += [(278, 1), (279, len(body))]
    start = 8 + len(body) + len(body) % 2
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    strip = body + b"\0" * (len(body) % 2)
    return (
        b"II*\0"
        + struct.pack("<I", start)
        + strip
        + struct.pack("<H", len(tags))
        + entries
        + b"\0" * 4
    )


def claims_size(format: str, width: int, height: int) -> bytes:
    """A few bytes whose header promises a huge picture."""
    if format == "PNG":
        return png(width, height, 8, 2, b"")
    if format == "GIF":
        return (
            b"GIF89a"
            + struct.pack("<HHBBB", width, height, 0, 0, 0)
            + (b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x01\x00\x00;")
        )
    if format == "BMP":
        info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
        return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info
    if format == "PPM":
        return f"P6\n{width} {height}\n255\n".encode()
    if format == "WEBP":
        lossless = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + b"\0" * 9
        body = b"WEBPVP8L" + struct.pack("<I", len(lossless)) + lossless
        return b"RIFF" + struct.pack("<I", len(body)) + body
    data = bytearray(encode(Image.new("RGB", (8, 8)), format))
    if format == "JPEG":
        frame = data.index(b"\xff\xc0")
        data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def constant_jpeg(width: int, height: int, channels: int, lossless: bool) -> bytes:
    """All grey, of a kind that Pillow cannot write: lossless, or a scan for each channel."""
    names = range(1, channels + 1)
    frame = struct.pack(">BHHB", 8, height, width, channels)
    frame += b"".join(bytes([name, 0x11, 0]) for name in names)
    code = bytes([1] + 15 * [0] + [0])  # one bit for the one symbol: no difference, end of block
    pieces = [(0xDB, bytes([0] + 64 * [1])), (0xC3 if lossless else 0xC0, frame)]
    pieces += [(0xC4, b"\x00" + code), (0xC4, b"\x10" + code)]
    data = b"\xff\xd8"
    for scan in [names] if lossless else [[name] for name in names]:
        head = bytes([len(scan), *(part for name in scan for part in (name, 0))])
        head += b"\x01\x00\x00" if lossless else b"\x00\x3f\x00"
        for kind, body in [*pieces, (0xDA, head)]:
            data += struct.pack(">BBH", 0xFF, kind, len(body) + 2) + body
        pieces = []
        blocks = -(-width // 8) * -(-height // 8)
        bits = width * height * channels if lossless else 2 * blocks
        data += bytes(bits // 8 + 1)
    return data + b"\xff\xd9"


def jpeg_of_scans(width: int, height: int, scans: int, code: int = 0xC2) -> bytes:
    """A progressive JPEG, all grey: a scan of averages, then empty scans of details."""

    def segment(kind: int, body: bytes) -> bytes:
        return struct.pack(">BBH", 0xFF, kind, len(body) + 2) + body

    one_symbol = bytes([1] + 15 * [0])
    blocks = -(-width // 8) * -(-height // 8)
    frame = struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\x00"
    data = b"\xff\xd8" + segment(0xDB, bytes([0] + 64 * [1])) + segment(code, frame)
    data += segment(0xC4, b"\x00" + one_symbol + b"\x00")  # no difference
    data += segment(0xC4, b"\x10" + one_symbol + b"\xe0")  # the next 16,384 blocks are empty
    data += segment(0xDA, b"\x01\x01\x00\x00\x00\x00") + bytes(blocks // 8 + 1)
    empty = segment(0xDA, b"\x01\x01\x00\x01\x3f\x00") + bytes((blocks // 16384 + 1) * 15 // 8 + 1)
    return data + empty * (scans - 1) + b"\xff\xd9"


def run_length_bmp(width: int, height: int, compression: int = 1) -> bytes:
    """One pixel a row: Pillow fills the rest of each row in Python."""
    rows = b"\x01\x01\x00\x00" * height + b"\x00\x01"
    bits = 8 if compression == 1 else 4
    start = 54 + 4 * 2**bits
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", start, 0, 0, start) + info + bytes(4 * 2**bits) + rows


def tiff(tags: dict[int, tuple[int, int, int]], body: bytes) -> bytes:
    """A little-endian TIFF: type, count and value of each tag; `body` is at byte 8."""
    body += bytes(len(body) % 2)
    entries = b"".join(struct.pack("<HHII", tag, *rest) for tag, rest in sorted(tags.items()))
    head = b"II*\0" + struct.pack("<I", 8 + len(body))
    return head + body + struct.pack("<H", len(tags)) + entries + bytes(4)


def _grey(width: int, height: int, compression: int) -> dict[int, tuple[int, int, int]]:
    sizes = {256: (4, 1, width), 257: (4, 1, height), 258: (3, 1, 8), 277: (3, 1, 1)}
    return {**sizes, 259: (3, 1, compression), 262: (3, 1, 1)}


def tiff_of_strips(count: int) -> bytes:
    """Eight pixels a row, and each row a strip: the same one."""
    strips = {273: (4, count, 8), 278: (4, 1, 1), 279: (4, count, 8 + 4 * count)}
    return tiff({**_grey(8, count, 1), **strips}, struct.pack("<I", 8) * 2 * count)


def tiff_of_one_tile(edge: int, tile: int) -> bytes:
    """A small image in a large tile."""
    packer = zlib.compressobj(1)
    body = b"".join(packer.compress(bytes(tile)) for _ in range(tile)) + packer.flush()
    tiles = {322: (4, 1, tile), 323: (4, 1, tile), 324: (4, 1, 8), 325: (4, 1, len(body))}
    return tiff({**_grey(edge, edge, 8), **tiles}, body)


def jpeg_in_tiff(width: int, height: int, jpeg: bytes) -> bytes:
    strips = {273: (4, 1, 8), 278: (4, 1, height), 279: (4, 1, len(jpeg))}
    return tiff({**_grey(width, height, 7), **strips}, jpeg)


def assert_same_pixels(result, expected, resample, case=""):
    """Pillow's filters are exact; those of torch are within what precision.md states."""
    assert result.shape == expected.shape, case
    difference = np.abs(result.astype(int) - expected)
    if resample not in ("bilinear", "bicubic"):
        assert not difference.any(), case
        return
    assert difference.max() <= 2, case
    assert (difference > 1).sum() <= max(3, difference.size / 1000), case
    assert difference.mean() <= 0.1, case
