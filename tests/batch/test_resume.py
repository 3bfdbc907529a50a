"""A run that was stopped continues: the same rows, none twice, none missing."""

import errno
import json
import os
import subprocess
import sys

import pytest
from engram_server.batch import images, pipeline
from engram_server.errors import UnreadableSource, UnusableOutput
from engram_server.parts import output
from engram_store import NotFound, Restore, Retire

from tests.batch.conftest import rows_of
from tests.serving import photo

# Random moments of `kill -9`: a few here, and `KILLS=20` for a whole check.
MOMENTS = int(os.environ.get("KILLS", "6"))

# Imports once and forks for each run, because importing torch takes longer than all runs.
KILLED_RUNS = """if True:
    import os, random, signal, sys, time
    from pathlib import Path
    from engram_server.batch.run import run_batch
    from engram_server.batch.setup import BatchOptions, Keep
    from engram_server.engine.types import EngineConfig
    from engram_server.model import load_backbone

    backbone, photos, bundle, out, moments = sys.argv[1:]
    loaded = load_backbone(backbone)
    config = EngineConfig(decode_threads=2, budget_rows=64)
    dice = random.Random(26)

    def start(folder):
        child = os.fork()
        if child == 0:
            options = BatchOptions(
                photos, Path(folder), bundles=[Path(bundle)], part_images=3,
                keep=Keep("contexts", Path(f"{folder}-kept")),
            )
            run_batch(options, config, lambda: loaded, None)
            os._exit(0)
        return child

    def parts():
        return len(list(Path(out).glob("part-*.parquet")))

    killed = 0
    for _ in range(int(moments)):
        enough, child, ended = parts() + dice.randrange(4), start(out), (0, 0)
        while parts() < enough and ended == (0, 0):
            ended = os.waitpid(child, os.WNOHANG)
        if ended != (0, 0):
            break
        time.sleep(dice.random() * 0.02)  # anywhere between two parts
        os.kill(child, signal.SIGKILL)
        killed += os.waitpid(child, 0)[1] == signal.SIGKILL
    print(killed, flush=True)
    for folder in (out, f"{out}-whole"):
        assert os.waitpid(start(folder), 0)[1] == 0
"""


