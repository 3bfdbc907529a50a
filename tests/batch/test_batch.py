"""Rows of a batch run: the answers of /predict, one row per image, whatever the images are."""

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from engram_server.app import engine_config
from engram_server.batch import passing
from engram_server.batch.run import run_batch
from engram_server.batch.setup import BatchOptions
from engram_server.errors import SettingsError, TaskMismatch
from engram_store import NotFound, Retire

from tests.batch.conftest import TASKS, rows_of
from tests.bundles import OTHER_FINGERPRINT, with_tensors
from tests.serving import photo


def predicted(client, path, query=""):
    response = client.post(f"/predict?tasks={','.join(TASKS)}{query}", content=path.read_bytes())
    (image,) = response.json()["images"]
    return image


def near(value):
    return pytest.approx(value, abs=1e-5)


def half(value):
    return pytest.approx(value, rel=1e-3, abs=1e-3)


def test_rows_equal_the_answers_of_the_server(run, client, photos):
    rows = run(photos)
    paths = [*sorted(photos.glob("a/*.png")), *sorted(photos.glob("b/*.png"))]
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    for row, path in zip(rows, paths, strict=True):
        image = predicted(client, path)
        assert row["digest"] == image["digest"]
        assert row["size_bytes"] == path.stat().st_size
        assert (row["width"], row["height"]) == (30 + int(path.stem), 40)
        assert row["error"] is None
        for task in ("pets", "known", "unknown"):
            answer = image["tasks"][task]
            best = answer["predictions"][0]
            assert row[f"{task}_label"] == best["label"]
            assert row[f"{task}_score"] == near(best["score"])
            assert row[f"{task}_in_distribution"] is answer.get("in_distribution")
        scene = image["tasks"]["scene"]["predictions"]
        assert row["scene_labels"] == [one["label"] for one in scene]
        assert row["scene_scores"] == near([one["score"] for one in scene])
        assert row["age_value"] == near(image["tasks"]["age"]["values"][0])
        assert row["face_embedding"] == half(image["tasks"]["face"]["embedding"])
    assert {row["unknown_in_distribution"] for row in rows} == {False}
    assert {row["known_in_distribution"] for row in rows} == {True}


@pytest.mark.parametrize("output", ["logits", "embedding"])
def test_vectors_are_fixed_size_lists_of_half_floats(run, client, photos, tmp_path, output):
    rows = run(photos / "a", output=output)
    image = predicted(client, photos / "a" / "0.png", f"&return={output}")
    schema = pyarrow.parquet.read_schema(tmp_path / "out" / "part-00000.parquet")
    for task in TASKS:
        expected = image["tasks"][task][output]
        assert rows[0][f"{task}_{output}"] == half(expected)
        kind = schema.field(f"{task}_{output}").type
        assert (kind.list_size, str(kind.value_type)) == (len(expected), "halffloat")


def test_threshold_selects_labels(run, photos):
    assert {len(row["scene_labels"]) for row in run(photos, tasks=["scene"], threshold=0)} == {3}


def test_base_is_a_task(run, photos):
    assert all(row["base_label"] for row in run(photos, tasks=["base"]))


def test_bad_files_have_an_error_and_the_others_an_answer(run_pets, photos, tmp_path):
    source = tmp_path / "mixed"
    source.mkdir()
    (source / "1-good.png").write_bytes(photo(1))
    (source / "2-text.png").write_text("this is not an image")
    (source / "3-cut.png").write_bytes(photo(3)[:-500])
    (source / "4-large.png").write_bytes(photo(4, (1001, 1000)))
    (source / "5-good.png").write_bytes(photo(1))
    (source / "6-gone.png").symlink_to(source / "nowhere")
    good, text, cut, large, same, gone = run_pets(source)
    assert good["error"] is same["error"] is None
    assert good["pets_label"] == same["pets_label"]
    assert good["pets_score"] == near(same["pets_score"])
    for row in (text, cut, large, gone):
        assert row["error"]
        assert row["pets_label"] is row["pets_score"] is row["pets_in_distribution"] is None
    assert "1001" in large["error"]
    assert gone["error"] == "The file does not exist."
    assert text["digest"].startswith("sha256:")
    assert gone["digest"] is None


def test_file_name_that_is_not_utf8_is_written_with_replacements(run_pets, tmp_path):
    (tmp_path / "names").mkdir()
    Path(os.fsdecode(os.fsencode(tmp_path / "names") + b"/caf\xe9.png")).write_bytes(photo())
    (row,) = run_pets(tmp_path / "names")
    assert row["path"].endswith("caf?.png")
    assert row["pets_label"]


def test_half_floats_never_overflow(run, world, photos):
    bundle = world.bundle(80, task_type="regression", golden=False)
    weights = {"head.weight": bundle.tensors["head.weight"] * np.float32(1e8)}
    world.store.publish("large", with_tensors(bundle, weights))
    for row in run(photos, tasks=["large"], output="logits"):
        assert np.abs(row["large_logits"]).max() == 65504
        assert np.abs(row["large_values"]).max() > 1e5


