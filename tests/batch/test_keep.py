"""`--keep`: new tasks over what the backbone computed, without the photos."""

import errno
import json
import shutil

import numpy as np
import pytest
import torch
from engram_server.batch.setup import Keep
from engram_server.errors import SettingsError, TaskMismatch, UnreadableSource, UnusableOutput
from engram_server.parts import keeping
from engram_server.parts.kept import LEVELS, KeptFolder

from tests.bundles import with_tensors
from tests.serving import photo

# What half precision of kept tensors changes in scores of this backbone; documented as 1e-3.
near = lambda value: pytest.approx(value, abs=2e-3)  # noqa: E731


@pytest.fixture(scope="module", autouse=True)
def kept_tasks(world):
    """Tasks that read the class token, layers, and a row of their own."""
    world.store.publish("token", world.bundle(90, memory=-1))
    layered = world.bundle(91, memory=-1, golden=False)
    layers = world.backbone.summary_layers
    shape = (len(layered.labels), len(layers), *world.backbone.summary_shape[1:])
    weight = np.random.default_rng(91).standard_normal(shape).astype(np.float32) / 8
    manifest = layered.manifest.model_copy(update={"layers": layers})
    world.store.publish("layers", with_tensors(layered, {"layers.weight": weight}, manifest))


SERVED = {
    "embeddings": ["token", "base"],
    "summaries": ["token", "base", "layers"],
    "contexts": ["token", "base", "layers", "pets", "scene", "known"],
}