@pytest.mark.long
def test_run_killed_at_any_moment_continues_to_the_same_rows(world, folder_of, tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(20 * MOMENTS):
        (photos / f"{number:03}.png").write_bytes(photo(number))
    (photos / "050.png").write_text("not an image")
    bundle = tmp_path / "task.safetensors"
    bundle.write_bytes(world.bundle(60).to_bytes())
    command = [sys.executable, "-c", KILLED_RUNS, folder_of("vit"), photos, bundle]
    done = subprocess.run(
        [*map(str, command), str(tmp_path / "out"), str(MOMENTS)],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip(), "runs were killed")
    assert int(done.stdout) >= MOMENTS // 2, "runs were killed before they ended"
    rows = rows_of(tmp_path / "out")
    assert [row["path"] for row in rows] == [str(path) for path in sorted(photos.iterdir())]
    assert rows == rows_of(tmp_path / "out-whole")
    kept = sorted((tmp_path / "out-kept").iterdir())
    whole = sorted((tmp_path / "out-whole-kept").iterdir())
    assert [path.name for path in kept] == [path.name for path in whole]
    for one, other in zip(kept, whole, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    left = [*(tmp_path / "out").glob(".*"), *(tmp_path / "out-kept").glob(".*")]
    assert not left, "nothing is left of parts half written"


@pytest.mark.parametrize("file_format", ["parquet", "csv"])
def test_only_missing_parts_are_computed(run_pets, photos, tmp_path, monkeypatch, file_format):
    run_pets(photos, file_format=file_format)
    parts = sorted((tmp_path / "out").glob("part-*"))
    assert len(parts) == 3
    before = [part.stat().st_mtime_ns for part in (parts[0], parts[2])]
    parts[1].unlink()
    decoded = []
    decode = images.Decoder.__call__
    monkeypatch.setattr(
        images.Decoder,
        "__call__",
        lambda self, source, index: decoded.append(index) or decode(self, source, index),
    )
    run_pets(photos, file_format=file_format)
    assert sorted(decoded) == [4, 5, 6, 7]
    assert [part.stat().st_mtime_ns for part in (parts[0], parts[2])] == before
    assert parts[1].exists()


def test_full_disk_is_explained_and_the_run_continues(run_pets, photos, tmp_path, monkeypatch):
    write = output.write_whole

    def full(target, data):
        if target.name == "part-00001.parquet":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(target, data)

    with monkeypatch.context() as patch:
        patch.setattr(output, "write_whole", full)
        with pytest.raises(UnusableOutput, match=r"No space left on device.*same command again"):
            run_pets(photos)
    assert len(rows_of(tmp_path / "out")) == 4
    rows = run_pets(photos)
    assert rows == run_pets(photos, out=tmp_path / "whole")


def test_source_that_fails_stops_the_run_which_then_continues(run_pets, tmp_path, monkeypatch):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(40):
        (photos / f"{number:02}.png").write_bytes(photo(number))
    write = output.write_whole

    def unmount(target, data):
        if target.name == "part-00000.parquet":
            photos.rename(tmp_path / "unmounted")
        return write(target, data)

    with monkeypatch.context() as patch:
        patch.setattr(output, "write_whole", unmount)
        with pytest.raises(UnreadableSource, match="does not exist any more"):
            run_pets(photos)
    assert rows_of(tmp_path / "out")
    (tmp_path / "unmounted").rename(photos)
    rows = run_pets(photos)
    assert len(rows) == 40
    assert not any(row["error"] for row in rows)


def test_other_inputs_are_rejected_and_named(run, world, photos, tmp_path):
    world.store.publish("moving", world.bundle(61))
    source = tmp_path / "photos"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.png").write_bytes(photo(number))
    run(source, tasks=["moving"])
    for options, change in (
        ({"output": "logits"}, 'options.output was "scores" and is now "logits"'),
        ({"tasks": ["pets"]}, "tasks.moving was "),
        ({"part_images": 5}, "options.part_images was 4 and is now 5"),
        ({"threshold": 0.1}, "options.threshold was 0.5 and is now 0.1"),
    ):
        with pytest.raises(UnusableOutput) as error:
            run(source, **{"tasks": ["moving"], **options})
        assert change in str(error.value)
        assert "--restart" in str(error.value)
    (source / "new.png").write_bytes(photo(7))
    with pytest.raises(UnusableOutput, match=r"source\.images was 3 and is now 4"):
        run(source, tasks=["moving"])
    (source / "new.png").unlink()
    world.store.publish("moving", world.bundle(62))
    with pytest.raises(UnusableOutput, match=r"tasks\.moving\.version was 1 and is now 2"):
        run(source, tasks=["moving"])
    assert list(run(source, tasks=["moving@1"])[0])[-1] == "moving_in_distribution"
    world.store.commit(Retire("moving"))
    with pytest.raises(NotFound, match="retired"):
        run(source, tasks=["moving@1"])
    world.store.commit(Restore("moving"))
    assert len(run(source, tasks=["moving"], restart=True)) == 3
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert manifest["tasks"]["moving"]["version"] == 2


def test_restart_replaces_the_parts_of_another_format(run_pets, photos, tmp_path):
    run_pets(photos, file_format="csv")
    assert len(run_pets(photos, restart=True, part_images=100)) == 10
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"_manifest.json", "part-00000.parquet"}


def test_parts_without_a_manifest_and_damaged_manifests_are_rejected(run_pets, photos, tmp_path):
    run_pets(photos)
    manifest = tmp_path / "out" / "_manifest.json"
    manifest.write_text("{")
    with pytest.raises(UnusableOutput, match=r"_manifest.json' is damaged.*--restart"):
        run_pets(photos)
    manifest.unlink()
    with pytest.raises(UnusableOutput, match=r"has part files and no _manifest.json"):
        run_pets(photos)


def test_second_run_at_the_same_time_is_rejected(run_pets, photos, tmp_path, monkeypatch):
    write = output.write_whole

    def write_during_another_run(target, data):
        with pytest.raises(UnusableOutput, match="Another run is writing"):
            run_pets(photos)
        return write(target, data)

    with monkeypatch.context() as patch:
        patch.setattr(output, "write_whole", write_during_another_run)
        run_pets(photos)
    assert len(run_pets(photos)) == 10


def test_output_that_cannot_be_created_is_named(run_pets, photos, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnusableOutput, match=r"Cannot write '.*file/out'"):
        run_pets(photos, out=tmp_path / "file" / "out")


def test_images_decoded_ahead_are_bounded(run_pets, tmp_path, monkeypatch):
    photos = tmp_path / "photos"
    photos.mkdir()
    for number in range(150):
        (photos / f"{number:03}.png").write_bytes(photo(0))
    ahead = []
    decoded = 0
    decode, predict = images.Decoder.__call__, pipeline.Predictor.__call__
    predicted = 0

    def count_decoded(self, source, index):
        nonlocal decoded
        decoded += 1
        ahead.append(decoded - predicted)
        return decode(self, source, index)

    def count_predicted(self, batch):
        nonlocal predicted
        answered = predict(self, batch)
        predicted += len(batch.images)
        return answered

    monkeypatch.setattr(images.Decoder, "__call__", count_decoded)
    monkeypatch.setattr(pipeline.Predictor, "__call__", count_predicted)
    assert len(run_pets(photos, part_images=150)) == 150
    assert max(ahead) < 50, "a few batches of at most six images"


def test_task_retired_in_between_is_named_and_the_run_continues_after_it_is_restored(
    run, world, photos, tmp_path
):
    world.store.publish("between", world.bundle(63))
    rows = run(photos, tasks=["between"])
    (tmp_path / "out" / "part-00001.parquet").unlink()
    world.store.commit(Retire("between"))
    with pytest.raises(NotFound, match="retired"):
        run(photos, tasks=["between"])
    assert len(rows_of(tmp_path / "out")) == 6
    world.store.commit(Restore("between"))
    assert run(photos, tasks=["between"]) == rows
