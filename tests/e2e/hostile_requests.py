"""Requests that once held up a server, or were meant to: each by its name, as bytes on the wire.

To add one, add a function that returns its bytes, or a pair in `HOSTILE`.
"""

import base64
import gzip
import json
import struct
import zlib
from collections.abc import Callable

from tests.model.image_files import (
    jpeg_of_scans,
    png_chunk,
    run_length_bmp,
    tiff_of_strips,
)

MIB = 2**20
BODY = 32 * MIB  # the default of ENGRAM_BODY_BYTES
JSON = ("Content-Type", "application/json")
GZIP = ("Content-Encoding", "gzip")
FORM = ("Content-Type", "multipart/form-data; boundary=edge")


def get(path: str, *headers: tuple[str, str]) -> bytes:
    return _head("GET", path, headers) + b"\r\n"


def post(path: str, body: bytes, *headers: tuple[str, str]) -> bytes:
    return _head("POST", path, headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _head(method: str, path: str, headers: tuple[tuple[str, str], ...]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}".encode("latin-1")


def chunked(*pieces: bytes) -> bytes:
    """A prediction whose chunked body is this."""
    head = _head("POST", "/predict", (("Transfer-Encoding", "chunked"),))
    return b"".join((head, b"\r\n", *pieces))


def repeated(piece: bytes, size: int) -> bytes:
    return piece * (size // len(piece))


def infer(data: bytes, **fields: object) -> bytes:
    """An inference whose JSON has this as its data."""
    tensor = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 8, 8], **fields}
    text = json.dumps({"inputs": [tensor]}).encode()
    return post("/v2/models/many/infer", text[:-3] + b', "data": ' + data + b"}]}", JSON)


def listed(piece: bytes, count: int) -> bytes:
    return b"[" + b",".join([piece] * count) + b"]"


def bundle(manifest: bytes) -> bytes:
    """A file whose manifest is this."""
    text = json.dumps({"__metadata__": {"engram": manifest.decode()}}).encode()
    return post("/tasks/validate", struct.pack("<Q", len(text)) + text)


def part(name: bytes, content: bytes) -> bytes:
    head = b'--edge\r\nContent-Disposition: form-data; name="%s"; filename="a"\r\n\r\n' % name
    return head + content + b"\r\n"


def digests(known: str, count: int, **options: object) -> bytes:
    body = {"images": [{"digest": known}] * count, "tasks": ["many"], **options}
    return post("/predict", json.dumps(body).encode(), JSON)


def black_png(side: int, depth: int, colour: int, pixel_bytes: int) -> bytes:
    """A square PNG, written row by row: colour 0 is grey, 2 RGB, 6 RGB with alpha."""
    packer, row = zlib.compressobj(1), bytes(1 + side * pixel_bytes)
    pixels = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, depth, colour, 0, 0, 0))
    end = png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")
    return post("/predict?tasks=many", b"\x89PNG\r\n\x1a\n" + header + end)


# Nearly as many pixels as an image may have: what decoding takes is limited by itself.
LARGE_PICTURES: dict[str, Callable[[], bytes]] = {
    "16 bits of RGB": lambda: black_png(7900, 16, 2, 6),
    "16 bits of grey": lambda: black_png(7900, 16, 0, 2),
    "RGB with alpha": lambda: black_png(7900, 8, 6, 4),
}

# Sent by several clients at once, without a key to a server that requires one.
WITHOUT_A_KEY: dict[str, Callable[[], bytes]] = {
    "trailers without end": lambda: chunked(b"0\r\nX: ", b"a" * 64 * MIB),
    "bodies": lambda: chunked(b"4000000\r\n", b"a" * 64 * MIB),
}

