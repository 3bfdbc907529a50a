"""Convert bundles from before version 0.1.0: `python -m scripts.convert_bundle FILE…`.

Renames manifest keys and tensors in place. Values and answers stay the same; the digest changes.
"""

import json
import sys
from pathlib import Path

from engram_bundle import codec
from engram_bundle.limits import DEFAULT_LIMITS

KEYS = {"problem": "task_type", "adapter": "lora", "known": "ood"}
TENSORS = {"adapter.": "lora.", "known.": "ood."}


def convert(data: bytes) -> bytes:
    """Return the same bundle with the current names."""
    metadata, stored = codec.read_header(data, DEFAULT_LIMITS)
    manifest = {KEYS.get(key, key): value for key, value in json.loads(metadata["engram"]).items()}
    if "lora" in manifest and "maps" in manifest["lora"]:
        manifest["lora"]["targets"] = manifest["lora"].pop("maps")
    if manifest.get("training", {}).get("tool") == "engram teach":
        templates = manifest["training"].pop("templates", [])
        manifest["taught"] = {"templates": templates}
    arrays = {}
    for name, tensor in stored.items():
        for old, new in TENSORS.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        arrays[name] = codec.decode(data, tensor)
        if tensor.dtype == "F16":
            arrays[name] = arrays[name].astype("<f2")
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return codec.encode(arrays, {"engram": text})


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_bytes(convert(path.read_bytes()))