def test_part_with_only_bad_files_is_written(run_pets, tmp_path):
    source = tmp_path / "bad"
    source.mkdir()
    for number in range(6):
        (source / f"{number}.png").write_text("no")
    assert len([row["error"] for row in run_pets(source) if row["error"]]) == 6


def test_answer_that_is_not_finite_is_an_error_of_its_task(run, world, photos, monkeypatch):
    masked_pass = passing.masked_pass

    def broken(*args, **options):
        result = masked_pass(*args, **options)
        if len(result.logits) > 1:  # not the replay of golden examples
            result.logits[0].values[0] = float("nan")
        return result

    monkeypatch.setattr(passing, "masked_pass", broken)
    rows = run(photos / "a", tasks=["pets", "age"], part_images=100)
    failed = [row for row in rows if row["error"]]
    assert len(failed) in range(1, len(rows))
    for row in failed:
        assert "not finite" in row["error"]
        assert (row["pets_label"] is None) != (row["age_value"] is None)


def test_csv_has_the_same_rows(run, photos, tmp_path):
    rows = run(photos, output="logits")
    run(photos, output="logits", out=tmp_path / "csv", file_format="csv")
    parts = sorted((tmp_path / "csv").glob("part-*.csv"))
    assert len(parts) == 3
    read = [row for part in parts for row in csv.DictReader(part.read_text().splitlines())]
    assert len(read) == len(rows)
    for row, text in zip(rows, read, strict=True):
        assert list(text) == list(row)
        assert text["path"] == row["path"]
        assert text["error"] == ""
        assert float(text["pets_score"]) == near(row["pets_score"])
        assert json.loads(text["scene_labels"]) == row["scene_labels"]
        assert text["pets_in_distribution"] == ""
        assert text["known_in_distribution"] == "true"
        assert json.loads(text["pets_logits"]) == row["pets_logits"]


def test_bundle_files_need_no_store(world, photos, tmp_path):
    parent = world.bundle(20, name="parent")
    child = world.bundle(21, name="team/child", extends=(parent,))
    for name, bundle in (("one", parent), ("two", child)):
        (tmp_path / f"{name}.safetensors").write_bytes(bundle.to_bytes())

    def run(*names):
        options = BatchOptions(
            str(photos), tmp_path / "out", bundles=[tmp_path / f"{n}.safetensors" for n in names]
        )
        run_batch(options, engine_config(world.settings), lambda: world.backbone, None)

    with pytest.raises(SettingsError, match=r"extends the bundle sha256:.*Pass that bundle"):
        run("two")
    with pytest.raises(SettingsError, match="'parent' is listed twice"):
        run("one", "one")
    run("one", "two")
    rows = rows_of(tmp_path / "out")
    assert all(row["parent_label"] and row["team/child_label"] for row in rows)
    with pytest.raises(SettingsError, match="No task"):
        run()


def test_references_to_versions_and_aliases(run, world, photos, tmp_path):
    first, second = world.bundle(30), world.bundle(31)
    world.store.publish("several", first)
    world.store.publish("several", second, aliases=["canary"])
    rows = run(photos, tasks=["several", "several@1", "several:canary", "several@2"])
    for row in rows:
        assert row["several_score"] == row["several@1_score"]
        assert row["several:canary_score"] == row["several@2_score"]
    assert rows[0]["several_score"] != rows[0]["several:canary_score"]
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert manifest["tasks"]["several:canary"] == {
        "task": "several",
        "version": 2,
        "digest": second.digest,
    }
    assert manifest["backbone"]["fingerprint"] == world.backbone.fingerprint


@pytest.mark.parametrize("problem", ["backbone", "golden"])
def test_tasks_are_validated_as_the_server_does(run, world, photos, tmp_path, problem):
    bundle = world.bundle(40)
    if problem == "golden":
        bundle = with_tensors(bundle, {"golden.logits": bundle.tensors["golden.logits"] + 1})
        message = "golden answers differ"
    else:
        other = bundle.manifest.backbone.model_copy(update={"fingerprint": OTHER_FINGERPRINT})
        manifest = bundle.manifest.model_copy(update={"backbone": other})
        bundle = with_tensors(bundle, {}, manifest)
        message = "fingerprint|another backbone"
    (tmp_path / "wrong.safetensors").write_bytes(bundle.to_bytes())
    with pytest.raises(TaskMismatch, match=f"Task 'wrong' cannot run: .*({message})"):
        run(photos, tasks=[], bundles=[tmp_path / "wrong.safetensors"])
    assert not (tmp_path / "out").exists()


def test_retired_task_is_named(run, world, photos):
    world.store.publish("leaving", world.bundle(50))
    world.store.commit(Retire("leaving"))
    with pytest.raises(NotFound, match="leaving"):
        run(photos, tasks=["leaving"])


def test_several_devices_give_the_same_rows(run, world, photos, tmp_path):
    one = run(photos)
    config = replace(engine_config(world.settings), devices=("cpu", "cpu", "cpu"))
    several = run(photos, out=tmp_path / "several", config=config)
    assert several == one
    assert np.isfinite([row["pets_score"] for row in one]).all()
