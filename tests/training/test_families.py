"""Training on backbones that are no plain ViT: rotary positions, no class token, no final norm."""

import numpy as np
import pytest
import torch

from server.model import MultiTaskViT
from task_store import TaskBundle
from tests.training.pictures import class_folders
from training.run import fit


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("data") / "colours", each=10)


@pytest.mark.parametrize("regime", ["memory", "adapter"])
@pytest.mark.parametrize("family", ["dinov3", "siglip", "ijepa", "radio"])
def test_a_folder_becomes_a_bundle_that_is_right(backbone_of, photos, tmp_path, family, regime):
    backbone = backbone_of(family)
    fitted = fit(
        photos,
        name="colours",
        backbone=backbone,
        out=tmp_path / "colours.safetensors",
        regimes=(regime,),
        memory=(2,),
        ranks=(2,),
        epochs=6,
        batch=8,
    )
    assert fitted.figures["test"].values["accuracy"] >= 0.75
    bundle = TaskBundle.load(fitted.path)
    assert bundle.class_token.shape == (backbone.width,)
    model = MultiTaskViT(backbone)
    model.add("colours", bundle)
    files = sorted(photos.rglob("*.png"))
    pixels = [backbone.preprocessing(file.read_bytes(), max_pixels=None) for file in files]
    answers = model(torch.from_numpy(np.stack(pixels)), ["colours"])["colours"].argmax(dim=1)
    named = [bundle.labels[place] for place in answers]
    assert (
        np.mean([name == file.parent.name for name, file in zip(named, files, strict=True)]) >= 0.9
    )
