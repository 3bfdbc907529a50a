"""Broken bundles, generated: each is one way a file from a stranger can be wrong."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

from engram_bundle.schema import TENSORS

from tests.bundles import PREPROCESSING, bundle

Change = Callable[[dict[str, Any]], None]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: dict[str, Any] | bytes, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def with_header(change: Change) -> bytes:
    header, body = split(bundle(1, golden=2).to_bytes())
    change(header)
    return join(header, body)


def with_manifest(**changes: Any) -> bytes:
    def change(header: dict[str, Any]) -> None:
        manifest = json.loads(header["__metadata__"]["engram"])
        for key, value in changes.items():
            if value is ...:
                del manifest[key]
            else:
                manifest[key] = value
        header["__metadata__"]["engram"] = json.dumps(manifest)

    return with_header(change)


def with_manifest_text(text: str) -> bytes:
    return with_header(lambda h: h["__metadata__"].update(engram=text))


def with_tensor(name: str, **changes: Any) -> bytes:
    return with_header(lambda h: h[name].update(changes))


def with_float(name: str, value: bytes) -> bytes:
    header, body = split(bundle(1, golden=2).to_bytes())
    start = header[name]["data_offsets"][0]
    return join(header, body[:start] + value + body[start + 4 :])


def without_tensors(*names: str, **more: Any) -> bytes:
    """Leave tensors out and close the holes."""
    header, body = split(bundle(1, golden=2, **more).to_bytes())
    kept, chunks, cursor = {"__metadata__": header.pop("__metadata__")}, [], 0
    for name, entry in header.items():
        if name in names:
            continue
        start, end = entry["data_offsets"]
        chunks.append(body[start:end])
        kept[name] = entry | {"data_offsets": [cursor, cursor + end - start]}
        cursor += end - start
    return join(kept, b"".join(chunks))


def raw_header(text: bytes) -> bytes:
    return join(text, split(bundle(1).to_bytes())[1])


def torch_like() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": 1}))
    return buffer.getvalue()


def duplicated(key: bytes) -> bytes:
    length_and_header, _ = split(bundle(1).to_bytes())
    text = json.dumps(length_and_header).encode()
    return raw_header(b'{"%s":{},%s' % (key, text[1:]))


WHOLE = bundle(1, golden=2).to_bytes()
NAN, INFINITY = b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f"
DIGEST = "sha256:" + "0" * 64
RIGHT = PREPROCESSING.to_json()

# name → (bytes, what the one sentence must say)
FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty or truncated"),
    "seven bytes": (WHOLE[:7], "empty or truncated"),
    "pickle": (pickle.dumps({"a": [1, 2, 3]}, protocol=4), "PyTorch or pickle.*engram import"),
    "old pickle": (pickle.dumps({"a": "b" * 80}, protocol=2), "PyTorch or pickle"),
    "torch zip": (torch_like(), "PyTorch or zip.*engram import"),
    "jpeg": (b"\xff\xd8\xff\xe0" + bytes(90), "JPEG"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS"),
    "text": (b"hello, this is not a bundle", "header of .* bytes"),
    "zeros": (bytes(100), "does not start with"),
    "absurd header size": (b"\xff" * 8 + WHOLE[8:], "header of 18446744073709551615 bytes"),
    "header beyond end": ((10**6).to_bytes(8, "little") + WHOLE[8:], "truncated"),
    "header over limit": (
        (9 * 2**20).to_bytes(8, "little") + b"{" + bytes(10 * 2**20),
        "at most 8388608 are allowed",
    ),
    "trailing bytes": (WHOLE + b"x", "1 bytes that belong to no tensor"),
    "header not utf-8": (raw_header(b'{"\xff\xfe": 1}'), "UTF-8"),
    "header not json": (raw_header(b"{nonsense}"), "not valid JSON"),
    "header deep": (raw_header(b'{"a":' * 10_000 + b"1" + b"}" * 10_000), "nested too deeply"),
    "header huge number": (raw_header(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "header duplicate key": (duplicated(b"head.weight"), "appears twice"),
    "metadata twice": (duplicated(b"__metadata__"), "appears twice"),
    "metadata not text": (with_header(lambda h: h.update(__metadata__={"engram": 1})), "text"),
    "metadata missing": (with_header(lambda h: h.pop("__metadata__")), "single key 'engram'"),
    "metadata unknown key": (
        with_header(lambda h: h["__metadata__"].update(format="pt")),
        "it has engram, format",
    ),
    "tensor entry wrong": (with_tensor("memory", extra=1), "exactly dtype, shape"),
    "tensor entry not object": (with_header(lambda h: h.update(memory=3)), "exactly dtype"),
    "dtype unknown": (with_tensor("memory", dtype="F64"), "stored as F64"),
    "dtype not text": (with_tensor("memory", dtype=["F32"]), "must be one of F32, F16, BF16, U8"),
    "float head as bytes": (
        with_tensor("head.bias", dtype="U8", shape=[12]),
        "stored as U8; it must be F32 or F16 or BF16",
    ),
    "pixels as floats": (
        with_tensor("golden.pixels", dtype="F16", shape=[1, 4, 4, 3]),
        "must be U8",
    ),
    "shape negative": (with_tensor("memory", shape=[-2, 2, 4]), "sizes above zero"),
    "shape zero": (with_tensor("memory", shape=[2, 0, 4]), "sizes above zero"),
    "shape not ints": (with_tensor("memory", shape=[2.0, 2, 4]), "sizes above zero"),
    "shape bool": (with_tensor("memory", shape=[True, 4, 4]), "sizes above zero"),
    "shape absurd": (with_tensor("memory", shape=[2**47, 2**47, 2**47]), "needs .* bytes"),
    "shape overflow": (with_tensor("memory", shape=[2**63, 2, 4]), "sizes above zero"),
    "rank five": (with_tensor("memory", shape=[1, 1, 2, 2, 4]), "one to four sizes"),
    "offsets reversed": (with_tensor("memory", data_offsets=[64, 0]), "data_offsets"),
    "offsets beyond end": (
        with_tensor("golden.pixels", data_offsets=[10**6, 10**6 + 96]),
        "without holes",
    ),
    "offsets overlap": (
        with_tensor("memory", data_offsets=[0, 64]),
        "without holes",
    ),
    "too many tensors": (
        with_header(
            lambda h: h.update({f"t{i}": {"dtype": "U8"} for i in range(100)}),
        ),
        f"a bundle has at most {len(TENSORS)}",
    ),
    "unknown tensor": (
        with_header(lambda h: h.update({"optimizer": h.pop("head.bias")})),
        "Unknown tensor 'optimizer'",
    ),
    "no head": (without_tensors("head.weight"), "no tensor 'head.weight'"),
    "memory alone": (without_tensors("class_token"), "'memory' needs a class token"),
    "extends without class token": (
        without_tensors("class_token", "memory", extends=(DIGEST,)),
        "extends others needs a class token",
    ),
    "pixels alone": (without_tensors("golden.logits"), "must be present together"),
    "logits alone": (without_tensors("golden.pixels"), "must be present together"),
    "head of rank one": (with_tensor("head.weight", shape=[12]), r"must be \[K, D\]"),
    "width differs": (with_tensor("memory", shape=[2, 1, 8]), "D = 8.*D = 4"),
    "class count differs": (with_tensor("head.weight", shape=[4, 3]), "K = 3.*K = 4|D = "),
    "grey golden pixels": (
        with_tensor("golden.pixels", shape=[2, 4, 12, 1]),
        r"must be \[G, H, W, 3\]",
    ),
    "nan in head": (with_float("head.weight", NAN), "'head.weight' has values that are not"),
    "infinite memory": (with_float("memory", INFINITY), "'memory' has values that are not"),
    "nan in golden logits": (with_float("golden.logits", NAN), "'golden.logits' has values"),
    "manifest not json": (with_manifest_text("{"), "manifest is not valid JSON"),
    "manifest not object": (with_manifest_text("[]"), "must be a JSON object"),
    "manifest deep": (with_manifest_text("[" * 10**4 + "]" * 10**4), "nested too deeply"),
    "manifest unknown key": (with_manifest(extend=[DIGEST]), "manifest's extend is invalid"),
    "manifest nested unknown key": (
        with_manifest(backbone={"name": "x", "fingerprint": DIGEST, "url": "x"}),
        "backbone.url",
    ),
    "manifest newer format": (with_manifest(format=2), "manifest's format is invalid"),
    "manifest without task_type": (with_manifest(task_type=...), "task_type is invalid"),
    "manifest unknown task_type": (with_manifest(task_type="detection"), "task_type is invalid"),
    "manifest unknown placement": (with_manifest(placement="middle"), "placement is invalid"),
    "too few labels": (with_manifest(labels=["cat", "dog"]), "2 labels, and the head has 3"),
    "no labels": (with_manifest(labels=[]), "0 labels, and the head has 3"),
    "too many regression labels": (
        with_manifest(task_type="regression", labels=["a"]),
        "1 labels, and the head has 3",
    ),
    "label not text": (with_manifest(labels=["cat", "dog", 3]), "labels.2 is invalid"),
    "label empty": (with_manifest(labels=["cat", "dog", ""]), "labels.2 is invalid"),
    "label too long": (with_manifest(labels=["cat", "dog", "x" * 257]), "labels.2 has 257"),
    "label surrogate": (
        with_manifest(labels=["cat", "dog", "\ud800"]),
        "not valid JSON.*hex escape",
    ),
    "training surrogate": (with_manifest(training={"a": "\ud800"}), "not valid JSON.*hex escape"),
    "description too long": (with_manifest(description="x" * 4097), "4097 characters"),
    "fingerprint short": (
        with_manifest(backbone={"name": "x", "fingerprint": "sha256:12"}),
        "backbone.fingerprint",
    ),
    "parent not digest": (with_manifest(extends=["cifar@3"]), "extends.0 is invalid"),
    "parent twice": (with_manifest(extends=[DIGEST, DIGEST]), "listed twice"),
    "too many parents": (
        with_manifest(extends=[f"sha256:{i:064x}" for i in range(65)]),
        "extends has 65 entries",
    ),
    "metric not finite": (with_manifest_text('{"metrics":{"a":NaN}}'), "NaN is not JSON"),
    "metric overflows": (
        with_manifest_text(
            json.dumps({"x": 1}).replace("1", "1e999"),
        ),
        "is invalid",
    ),
    "metric text": (with_manifest(metrics={"top1": "good"}), "metrics.top1"),
    "training deep": (
        with_manifest(training={"a": json.loads("[" * 40 + "]" * 40)}),
        "nested deeper than 16",
    ),
    "training large": (with_manifest(training={"log": "x" * 70_000}), "bytes of JSON"),
    "training not object": (with_manifest(training=[1]), "training is invalid"),
    "created not time": (with_manifest(created="yesterday"), "RFC 3339"),
    "created impossible": (with_manifest(created="2025-13-45T00:00:00Z"), "created is invalid"),
    "std zero": (
        with_manifest(preprocessing=RIGHT | {"std": [0.5, 0, 0.5]}),
        "preprocessing.std",
    ),
    "preprocessing incomplete": (
        with_manifest(preprocessing={"resize": 4, "crop": None}),
        "preprocessing.resample is invalid: Field required .and 3 more",
    ),
    "preprocessing unknown filter": (
        with_manifest(preprocessing=RIGHT | {"resample": "magic"}),
        "preprocessing.resample",
    ),
    "preprocessing text number": (
        with_manifest(preprocessing=RIGHT | {"rescale": "0.1"}),
        "preprocessing.rescale",
    ),
}
# Without memory the file is a fine bundle (m = 0): it proves that `without_tensors` breaks nothing.
FINE = without_tensors("memory")
