"""The peak memory of loading, measured in a separate process."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

# What a load takes of any size: a tenth of this backbone's weights, nothing beside a ViT-L's.
FIXED = 16 * 2**20

PROGRAM = """
import json, sys
import transformers.models.dinov2.modeling_dinov2
from engram_server.model import load_backbone

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

load_backbone(sys.argv[1])  # whatever is allocated once
for folder in sys.argv[1:]:
    open("/proc/self/clear_refs", "w").write("5")  # the peak is what there is now
    before = peak()
    backbone = load_backbone(folder)
    bytes = sum(tensor.nbytes for _, tensor in backbone.named_tensors())
    print(json.dumps([peak() - before, bytes, backbone.fingerprint]))
    del backbone
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_loading_takes_hardly_more_than_the_weights(tmp_path):
    """Also with layer scale, which is folded in, in several files, and in half precision."""
    config = Dinov2Config(
        hidden_size=512, num_hidden_layers=12, num_attention_heads=8, image_size=64, patch_size=16
    )
    with torch.device("meta"):
        model = Dinov2Model(config)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)  # what half precision holds
    folders = [tmp_path / name for name in ("warm", "whole", "sharded", "half")]
    model.save_pretrained(folders[0])
    model.save_pretrained(folders[1])
    model.save_pretrained(folders[2], max_shard_size="30MB")
    model.half().save_pretrained(folders[3])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, folders)],
        capture_output=True,
        text=True,
        check=True,
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MALLOC_ARENA_MAX": "1"},
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for folder, (peak, weights, fingerprint) in zip(folders, results, strict=True):
        assert weights > 140e6
        assert peak <= 1.2 * weights + FIXED, f"{folder.name}: {peak / weights:.2f}"
        assert fingerprint == results[0][2]