@pytest.fixture
def source(tmp_path):
    """Ten photos and two files that cannot be read."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.png").write_bytes(photo(number, (40, 30 + number)))
    (folder / "05.png").write_text("not an image")
    (folder / "08.png").write_text("not an image either")
    return folder


def assert_near(rows, expected):
    assert len(rows) == len(expected)
    for row, other in zip(rows, expected, strict=True):
        assert list(row) == list(other)
        for name, value in row.items():
            if name.endswith(("_score", "_scores", "_logits")) and value is not None:
                assert value == near(other[name]), name
            else:
                assert value == other[name], name


@pytest.mark.parametrize("level", LEVELS)
def test_kept_tensors_give_the_rows_of_the_photos(run, source, tmp_path, level):
    tasks = SERVED[level]
    expected = run(source, tasks=tasks, output="logits")
    kept = tmp_path / "kept"
    run(source, tasks=["pets"], keep=Keep(level, kept), out=tmp_path / "pets")
    shutil.rmtree(source)
    assert_near(run(kept, tasks=tasks, output="logits", out=tmp_path / "new"), expected)


def test_keeping_needs_no_tasks_and_does_not_change_the_rows(run, world, source, tmp_path):
    alone, beside = Keep("contexts", tmp_path / "alone"), Keep("contexts", tmp_path / "beside")
    run(source, tasks=[], out=None, keep=alone)
    assert_near(run(source, keep=beside), run(source, out=tmp_path / "plain"))
    tensors = [sorted(each.folder.glob("part-*.npy")) for each in (alone, beside)]
    assert [path.name for path in tensors[0]] == [path.name for path in tensors[1]]
    for pair in zip(*tensors, strict=True):
        one, other = (np.load(path).astype(np.float32) for path in pair)
        assert np.allclose(one, other, atol=4e-3)
    folder = KeptFolder.open(alone.folder)
    assert (len(folder), folder.parts) == (12, 3)
    assert folder.image(5)["error"]
    assert not folder.readouts([5]).any()
    with pytest.raises(SettingsError, match="No folder for the rows"):
        run(source, tasks=["pets"], out=None, keep=alone)
    with pytest.raises(SettingsError, match="Use two folders"):
        run(source, tasks=["pets"], out=alone.folder, keep=alone)
    with pytest.raises(SettingsError, match="has kept tensors already"):
        run(alone.folder, tasks=[], out=None, keep=beside)


def test_tasks_that_need_more_are_named_before_work_begins(run, source, tmp_path):
    kept = tmp_path / "kept"
    run(source, tasks=[], out=None, keep=Keep("embeddings", kept))
    with pytest.raises(TaskMismatch) as error:
        run(kept, tasks=["token", "layers", "pets"])
    said = str(error.value)
    assert "has embeddings, but 'layers' needs summaries, 'pets' needs contexts" in said
    assert "--keep contexts" in said
    assert not (tmp_path / "out").exists()


def test_other_backbones_and_precisions_are_rejected(run, world, source, tmp_path):
    kept = tmp_path / "kept"
    run(source, tasks=[], out=None, keep=Keep("summaries", kept))
    manifest = json.loads((kept / "_manifest.json").read_text())
    assert manifest["backbone"]["fingerprint"] == world.backbone.fingerprint
    for name, value in (("precision", "int8"), ("fingerprint", "sha256:00")):
        changed = {**manifest, "backbone": {**manifest["backbone"], name: value}}
        (kept / "_manifest.json").write_text(json.dumps(changed))
        with pytest.raises(TaskMismatch, match=rf"{name} was \"{value}\" and is now"):
            run(kept, tasks=["token"])


def test_only_missing_parts_are_computed_and_the_result_is_the_same(run, source, tmp_path):
    keep, whole = Keep("contexts", tmp_path / "kept"), Keep("contexts", tmp_path / "whole")
    run(source, tasks=[], out=None, keep=whole)
    run(source, tasks=[], out=None, keep=keep)
    (keep.folder / "part-00001.csv").unlink()  # killed before the part was complete
    (keep.folder / "part-00002.csv").unlink()
    (keep.folder / "part-00002.states.npy").unlink()
    (keep.folder / ".part-00002.states.npy.part").write_bytes(b"half written")
    with pytest.raises(UnreadableSource, match="2 of 3 parts are missing"):
        run(keep.folder, tasks=["pets"])
    run(source, tasks=[], out=None, keep=keep)
    names = [path.name for path in sorted(keep.folder.iterdir())]
    assert names == [path.name for path in sorted(whole.folder.iterdir())]
    for name in names:
        assert (keep.folder / name).read_bytes() == (whole.folder / name).read_bytes(), name


def test_rows_and_tensors_continue_together(run, source, tmp_path):
    keep = Keep("summaries", tmp_path / "kept")
    rows = run(source, tasks=["pets"], keep=keep)
    (tmp_path / "out" / "part-00001.parquet").unlink()
    (keep.folder / "part-00002.csv").unlink()
    assert run(source, tasks=["pets"], keep=keep) == rows
    KeptFolder.open(keep.folder)


def test_full_disk_is_explained_and_leaves_no_half_part(run, source, tmp_path, monkeypatch):
    keep = Keep("contexts", tmp_path / "kept")
    write = keeping._ArrayFile.write

    def full(self, places, rows):
        if self.path.name == "part-00001.states.npy":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, places, rows)

    with monkeypatch.context() as patch:
        patch.setattr(keeping._ArrayFile, "write", full)
        with pytest.raises(UnusableOutput, match=r"No space left on device.*same command again"):
            run(source, tasks=[], out=None, keep=keep)
    names = {path.name for path in keep.folder.iterdir()}
    parts = {f"part-00000.{suffix}" for suffix in ("csv", "readouts.npy", "states.npy")}
    assert names == {"_manifest.json", *parts}
    run(source, tasks=[], out=None, keep=keep)
    assert len(KeptFolder.open(keep.folder)) == 12


def test_other_inputs_are_rejected_and_restart_deletes_tensors(run, source, tmp_path):
    keep = Keep("contexts", tmp_path / "kept")
    run(source, tasks=[], out=None, keep=keep)
    with pytest.raises(UnusableOutput) as error:
        run(source, tasks=[], out=None, keep=Keep("embeddings", keep.folder))
    assert 'kept.level was "contexts" and is now "embeddings"' in str(error.value)
    assert "choose another --keep" in str(error.value)
    run(source, tasks=[], out=None, keep=Keep("embeddings", keep.folder), restart=True)
    assert not list(keep.folder.glob("*.states.npy"))
    assert KeptFolder.open(keep.folder).level == "embeddings"


def test_values_beyond_half_precision_stay_finite():
    made = keeping._halves(torch.tensor([1e9, -1e9, 0.5]))
    assert made.tolist() == [65504, -65504, 0.5]


def test_folder_without_tensors_is_named(tmp_path):
    with pytest.raises(UnreadableSource, match="has no kept tensors"):
        KeptFolder.open(tmp_path)


def test_damaged_tensors_are_named(run, source, tmp_path):
    keep = Keep("embeddings", tmp_path / "kept")
    run(source, tasks=[], out=None, keep=keep)
    (keep.folder / "part-00001.readouts.npy").write_bytes(b"")
    with pytest.raises(
        UnreadableSource, match=r"part-00001.readouts.npy'.*writes the folder again"
    ):
        run(keep.folder, tasks=["token"])


def test_numpy_reads_the_arrays(run, source, tmp_path):
    keep = Keep("contexts", tmp_path / "kept")
    run(source, tasks=[], out=None, keep=keep)
    folder = KeptFolder.open(keep.folder)
    for part in range(3):
        loaded = np.load(keep.folder / f"part-{part:05}.readouts.npy", mmap_mode="r")
        assert (loaded == folder.readouts(range(4 * part, 4 * part + 4))).all()
