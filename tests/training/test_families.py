"""Training on other backbones than ViT: rotary embeddings, no class token, no final norm."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
import torch
from engram_bundle import TaskBundle
from engram_server.model import MultiTaskViT, TaskWeights
from engram_training.data.contexts import KeptContexts
from engram_training.data.dataset import read_data
from engram_training.data.images import ImageSet
from engram_training.data.workspace import Scratch
from engram_training.fitting.closed_form import SolvedHead, row_features
from engram_training.fitting.parts import Part
from engram_training.fitting.variants import Variant, Variants
from engram_training.run import fit

from tests.training.pictures import class_folders


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("data") / "colours", each=10)


@pytest.mark.parametrize("regime", ["memory", "lora"])
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
    model = MultiTaskViT(backbone)
    model.add("colours", bundle)
    files = sorted(photos.rglob("*.png"))
    pixels = [backbone.preprocessing(file.read_bytes(), max_pixels=None) for file in files]
    answers = model(torch.from_numpy(np.stack(pixels)), ["colours"])["colours"].argmax(dim=1)
    named = [bundle.labels[place] for place in answers]
    assert (
        np.mean([name == file.parent.name for name, file in zip(named, files, strict=True)]) >= 0.9
    )


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("family", ["siglip", "ijepa", "dinov3"])
def test_what_a_new_row_reads_is_what_a_task_with_the_first_token_reads(
    backbone_of, photos, family, keeps
):
    backbone = backbone_of(family)
    paths = [sample.path for sample in read_data(photos).samples]
    with closing(Scratch(2**30)) as scratch, ThreadPoolExecutor(1) as pool:
        images = ImageSet(paths, backbone.preprocessing, scratch)
        assert images.read_all(pool) == []
        kept = KeptContexts(backbone, images, scratch, rows=True) if keeps else None
        if kept is not None:
            kept.fill(batch=8)
        found = row_features(backbone, Part(images, torch.zeros(len(paths)), kept), 16)
        pixels = images.batch(range(len(paths)))
    model = MultiTaskViT(backbone)
    model.add("t", TaskWeights(torch.eye(backbone.width), class_token=backbone.first_token))
    torch.testing.assert_close(
        torch.from_numpy(found).float(), model(pixels)["t"], atol=0.02, rtol=0
    )


def test_rows_start_from_their_own_head_and_heads_alone_from_theirs(backbone_of):
    backbone = backbone_of("siglip")
    alone = SolvedHead(torch.ones(2, backbone.width), torch.ones(2))
    of_row = SolvedHead(torch.zeros(2, backbone.width), torch.zeros(2))
    chosen = [Variant(regime, 0, 0.1, 0, start="solved") for regime in ("head", "class")]
    head, row = list(
        Variants(backbone, chosen, 2, solved=alone, solved_row=of_row).tasks().values()
    )
    assert torch.equal(head.head_weight, alone.weight)
    assert torch.equal(row.head_weight, of_row.weight)
    torch.testing.assert_close(row.token, backbone.embed_class_token(backbone.first_token))
