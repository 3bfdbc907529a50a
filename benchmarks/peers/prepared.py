"""What all contenders serve, made once: a ViT-B/32 of random weights, our tasks, their models.

A fine-tuned classifier is the whole network with a head of its own; which weights it has does not
change how long it takes, so a peer's T networks are T copies of this one.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from engram_server.model import load_backbone
from engram_store import open_store
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from benchmarks.measure import RESULTS
from benchmarks.peers.environments import REPOSITORY, python_of
from benchmarks.serving import bundle

FOLDER = RESULTS / "peers"
CLASSES = 100
MOST_TASKS = 16
MEMORY, HEAD = "memory", "head"  # prefixes of our tasks' names


@dataclass(frozen=True, slots=True)
class Prepared:
    model: Path  # a folder of Hugging Face
    store: Path  # our tasks, MOST_TASKS of either kind
    heads: Path  # the same heads, for a peer of one backbone
    openvino: Path  # float32.xml and int8.xml
    photos: tuple[Path, ...]


def prepare() -> Prepared:
    """Everything, from earlier runs where it is there."""
    photos = tuple(
        sorted((REPOSITORY / "server" / "engram_server" / "console" / "samples").glob("*.jpg"))
    )
    found = Prepared(
        FOLDER / "model", FOLDER / "store", FOLDER / "heads.npy", FOLDER / "openvino", photos
    )
    if not (found.model / "preprocessor_config.json").exists():
        _write_model(found.model)
    if not found.heads.exists():
        _write_tasks(found)
    if not (found.openvino / "int8.bin").exists():
        program = "benchmarks.peers.servers.openvino_model"
        subprocess.run(
            [python_of("openvino"), "-m", program, found.model, found.openvino, *photos],
            check=True,
            cwd=REPOSITORY,
        )
    return found


def _write_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = ViTConfig(patch_size=32)
    config.num_labels = CLASSES
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor().save_pretrained(folder)


def _write_tasks(prepared: Prepared) -> None:
    backbone = load_backbone(prepared.model)
    store = open_store(prepared.store)
    heads = []
    for number in range(MOST_TASKS):
        made = bundle(backbone, number)
        store.publish(f"{MEMORY}{number}", made)
        head = bundle(backbone, number, memory=False)
        store.publish(f"{HEAD}{number}", head)
        heads.append(head.tensors["head.weight"])
    np.save(prepared.heads, np.stack(heads))
