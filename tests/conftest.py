"""What every test shares: one thread, no network, and models built once."""

import gc
import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
# Kernels for GPUs run here too, in Triton's interpreter. It must know before Triton is imported.
os.environ["TRITON_INTERPRET"] = "1"
# Programs that tests start compile our sources once, and not each of them anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import hypothesis
import pytest
import torch
from engram_server.model import Backbone, load_backbone
from engram_server.model.kernels.cpu_features import disable_unusable_amx

from tests import families

torch.set_num_threads(1)
disable_unusable_amx()
# A shell without job control starts background jobs with Ctrl-C ignored, and tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)
hypothesis.settings.register_profile("engram", deadline=None, print_blob=True)
hypothesis.settings.load_profile("engram")

REPOSITORY = Path(__file__).resolve().parent.parent
PHOTOS = REPOSITORY / "server" / "engram_server" / "console" / "samples"  # those the console offers


def pytest_collection_finish() -> None:
    """What is loaded by now stays: no later collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real weights and data beside the repository, where there are any."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no ../shared beside the repository: real weights and data are not here")
    return folder


@pytest.fixture(scope="session")
def data() -> Path:
    """Files kept with the tests."""
    return REPOSITORY / "tests" / "data"


@pytest.fixture(scope="session")
def hugging_face():
    """`hugging_face(family, **overrides)`: a tiny random model, built once. Do not change it."""
    built = {}

    def model(family: str, seed: int = 0, **overrides):
        key = (family, seed, tuple(sorted(overrides.items())))
        if key not in built:
            built[key] = families.build(family, seed, **overrides)
        return built[key]

    return model


@pytest.fixture(scope="session")
def folder_of(hugging_face, tmp_path_factory):
    """`folder_of(family, **overrides)`: the same model saved to disk, once. Do not change it."""
    saved = {}

    def folder(family: str, seed: int = 0, **overrides) -> Path:
        key = (family, seed, tuple(sorted(overrides.items())))
        if key not in saved:
            model = hugging_face(family, seed, **overrides)
            saved[key] = families.save(model, tmp_path_factory.mktemp(family))
        return saved[key]

    return folder


@pytest.fixture(scope="session")
def backbone_of(folder_of):
    """`backbone_of(family, **overrides)`: the backbone read from that family's saved folder."""
    loaded = {}

    def backbone(family: str, seed: int = 0, **overrides) -> Backbone:
        key = (family, seed, tuple(sorted(overrides.items())))
        if key not in loaded:
            loaded[key] = load_backbone(folder_of(family, seed, **overrides))
        return loaded[key]

    return backbone
