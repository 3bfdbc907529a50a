"""Training on what `engram batch --keep` kept, with a table of labels and without the photos."""

import shutil

import numpy as np
import pytest
from engram_server.batch.run import run_batch
from engram_server.batch.setup import BatchOptions, Keep
from engram_server.engine.types import EngineConfig
from engram_server.errors import TaskMismatch
from engram_server.model import load_backbone
from engram_training.errors import DataError, SettingsConflict
from engram_training.run import fit

from tests.training.pictures import class_folders

TRAINED = {"memory": (2,), "rates": (0.03,), "epochs": 2, "batch": 8, "augment": "none"}


@pytest.fixture(scope="module")
def backbone(folder_of):
    return load_backbone(folder_of("vit"))


@pytest.fixture
def photos(tmp_path):
    """Class folders, and a table of their paths and labels that stays."""
    folder = class_folders(tmp_path / "colours", each=10)
    paths = sorted(folder.glob("*/*"))
    lines = [f"colours/{path.relative_to(folder)},{path.parent.name}" for path in paths]
    (tmp_path / "labels.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    return folder


@pytest.fixture
def kept(backbone, photos, tmp_path):
    def keep(level):
        target = tmp_path / level
        options = BatchOptions(str(photos), keep=Keep(level, target), part_images=7)
        run_batch(options, EngineConfig(), lambda: backbone, None)
        return target

    return keep


@pytest.mark.parametrize(("level", "regime"), [("summaries", "layers"), ("contexts", "memory")])
def test_kept_tensors_train_the_task_of_the_photos(backbone, photos, kept, tmp_path, level, regime):
    table = tmp_path / "labels.csv"
    options = {**TRAINED, "regimes": (regime,)}
    expected = fit(table, name="colours", backbone=backbone, **options)
    folder = kept(level)
    shutil.rmtree(photos)
    fitted = fit(table, name="colours", backbone=backbone, kept=folder, **options)
    assert fitted.bundle.labels == expected.bundle.labels
    assert fitted.bundle.tensors.keys() == expected.bundle.tensors.keys()
    for name, tensor in fitted.bundle.tensors.items():
        if name.startswith("head"):
            assert np.allclose(tensor, expected.bundle.tensors[name], atol=0.05, rtol=0.05), name
    for split, figures in fitted.figures.items():
        assert figures.images == expected.figures[split].images


def test_summaries_leave_out_task_rows_and_say_so(backbone, photos, kept, tmp_path):
    folder = kept("summaries")
    shutil.rmtree(photos)
    out = tmp_path / "task.safetensors"
    fitted = fit(
        tmp_path / "labels.csv", name="colours", backbone=backbone, kept=folder, out=out,
        epochs=1, batch=8,
    )  # fmt: skip
    assert out.exists()
    assert not any(variant.has_row for variant in fitted.variants)
    with pytest.raises(SettingsConflict, match="tasks with a row read contexts"):
        fit(
            tmp_path / "labels.csv", name="colours", backbone=backbone, kept=folder,
            regimes=("memory",),
        )  # fmt: skip


def test_images_that_were_not_kept_are_reported(backbone, photos, kept, tmp_path):
    folder = kept("summaries")
    table = tmp_path / "labels.csv"
    table.write_text(table.read_text() + "colours/nowhere.png,red\n")
    fitted = fit(table, name="colours", backbone=backbone, kept=folder, fast=True)
    (skipped,) = fitted.skipped
    assert (skipped.path.name, skipped.reason) == ("nowhere.png", f"not in '{folder}'")
    table.write_text("path,label\nnowhere.png,red\nelsewhere.png,blue\n")
    with pytest.raises(DataError, match="No training image"):
        fit(table, name="colours", backbone=backbone, kept=folder, fast=True)


def test_folders_that_cannot_serve_are_rejected(backbone, photos, kept, tmp_path):
    table, folder = tmp_path / "labels.csv", kept("embeddings")
    with pytest.raises(SettingsConflict, match="training reads summaries or contexts"):
        fit(table, name="colours", backbone=backbone, kept=folder)
    with pytest.raises(SettingsConflict, match="need the photos"):
        fit(table, name="colours", backbone=backbone, kept=folder, augment="clip")
    manifest = folder / "_manifest.json"
    manifest.write_text(manifest.read_text().replace(backbone.fingerprint, "sha256:00"))
    with pytest.raises(TaskMismatch, match="fingerprint was"):
        fit(table, name="colours", backbone=backbone, kept=folder)
