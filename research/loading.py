"""How long folders of the usual sizes take to load, and how much memory at most.

    python -m research.loading --shapes B/16,L/14,L/16,H/14

Folders of random weights are written below a temporary folder, one at a time. Each is loaded twice
in a process of its own: by `load_backbone`, and by the class of transformers alone, whose weights
are then summed up, since it only maps a file and would read it in the first pass. The peak is of
the resident memory, above what there was before, mapped pages of the file counted. Time is that
of a processor for the load alone, with the file in the system's cache, as it is just written.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
import transformers
from transformers import PretrainedConfig

L: Final = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
H: Final = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 16}
SMALL: Final = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
# By name: the class in transformers, that of its configuration, and what makes it so large.
SHAPES: Final[Mapping[str, tuple[str, str, dict[str, int]]]] = {
    "B/16": ("ViTModel", "ViTConfig", {}),
    "L/14": ("Dinov2Model", "Dinov2Config", {**L, "image_size": 518}),
    "L/16": ("DINOv3ViTModel", "DINOv3ViTConfig", {**L, "intermediate_size": 4096}),
    "H/14": ("ViTModel", "ViTConfig", {**H, "intermediate_size": 5120, "patch_size": 14}),
}
FILES: Final[Mapping[str, tuple[torch.dtype, str]]] = {
    "float32": (torch.float32, "50GB"),
    "float32, sharded": (torch.float32, "500MB"),
    "float16": (torch.float16, "50GB"),
    "bfloat16, sharded": (torch.bfloat16, "500MB"),
}

PROGRAM: Final = """
import json, sys, time
import transformers
from server.model import load_backbone

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

ours, architecture, tiny, folder = sys.argv[1:]
load = load_backbone if ours == "ours" else getattr(transformers, architecture).from_pretrained
load(tiny)  # whatever is imported and allocated once
open("/proc/self/clear_refs", "w").write("5")  # the peak is what there is now
before, started = peak(), time.process_time()
loaded = load(folder)
tensors = list(loaded.named_tensors() if ours == "ours" else loaded.named_parameters())
if ours != "ours":  # which only maps the file
    sum(float(tensor.sum()) for _, tensor in tensors)
took = time.process_time() - started
weights = sum(4 * tensor.numel() for _, tensor in tensors)
print(json.dumps([took, peak() - before, weights]))
"""


@torch.no_grad()
def write(architecture: str, config: PretrainedConfig, kind: str, folder: Path) -> None:
    dtype, shard = FILES[kind]
    with torch.device("meta"):
        model = getattr(transformers, architecture)(config).to(dtype)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
    model.save_pretrained(folder, max_shard_size=shard)


def measure(ours: bool, architecture: str, tiny: Path, folder: Path) -> tuple[float, int, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "ours" if ours else "theirs", architecture, tiny, folder],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "MALLOC_ARENA_MAX": "1"},
    )
    took, peak, weights = json.loads(done.stdout.splitlines()[-1])
    return took, peak, weights


def main() -> None:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--files", default=";".join(FILES), help="kinds, with semicolons")
    given = parser.parse_args()
    print("| | file | bytes | peak | of float32 | seconds | transformers alone |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for shape in given.shapes.split(","):
        architecture, kind_of_config, large = SHAPES[shape]
        configured = getattr(transformers, kind_of_config)
        for kind in given.files.split(";"):
            with tempfile.TemporaryDirectory() as parent:
                tiny, folder = Path(parent, "tiny"), Path(parent, "folder")
                write(architecture, configured(**SMALL), "float32", tiny)
                write(architecture, configured(**large), kind, folder)
                size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
                took, peak, weights = measure(True, architecture, tiny, folder)
                alone, _, _ = measure(False, architecture, tiny, folder)
            print(
                f"| {shape} | {kind} | {size / 2**20:.0f} MiB | {peak / 2**20:.0f} MiB | "
                f"{peak / weights:.2f} | {took:.1f} | {alone:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
