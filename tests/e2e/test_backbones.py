"""Backbones that are no plain ViT, from a folder of photos to answers on a socket."""

import numpy as np
import pytest
import torch
from engram_bundle import TaskBundle
from engram_server.model import MultiTaskViT, load_backbone
from engram_training.run import fit
from engram_vit import Client

from tests.bundles import with_tensors
from tests.e2e.server_process import serving
from tests.serving import reference_logits
from tests.training.pictures import class_folders

TOLERANCE = 1e-4  # of the largest value
# Contexts are kept in half precision.
WARM_TOLERANCE = 5e-3


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("photos") / "colours", each=6)


@pytest.fixture(scope="module", params=["dinov3", "siglip", "siglip-classes"])
def trained(request, folder_of, photos, tmp_path_factory):
    """A folder, and tasks with rows of it as `engram train` writes them."""
    folder, home = folder_of(request.param), tmp_path_factory.mktemp("trained")
    bundles = {}
    for regime in ("memory", "lora"):
        fitted = fit(
            photos,
            name=regime,
            backbone=folder,
            out=home / f"{regime}.safetensors",
            regimes=(regime,),
            starts=("zero",),
            rates=(0.01,),
            memory=(3,),
            ranks=(2,),
            epochs=2,
            batch=8,
        )
        bundles[regime] = TaskBundle.load(fitted.path)
    # The memory of the one and the adapter of the other, which a bundle may have together.
    bundles["both"] = with_tensors(
        bundles["lora"],
        {
            "memory": bundles["memory"].tensors["memory"],
            "golden.pixels": None,
            "golden.logits": None,
        },
    )
    return folder, bundles


@pytest.fixture(scope="module")
def served(trained, tmp_path_factory):
    folder, bundles = trained
    with (
        serving(tmp_path_factory.mktemp("server"), folder) as running,
        Client(running.url) as client,
    ):
        for name, bundle in bundles.items():
            client.push(bundle.to_bytes(), name)
        yield client


def far(got, expected) -> float:
    """The largest difference, as a share of the largest value."""
    return float(np.abs(np.array(got) - expected).max() / np.abs(expected).max())


def test_a_trained_row_is_served_as_it_answers_offline_cold_and_warm(served, trained, photos):
    folder, bundles = trained
    backbone = load_backbone(folder)
    for path in (photos / "red" / "00.png", photos / "blue" / "01.png"):
        cold, warm = (served.predict(path, list(bundles), returns="logits")[0] for _ in range(2))
        assert (cold.cache, warm.cache) == ("miss", "hit")
        for name, bundle in bundles.items():
            assert "class_token" in bundle.tensors
            expected = reference_logits(backbone, bundle, path.read_bytes())
            assert far(cold[name].logits, expected) <= TOLERANCE
            assert far(warm[name].logits, expected) <= WARM_TOLERANCE


def test_attention_maps_match_the_offline_model(served, trained, photos):
    folder, bundles = trained
    backbone, path = load_backbone(folder), photos / "green" / "02.png"
    tasks = [*bundles, *(["base"] if backbone.base is not None else [])]
    offline = MultiTaskViT(backbone)
    for name, bundle in bundles.items():
        offline.add(name, bundle)
    pixels = torch.from_numpy(backbone.preprocessing(path.read_bytes(), max_pixels=None))
    (expected,) = offline.attention_pairs([pixels], [tasks])
    for tolerance in (TOLERANCE, WARM_TOLERANCE):  # cold, then warm
        (answer,) = served.predict(path, tasks, explain="attention")
        for name in tasks:
            attention = answer[name].attention
            assert far(attention.grid, expected[name].numpy()) <= tolerance
            assert 0 < attention.on_patches <= 1 + TOLERANCE
    if "base" in tasks and backbone.readout == ("pooled", "patches"):
        # Its classifier reads the mean patch: its attention is uniform.
        assert np.ptp(answer["base"].attention.grid) == 0
