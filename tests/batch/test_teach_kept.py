"""`engram teach --kept`: taught tasks from kept summaries, without the photos."""

import base64
import shutil

import numpy as np
import pytest
import typer
from engram_bundle import TaskBundle
from engram_server.batch.setup import Keep
from engram_server.commands.teach_kept import teach_kept
from engram_server.engine.taught_bundle import examples_of
from engram_server.errors import TaskMismatch, UnteachableExamples
from engram_vit.commands import plugins
from engram_vit.commands.teach import teach
from engram_vit.errors import UsageError
from typer.testing import CliRunner

from tests.serving import photo


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.png").write_bytes(photo(number))
    (folder / "bad.png").write_text("not an image")
    return folder


@pytest.fixture
def kept(run, source, tmp_path, folder_of, monkeypatch):
    monkeypatch.setenv("ENGRAM_BACKBONE", str(folder_of("vit")))
    monkeypatch.setenv("ENGRAM_DEVICES", "cpu")
    run(source, tasks=[], out=None, keep=Keep("summaries", tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def table(tmp_path):
    def write(rows):
        path = tmp_path / "labels.csv"
        path.write_text("path,label\n" + "".join(f"{name},{label}\n" for name, label in rows))
        return str(path)

    return write


EVEN = [(f"{number}.png", "odd" if number % 2 else "even") for number in range(8)]


def test_table_of_kept_photos_becomes_the_task_that_the_photos_teach(
    world, client, kept, source, table
):
    image = (source / "3.png").read_bytes()
    made = TaskBundle.from_bytes(teach_kept(str(kept), table(EVEN), "parity"))
    shutil.rmtree(source)
    examples = examples_of(made)
    assert (len(examples), examples.labels) == (8, ("even", "odd"))
    assert [one.name for one in examples.media] != [""] * 8
    world.store.publish("parity", made)
    world.engine.tasks.sync()
    answer = client.post("/predict?tasks=parity", content=image)
    assert answer.status_code == 200, answer.text
    predictions = answer.json()["images"][0]["tasks"]["parity"]["predictions"]
    assert {one["label"] for one in predictions} <= {"even", "odd"}


def test_examples_are_added_to_a_task_that_was_taught(kept, table):
    first = teach_kept(str(kept), table(EVEN[:4]), "parity", description="Even or odd")
    again = teach_kept(str(kept), table([*EVEN[4:], ("0.png", "odd")]), "parity", before=first)
    whole = teach_kept(
        str(kept), table([("0.png", "odd"), *EVEN[1:]]), "parity", description="Even or odd"
    )
    assert again == whole, "the same examples give the same bytes"


def test_features_are_those_that_teaching_with_photos_keeps(world, client, kept, source, table):
    examples = [
        {"b64": base64.b64encode((source / name).read_bytes()).decode(), "labels": [label]}
        for name, label in EVEN
    ]
    sent = client.post("/tasks/by-photos/examples", json={"examples": examples})
    assert sent.status_code == 201, sent.text
    by_photos = examples_of(
        world.store.read_bundle(world.store.refresh().resolve("by-photos").digest)
    )
    by_kept = examples_of(TaskBundle.from_bytes(teach_kept(str(kept), table(EVEN), "x")))
    assert (by_kept.digests == by_photos.digests).all()
    assert (by_kept.targets == by_photos.targets).all()
    assert np.allclose(
        by_kept.features.astype(np.float32), by_photos.features.astype(np.float32), atol=5e-3
    )


def test_what_cannot_be_taught_is_explained(world, run, kept, source, table, tmp_path):
    for rows, said in (
        ([("nowhere.png", "x")], r"Line 2 of '.*labels.csv', 'nowhere.png': not in"),
        ([("0.png", "x"), ("bad.png", "y")], r"Line 3 of .*, 'bad.png': "),
    ):
        with pytest.raises(UsageError, match=said):
            teach_kept(str(kept), table(rows), "parity")
    (tmp_path / "other.csv").write_text("image,class\n")
    with pytest.raises(UsageError, match="no columns 'path' and 'label'"):
        teach_kept(str(kept), str(tmp_path / "other.csv"), "parity")
    with pytest.raises(UnteachableExamples, match="is trained"):
        teach_kept(str(kept), table(EVEN), "pets", before=world.bundles["pets"].to_bytes())
    run(source, tasks=[], out=None, keep=Keep("embeddings", tmp_path / "small"))
    with pytest.raises(
        UnteachableExamples, match="has embeddings, but taught tasks read summaries"
    ):
        teach_kept(str(tmp_path / "small"), table(EVEN), "parity")
    manifest = kept / "_manifest.json"
    manifest.write_text(manifest.read_text().replace(world.backbone.fingerprint, "sha256:00"))
    with pytest.raises(TaskMismatch, match="fingerprint was"):
        teach_kept(str(kept), table(EVEN), "parity")


def test_client_without_the_server_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(plugins, "entry_points", lambda **chosen: ())
    app = typer.Typer()
    app.command()(teach)
    arguments = ["labels.csv", "--name", "parity", "--kept", str(tmp_path), "--new"]
    with pytest.raises(UsageError, match="requires the server: pip install"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
