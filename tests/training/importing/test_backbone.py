"""A checkpoint is imported on the backbone it was trained on, and on no other."""

import json
import re

import pytest
import torch
from engram_bundle import TaskBundle
from engram_server.model import load_backbone
from engram_training.errors import BackboneDiffers, ImportFailed

from tests.training.importing.checkpoints import (
    assert_nothing_written,
)


def test_changed_backbone_is_refused_with_the_tensor_and_the_difference(state, engram_import):
    changed = state("Sun")
    key = "vit.encoder.layer.1.output.dense.weight"
    changed[key] = changed[key].clone()
    changed[key][3, 4] += 0.25
    with pytest.raises(BackboneDiffers, match=re.escape(f"'{key}' differs by up to 0.25")) as error:
        engram_import(changed)
    assert "1 of 54 tensors differ" in str(error.value)
    assert_nothing_written()


def test_rounding_to_half_precision_is_accepted_but_more_is_not(state, engram_import):
    changed = {key: tensor.half() for key, tensor in state("Sun").items()}
    changed["vit.layernorm.bias"] = changed["vit.layernorm.bias"] + 0.01
    with pytest.raises(BackboneDiffers, match=r"vit\.layernorm\.bias' differs by up to 0.01"):
        engram_import(changed)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("vit", {"num_hidden_layers": 2}, "has 3 layers, but backbone .* has 2"),
        ("deit", {"num_hidden_layers": 3}, "another family"),
        ("vit", {}, "is .* instead of"),
    ],
)
def test_another_model_is_refused(
    reproduction, folder_of, engram_import, family, overrides, message
):
    with pytest.raises(BackboneDiffers, match=message):
        engram_import(str(reproduction / "Sun_model.pt"), backbone=folder_of(family, **overrides))
    assert_nothing_written()


@pytest.mark.parametrize("missing", ["vit.layernorm.bias", "vit.embeddings.cls_tokens.0"])
def test_missing_backbone_tensor_is_named(state, engram_import, missing):
    changed = state("Sun")
    del changed[missing]
    with pytest.raises(ImportFailed, match=re.escape(missing)):
        engram_import(changed)


@pytest.mark.parametrize("key", ["vit.encoder.layer.7.gate", "classifiers.9.weight"])
def test_tensor_that_nothing_reads_is_refused(state, engram_import, key):
    with pytest.raises(BackboneDiffers, match=re.escape(f"the unknown tensor '{key}'")):
        engram_import(state("Sun") | {key: torch.zeros(2)})


def test_folder_given_as_a_dot_has_its_own_name(reproduction, tmp_path, monkeypatch, engram_import):
    monkeypatch.chdir(reproduction / "backbone")
    out = tmp_path / "t.safetensors"
    engram_import(str(reproduction / "Sun_model.pt"), backbone=".", out=str(out))
    assert TaskBundle.load(out).manifest.backbone.name == "backbone"


def test_backbone_at_another_image_size_is_refused(reproduction, tmp_path, engram_import):
    folder = tmp_path / "resized"
    folder.mkdir()
    for file in (reproduction / "backbone").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 64, "width": 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    assert load_backbone(folder).image_size == (64, 64)
    with pytest.raises(BackboneDiffers, match=r"position_embeddings' is \(1, 17, 48\) instead of"):
        engram_import(str(reproduction / "Sun_model.pt"), backbone=folder)