# Whatever asks for images by digest gets the digest of one that the server has.
HOSTILE: dict[str, Callable[[str], bytes]] = {
    # Headers
    "a condition of blanks": lambda _: get("/", ("If-None-Match", "x" + " " * 20_000 + "x")),
    "a condition of quotes": lambda _: get("/", ("If-None-Match", '"' * 20_000)),
    "a condition on a bundle": lambda _: get(
        "/tasks/many/versions/1/bundle", ("If-None-Match", '"' + " " * 20_000 + "x")
    ),
    "a cookie of backslashes": lambda _: get("/livez", ("Cookie", 'a="' + "\\\\" * 14_000 + '"')),
    "thousands of cookies": lambda _: get("/livez", ("Cookie", "a=b;" * 7000)),
    "thousands of ranges": lambda _: get(
        "/", ("Range", "bytes=" + ",".join(f"{n}-{n}" for n in range(0, 6000, 2)))
    ),
    "a deadline of digits": lambda _: get("/livez", ("X-Deadline-Ms", "9" * 30_000)),
    "a date of digits": lambda _: get("/", ("If-Modified-Since", "1 " * 15_000)),
    "an odd Accept": lambda _: get("/metrics", ("Accept", "text/plain; version=" + "1." * 9000)),
    "a content type of parameters": lambda _: post(
        "/predict", b"x", ("Content-Type", "multipart/form-data" + '; a="\\"' * 3000)
    ),
    "64 MiB of headers": lambda _: get("/livez", ("X-Large", "a" * 64 * MIB)),
    "a header without end": lambda _: b"GET / HTTP/1.1\r\nX: " + b"a" * 8 * MIB,
    "half a million headers": lambda _: b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500_000,
    "ten thousand requests at once": lambda _: get("/") * 10_000,
    "a trailer without end": lambda _: chunked(b"0\r\nX: ", b"a" * 64 * MIB),
    "half a million trailers": lambda _: chunked(b"0\r\n", b"a: b\r\n" * 500_000),
    "a chunk extension without end": lambda _: chunked(b"4;", b"a" * 64 * MIB),
    "millions of chunks": lambda _: chunked(b"1\r\na\r\n" * 4 * MIB, b"0\r\n\r\n"),
    "line breaks": lambda _: b"\r\n" * 4 * MIB,
    # Addresses
    "thousands of parameters": lambda _: post("/predict?" + "&".join(["a=1"] * 7000), b"x"),
    "thousands of wrong parameters": lambda _: post(
        "/predict?" + "&".join(f"{n:x}" for n in range(6000)), b"x"
    ),
    "thousands of tasks": lambda _: post("/predict?tasks=" + "a," * 15_000, b"x"),
    "sixteen unknown names": lambda _: post(
        "/predict?tasks=" + ",".join(f"team-x/spceies-{n:04d}" for n in range(16)), b"x"
    ),
    "hundreds of unknown names": lambda _: post(
        "/predict?tasks=" + ",".join(f"team-x/spceies-{n:04d}" for n in range(250)), b"x"
    ),
    "an unknown task": lambda _: get("/tasks/team-x/spceies-1234"),
    "a long unknown name": lambda _: get("/tasks/" + "a" * 30_000),
    "a path of versions": lambda _: get("/tasks" + "/versions/1" * 2500 + "/x"),
    "a path of slashes": lambda _: get("/v2/models" + "/" * 30_000 + "x"),
    "a path of percents": lambda _: get("/console/" + "%2e%2e%2f" * 3000),
    # JSON
    "a list of wrong images": lambda _: post(
        "/predict", b'{"images":' + listed(b"1", BODY // 2 - 10) + b"}", JSON
    ),
    "a list of wrong inputs, compressed": lambda _: post(
        "/v2/models/many/infer",
        gzip.compress(b'{"inputs":' + listed(b"1", BODY // 2 - 10) + b"}"),
        JSON,
        GZIP,
    ),
    "a bomb of gzip": lambda _: post(
        "/v2/models/many/infer", gzip.compress(bytes(256 * MIB)), JSON, GZIP
    ),
    "lists in lists": lambda _: post("/predict", b"[" * BODY, JSON),
    "objects in objects": lambda _: post("/v2/models/many/infer", b'{"a":' * (BODY // 5), JSON),
    "as many numbers as are read": lambda _: infer(listed(b"-0.12345678901234567", 499_000)),
    "as many lists as are read": lambda _: infer(listed(b"[]", 83_000)),
    "as many objects as are read": lambda _: infer(listed(b'{"a":1}', 45_000)),
    "as many outputs as are read": lambda _: post(
        "/v2/models/many/infer",
        b'{"inputs":[],"outputs":' + listed(b'{"name":"a"}', 45_000) + b"}",
        JSON,
    ),
    "as many escapes as are read": lambda _: infer(b'"' + b"\\n" * 3_999_000 + b'"'),
    "an integer of millions of digits": lambda _: infer(b"1" * (BODY - MIB)),
    "a fraction of millions of digits": lambda _: infer(b"0." + b"1" * (BODY - MIB)),
    "millions of blanks": lambda _: infer(b" " * (BODY - MIB) + b"[]"),
    "no JSON at all": lambda _: post("/predict", b"x" * (BODY - MIB), JSON),
    "text that is no base64": lambda _: post(
        "/predict", b'{"images":[{"b64":"' + "é".encode() * (BODY // 2 - MIB) + b'"}]}', JSON
    ),
    "base64 that is wrong at its end": lambda _: post(
        "/predict", b'{"images":[{"b64":"' + b"A" * (BODY - MIB) + b'!"}]}', JSON
    ),
    "base64 of no image": lambda _: post(
        "/predict", b'{"images":[{"b64":"' + b"A" * (BODY - MIB) + b'"}]}', JSON
    ),
    "thousands of members": lambda _: post(
        "/v2/repository/index", b"{" + b",".join(b'"%x":0' % n for n in range(6000)) + b"}", JSON
    ),
    # Forms
    "a form of line breaks": lambda _: post("/predict", part(b"image", b"\r\n" * 8 * MIB), FORM),
    "a form of almost-edges": lambda _: post(
        "/predict", part(b"image", repeated(b"\r\n--edg", 16 * MIB)), FORM
    ),
    "a form of empty files": lambda _: post("/predict", part(b"image", b"") * 20_000, FORM),
    "a form of a header without end": lambda _: post("/predict", b"--edge\r\n" + b"a" * MIB, FORM),
    "a form of blanks before it": lambda _: post("/predict", b"\r\n" * 4 * MIB, FORM),
    # Images
    "a JPEG of thousands of scans": lambda _: post(
        "/predict?tasks=many", jpeg_of_scans(8000, 8000, 4000)
    ),
    "a run-length BMP": lambda _: post("/predict?tasks=many", run_length_bmp(7900, 7900)),
    "a TIFF of millions of strips": lambda _: post(
        "/predict?tasks=many", tiff_of_strips(3_900_000)
    ),
    "a plain PPM of comments": lambda _: post(
        "/predict?tasks=many", b"P3\n9 9\n255\n" + b"#\n" * 16_000_000
    ),
    "a PPM header of comments": lambda _: post(
        "/predict?tasks=many", b"P6\n#" + b"x" * (BODY - MIB) + b"\n9 9\n255\n"
    ),
    "a JPEG of millions of segments": lambda _: post(
        "/predict?tasks=many", b"\xff\xd8" + b"\xff\xfe\0\x02" * 8_000_000
    ),
    "a PNG of chunks": lambda _: post(
        "/predict?tasks=many",
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 9, 9, 8, 0, 0, 0, 0))
        + png_chunk(b"tEXt", b"a\0") * 2_000_000,
    ),
    # Answers
    "repeated digests of a task of many classes": lambda known: digests(known, 16, top_k=65536),
    "the largest answer there is": lambda known: digests(known, 10, top_k=21841),
    "the most numbers there are": lambda known: digests(known, 55, **{"return": "logits"}),
    "every task at once": lambda known: post("/predict", base64.b64decode("R0lGODlhAQABAAAAACw=")),
    "the list of tasks": lambda _: get("/tasks"),
    "the index of models": lambda _: post("/v2/repository/index", b""),
    "the model of all tasks": lambda _: get("/v2/models/multitask"),
    "a task of many classes": lambda _: get("/tasks/many"),
    "its manifest": lambda _: get("/tasks/many/versions/1/manifest"),
    "the metrics": lambda _: get("/metrics"),
    "the OpenAPI document": lambda _: get("/openapi.json"),
    # Bundles
    "a manifest of wrong labels": lambda _: bundle(b'{"labels":' + listed(b"1", 490_000) + b"}"),
    "a manifest of lists": lambda _: bundle(b'{"training":' + listed(b"[]", 80_000) + b"}"),
    "a manifest of members": lambda _: bundle(
        b"{" + b",".join(b'"%x":0' % n for n in range(80_000)) + b"}"
    ),
    "a manifest of millions of values": lambda _: bundle(listed(b"1", 3_500_000)),
}


# Over gRPC, as messages of the length that is allowed.


def field(number: int, content: bytes) -> bytes:
    """A field of a protobuf message, with its length in four bytes."""
    length = bytes(
        len(content) >> shift & 127 | (128 if shift < 21 else 0) for shift in (0, 7, 14, 21)
    )
    return bytes([number << 3 | 2]) + length + content


_REST = BODY - 32
MESSAGES: dict[str, Callable[[], bytes]] = {
    "zeros": lambda: field(7, bytes(_REST)),
    "outputs without a name": lambda: b"\x32\x00" * (_REST // 2),
    "inputs without a name": lambda: b"\x2a\x00" * (_REST // 2),
    "a shape of many numbers": lambda: field(5, field(3, b"\x01" * _REST)),
    "empty elements": lambda: field(5, field(5, b"\x42\x00" * (_REST // 2))),
    "a long name": lambda: field(1, b"x" * _REST),
    "zeros in gzip": lambda: gzip.compress(bytes(40 * BODY), 1),
    "not protobuf": lambda: b"\xff" * _REST,
}
