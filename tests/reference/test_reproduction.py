"""Logits computed by the public reproduction, necrashter/transformers-learnable-memory.

Its file format: REPRODUCTION_FORMAT.md.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import ViTForImageClassification

from tests.reference.dense import (
    ReferenceTask,
    dense_forward,
    dense_mask,
    key_tokens,
    query_tokens,
)

ORACLE = "reproduction-oracle"  # folder of tests/data
LAYERS, BASE_TOKENS = 3, 17
ATTENTION = "vit.encoder.layer.{}.attention.attention."


@pytest.fixture(scope="module")
def folder(data):
    return data / ORACLE


@pytest.fixture(scope="module")
def expected(folder):
    return load_file(folder / "expected.safetensors")


@pytest.fixture(scope="module")
def backbone(folder):
    return ViTForImageClassification.from_pretrained(folder / "backbone").eval()


@pytest.fixture(scope="module")
def names(folder):
    return [task["name"] for task in json.loads((folder / "fixture.json").read_text())["tasks"]]


@pytest.fixture(scope="module")
def singles(folder, names):
    tasks = {}
    for name in names:
        tasks |= read_tasks(folder / f"{name}_model.pt", [name], [()])
    return tasks


@pytest.fixture(scope="module")
def extended(folder, names):
    parents = [(), (names[0],), (names[1],)]  # each task extends the one before it
    return read_tasks(folder / "extended_model.pt", names, parents)


def read_tasks(file, names, parents):
    state = torch.load(file, weights_only=True)
    memory = ATTENTION + "memory_tokens.{}"
    return {
        name: ReferenceTask(
            head_weight=state[f"classifiers.{k + 1}.weight"],
            head_bias=state[f"classifiers.{k + 1}.bias"],
            class_token=state[f"vit.embeddings.cls_tokens.{k + 1}"][0, 0],
            memory=torch.stack([state[memory.format(i, k)][0] for i in range(LAYERS)]),
            placement="post_norm",
            parents=parents[k],
        )
        for k, name in enumerate(names)
    }


def assert_reproduced(backbone, expected, tasks, prefix):
    with torch.no_grad():
        logits = dense_forward(backbone, expected["pixel_values"], tasks)
    reproduced = {name: expected[f"{prefix}.{name}.logits"] for name in tasks}
    reproduced["base"] = expected.get(f"{prefix}.base.logits", expected["base.logits"])
    for name, tensor in reproduced.items():
        torch.testing.assert_close(logits[name], tensor, atol=1e-5, rtol=0)


def test_tasks_alone(backbone, expected, singles):
    for name, task in singles.items():
        assert_reproduced(backbone, expected, {name: task}, "alone")


def test_tasks_concatenated(backbone, expected, singles):
    assert_reproduced(backbone, expected, singles, "concatenated")


def test_tasks_extended(backbone, expected, extended):
    assert_reproduced(backbone, expected, extended, "extended")


def test_the_saved_mask_is_the_one_of_the_table(folder, extended):
    state = torch.load(folder / "extended_model.pt", weights_only=True)
    queries, keys = query_tokens(BASE_TOKENS, extended), key_tokens(BASE_TOKENS, extended)
    mask = dense_mask(queries, keys, extended)
    for i in range(LAYERS):
        saved = state[ATTENTION.format(i) + "attention_mask"][0]
        assert torch.equal(saved == 0, mask)
