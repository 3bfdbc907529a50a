"""`fit`: from pictures to a bundle that answers as its report says, whatever gets in between."""

import functools
import json
import os
import signal
import subprocess
import sys
import time

import engram_training
import numpy as np
import pytest
import torch
from engram_bundle import GOLDEN_TOLERANCE, TaskBundle
from engram_server.model import MultiTaskViT, load_backbone
from engram_server.model.masked_pass import masked_pass
from engram_server.model.preprocessing.pipeline import golden_pixels
from engram_server.model.tasks import StackCache
from engram_training.bundles import load_tasks
from engram_training.data.workspace import Watcher
from engram_training.errors import CannotResume, CannotWrite, DataError, SettingsConflict
from engram_training.fitting import checkpoint
from engram_training.fitting.checkpoint import checkpoint_path
from engram_training.fitting.variants import REGIMES
from engram_training.options import TrainOptions
from engram_training.run import Interruption, fit

from tests.conftest import REPOSITORY
from tests.training.pictures import brightness, class_folders, several_labels

MEMORY = {"memory": (2,), "rates": (0.03, 0.1), "epochs": 6, "batch": 8}
QUICK = {**MEMORY, "rates": (0.003, 0.01), "regimes": ("memory",), "starts": ("zero",)}
ALL = {
    **MEMORY,
    "rates": None,
    "ranks": (2,),
}  # head, memory and LoRA


@pytest.fixture(scope="module")
def backbone(folder_of):
    return load_backbone(folder_of("vit"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("data") / "colours", each=10)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "colours.safetensors"


class Recorder(Watcher):
    def __init__(self, at_step=None, do=None):
        self.stages, self.notes, self.ticks = [], [], []
        self._at, self._do = at_step, do

    def stage(self, name):
        self.stages.append(name)

    def training(self, steps, score):
        def on_step(tick):
            self.ticks.append(tick)
            if tick.step == self._at:
                self._do()

        return on_step

    def note(self, text):
        self.notes.append(text)


def answers(backbone, bundle, paths, parents=()):
    model = MultiTaskViT(backbone)
    for place, parent in enumerate(parents):
        model.add(f"parent-{place}", parent)
    model.add("task", bundle)
    pixels = np.stack([backbone.preprocessing(p.read_bytes(), max_pixels=None) for p in paths])
    return model(torch.from_numpy(pixels), ["task"])["task"]


# --- what comes out -------------------------------------------------------------------------------


def test_a_folder_becomes_a_bundle_that_is_right(backbone, photos, out):
    recorder = Recorder()
    fitted = fit(photos, name="colours", backbone=backbone, out=out, watcher=recorder, **QUICK)
    assert fitted.figures["test"].values["accuracy"] >= 0.75
    assert fitted.path == out
    assert {file.name for file in out.parent.iterdir()} == {out.name, "colours.html"}
    bundle = TaskBundle.load(out)
    assert bundle == fitted.bundle
    assert bundle.labels == ("blue", "green", "red", "yellow")
    assert bundle.memory_tokens == 2
    assert bundle.manifest.metrics["test_accuracy"] == fitted.figures["test"].values["accuracy"]
    assert bundle.manifest.metrics["test_accuracy_low"] < bundle.manifest.metrics["test_accuracy"]
    assert bundle.manifest.training["images"] == {"train": 32, "val": 4, "test": 4}
    assert str(photos) not in bundle.manifest.to_json(), "no path of this machine"
    assert [tick.step for tick in recorder.ticks] == list(range(1, 25))
    assert "encoding val" in recorder.stages


def test_the_bundle_answers_as_the_report_says_image_by_image(backbone, tmp_path, out):
    for split, seed in (("train", 0), ("val", 1), ("test", 2)):
        class_folders(tmp_path / "data" / split, each=4, seed=seed)
    fitted = fit(tmp_path / "data", name="colours", backbone=backbone, **QUICK)
    paths = sorted((tmp_path / "data" / "test").rglob("*.png"))
    logits = answers(backbone, fitted.bundle, paths)
    truth = [fitted.bundle.labels.index(path.parent.name) for path in paths]
    right = (logits.argmax(1) == torch.tensor(truth)).double().mean()
    assert float(right) == fitted.figures["test"].values["accuracy"]


def test_golden_examples_are_pictures_made_by_rule_and_replay(backbone, photos):
    bundle = fit(photos, name="colours", backbone=backbone, **QUICK).bundle
    assert bundle.tensors["golden.pixels"].shape == (2, 32, 32, 3)
    model = MultiTaskViT(backbone)
    model.add("task", bundle)
    got = model(torch.tensor(bundle.tensors["golden.pixels"]), ["task"])["task"].numpy()
    assert np.abs(got - bundle.tensors["golden.logits"]).max() < GOLDEN_TOLERANCE
    assert (
        bundle.tensors["golden.pixels"] == golden_pixels((32, 32))
    ).all()  # no photo of the data


@pytest.mark.parametrize("augment", ["none", "inception", "clip"])
def test_the_same_run_gives_the_same_bytes(backbone, photos, augment):
    settings = {**QUICK, "epochs": 2, "augment": augment}
    one = fit(photos, name="colours", backbone=backbone, **settings)
    two = fit(photos, name="colours", backbone=backbone, **settings)
    assert one.bundle.digest == two.bundle.digest
    other = fit(photos, name="colours", backbone=backbone, seed=1, **settings)
    assert other.bundle.digest != one.bundle.digest


def test_results_do_not_depend_on_how_much_fits_on_disk(backbone, photos):
    settings = {**QUICK, "augment": "none"}
    plenty = fit(photos, name="colours", backbone=backbone, **settings).bundle
    nothing = fit(photos, name="colours", backbone=backbone, keep_gb=0, **settings).bundle
    for part in ("head.weight", "class_token", "memory"):
        assert np.allclose(plenty.tensors[part], nothing.tensors[part], atol=2e-3)


def test_every_regime_is_compared_and_served(backbone, photos):
    for regime in REGIMES:
        options = {**MEMORY, "regimes": (regime,), "starts": ("zero",)}
        bundle = fit(photos, name="colours", backbone=backbone, **options).bundle
        assert ("memory" in bundle.tensors) == ("memory" in regime)
        assert ("class_token" in bundle.tensors) == (regime not in ("head", "layers"))
        assert (bundle.manifest.lora is not None) == ("lora" in regime)
    together = fit(photos, name="colours", backbone=backbone, regimes=REGIMES, **MEMORY)
    assert len(together.variants) == 19, "two rates of each, more heads, and the closed form"
    assert len(together.epochs[-1].val_score) == 19


def test_the_closed_form_and_rows_added_to_it_are_compared_by_default(
    backbone, photos, monkeypatch
):
    monkeypatch.setattr("engram_training.run.MIN_VALIDATION", 1)
    settings = {**ALL, "epochs": 2}
    found = fit(photos, name="colours", backbone=backbone, **settings)
    regimes = [variant.regime for variant in found.variants]
    assert {regime: regimes.count(regime) for regime in regimes} == {
        "layers": 1,
        "memory+layers": 1,
        "lora+layers": 2,
        "memory+lora+layers": 1,
    }
    assert found.bundle.manifest.training["variants"] == 5


def test_a_row_added_to_the_closed_form_is_served_as_it_was_validated(backbone, photos):
    settings = {**MEMORY, "rates": (0.01,), "regimes": ("lora+layers",), "ranks": (2,)}
    fitted = fit(photos, name="colours", backbone=backbone, **settings)
    bundle = TaskBundle.from_bytes(fitted.bundle.to_bytes())
    assert bundle.tensors["feature.weight"].any()
    assert "class_token" in bundle.tensors
    weight = bundle.tensors["feature.weight"]
    assert np.array_equal(weight.astype(np.float16).astype(np.float32), weight)
    model = MultiTaskViT(backbone)
    model.add("task", bundle)
    got = model(torch.tensor(bundle.tensors["golden.pixels"]), ["task"])["task"].numpy()
    assert np.abs(got - bundle.tensors["golden.logits"]).max() < GOLDEN_TOLERANCE


@pytest.mark.parametrize("split", [(0.9, 0, 0.1), (0.8, 0.1, 0.1)])
def test_with_few_validation_images_nothing_is_trained(backbone, photos, split):
    fitted = fit(photos, name="c", backbone=backbone, split=split)
    assert [one.name for one in fitted.variants] == ["closed form, every layer"]
    assert any("do not show whether training helps" in note for note in fitted.notes)


def test_a_child_is_not_offered_a_head_alone(backbone, photos, tmp_path):
    parent = fit(photos, name="p", backbone=backbone, out=tmp_path / "p.safetensors", **QUICK)
    child = fit(photos, name="c", backbone=backbone, extends=[parent.path], **{**ALL, "epochs": 1})
    assert {variant.regime for variant in child.variants} == {"memory", "lora", "memory+lora"}


def test_lora_is_stored_in_half_precision_and_replays(backbone, photos):
    settings = {
        **MEMORY,
        "rates": (0.01,),
        "regimes": ("lora",),
        "ranks": (4,),
        "starts": ("zero",),  # a solved head leaves nothing to learn here
    }
    bundle = fit(photos, name="colours", backbone=backbone, **settings).bundle
    assert bundle.manifest.lora.rank == 4
    assert bundle.manifest.lora.targets == ("query", "output", "up", "down")
    assert bundle.manifest.training["variant"]["rank"] == 4
    assert bundle.manifest.training["optimiser"].startswith("AdamW")
    for a, b in bundle.lora.values():
        assert b.any(), "it was trained"
        for array in (a, b):
            assert np.array_equal(array.astype(np.float16).astype(np.float32), array)
    assert bundle.to_bytes() == bundle.to_bytes(dtype=None)
    model = MultiTaskViT(backbone)
    model.add("task", TaskBundle.from_bytes(bundle.to_bytes()))
    got = model(torch.tensor(bundle.tensors["golden.pixels"]), ["task"])["task"].numpy()
    assert np.abs(got - bundle.tensors["golden.logits"]).max() < GOLDEN_TOLERANCE


def test_where_trained_variants_go_astray_the_solved_head_is_kept(backbone, photos):
    astray = {**QUICK, "rates": (1e30,), "regimes": ("memory", "layers")}
    fitted = fit(photos, name="c", backbone=backbone, **astray)
    assert fitted.variant.name == "closed form, every layer"
    assert fitted.bundle.get("class_token") is None
    assert fitted.bundle.manifest.training["variant"]["start"] == "solved"


def test_the_closed_form_reads_every_layer_and_replays(backbone, photos, monkeypatch):
    # The class token is enough for colours, so no layer would be read.
    monkeypatch.setattr(
        "engram_server.model.heads.closed_form.fit_weights",
        lambda loss, count, first: np.full(count, first),
    )
    fitted = fit(photos, name="colours", backbone=backbone, fast=True)
    assert [one.name for one in fitted.variants] == ["closed form, every layer"]
    assert len(fitted.epochs) == 1
    assert any("leave-one-out accuracy" in note for note in fitted.notes)
    bundle = TaskBundle.from_bytes(fitted.bundle.to_bytes())
    weight = bundle.tensors["layers.weight"]
    assert set(bundle.manifest.layers) <= set(backbone.summary_layers)
    assert np.array_equal(weight.astype(np.float16).astype(np.float32), weight)
    model = MultiTaskViT(backbone)
    model.add("task", bundle)
    got = model(torch.tensor(bundle.tensors["golden.pixels"]), ["task"])["task"].numpy()
    assert np.abs(got - bundle.tensors["golden.logits"]).max() < GOLDEN_TOLERANCE


def test_layers_alone_do_not_fit_numbers_or_children():
    assert TrainOptions(fast=True).variants() == TrainOptions(regimes=("layers",)).variants()
    for options in (TrainOptions(fast=True), TrainOptions(regimes=("lora+layers",))):
        for task_type, extends in (("regression", False), ("single_label", True)):
            with pytest.raises(SettingsConflict, match="no closed form on every layer"):
                options.variants(task_type, extends=extends)


def test_numbers_and_children_have_no_solved_head():
    for task_type, extends in (("regression", False), ("single_label", True)):
        found = TrainOptions().variants(task_type, extends=extends)
        assert not any(variant.reads_layers for variant in found)
    numbers = TrainOptions(starts=("solved",)).variants("regression")
    assert {variant.start for variant in numbers} == {"zero"}


def test_scores_are_calibrated_and_the_bundle_knows_its_own_images(backbone, tmp_path):
    data = class_folders(tmp_path / "colours", each=20)
    bundle = fit(data, name="colours", backbone=backbone, **QUICK).bundle
    assert bundle.manifest.temperature is not None
    (task,) = load_tasks(backbone, [bundle.save(tmp_path / "b.safetensors")]).tasks
    assert task.ood is not None
    assert bundle.manifest.drift is not None  # written by every training
    paths = sorted(data.rglob("*.png"))
    own = np.stack([backbone.preprocessing(p.read_bytes(), max_pixels=None) for p in paths])
    assert in_distribution_share(backbone, task, own) > 0.9
    noise = np.random.default_rng(0).integers(0, 256, own.shape, dtype=np.uint8)
    assert in_distribution_share(backbone, task, noise) == 0


def in_distribution_share(backbone, task, pixels):
    view = backbone.preprocessing.normalise(torch.from_numpy(pixels), backbone.dtype)
    with torch.no_grad():
        result = masked_pass(backbone, view, None, [[task]] * len(view), StackCache())
    return float((result.logits[0].ood_scores <= 1).double().mean())


def test_several_labels(backbone, tmp_path):
    data = several_labels(tmp_path / "data", count=40)
    fitted = fit(data, name="several", backbone=backbone, **{**QUICK, "epochs": 12})
    assert fitted.bundle.task_type == "multi_label"
    assert fitted.bundle.labels == ("blue", "green", "red")
    assert fitted.figures["test"].values["mean_average_precision"] > 0.6


def test_numbers_are_answered_in_their_own_unit(backbone, tmp_path):
    data = brightness(tmp_path / "data")
    fitted = fit(data, name="brightness", backbone=backbone, **{**QUICK, "epochs": 25})
    assert fitted.bundle.task_type == "regression"
    assert fitted.figures["test"].values["r2"] > 0.5
    assert 0 < fitted.figures["test"].values["mean_absolute_error"] < 150
    paths = [tmp_path / "data" / "0.png", tmp_path / "data" / "39.png"]
    dark, bright = answers(backbone, fitted.bundle, paths).flatten().tolist()
    assert 900 < dark < bright < 1600


def test_a_child_extends_its_parent(backbone, photos, tmp_path, out):
    parent = fit(photos, name="parent", backbone=backbone, out=tmp_path / "p.safetensors", **QUICK)
    before = (tmp_path / "p.safetensors").read_bytes()
    child = fit(
        photos, name="child", backbone=backbone, out=out, extends=[parent.path], **QUICK
    ).bundle
    assert child.extends == (parent.bundle.digest,)
    assert (tmp_path / "p.safetensors").read_bytes() == before
    got = answers(backbone, child, sorted(photos.rglob("*.png"))[:3], [parent.bundle])
    assert torch.isfinite(got).all()
    grandchild = fit(
        photos, name="g", backbone=backbone, extends=[parent.path, out], **{**QUICK, "epochs": 1}
    ).bundle
    assert grandchild.extends == (child.digest,), "the child brings its parent along"
    with pytest.raises(SettingsConflict, match=r"extends the bundle sha256:.*Pass that bundle"):
        fit(photos, name="g", backbone=backbone, extends=[out], **QUICK)


def test_minutes_are_planned_and_recorded_as_steps(backbone, photos):
    fitted = fit(
        photos, name="colours", backbone=backbone, **{**QUICK, "epochs": None, "minutes": 0.03}
    )
    steps = fitted.bundle.manifest.training["steps"]
    assert steps % 4 == 0
    assert fitted.epochs[-1].step <= steps, "or fewer, without progress"
    assert fitted.seconds < 15
    again = fit(photos, name="colours", backbone=backbone, **{**QUICK, "epochs": steps // 4})
    assert again.bundle.digest == fitted.bundle.digest


def test_fit_is_exported_and_the_package_stays_light():
    assert engram_training.fit is fit
    assert engram_training.TrainOptions is TrainOptions
    program = "import sys, training; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True, timeout=60)


# --- interruptions --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(backbone, photos):
    """`whole_run(**changes)`: the digest of a run that nothing interrupts."""

    @functools.cache
    def digest(**changes):
        return fit(photos, name="colours", backbone=backbone, **{**QUICK, **changes}).bundle.digest

    return digest


class Killed(BaseException):
    """Stands for a process that is gone: nothing after it runs but what `finally` needs."""


@pytest.mark.parametrize("step", [1, 4, 13, 24])
@pytest.mark.parametrize("augment", ["none", "clip"])
def test_a_run_killed_at_any_step_resumes_to_the_same_bundle(
    backbone, photos, out, monkeypatch, whole_run, step, augment
):
    settings = {**QUICK, "augment": augment}
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)

    def die():
        raise Killed

    recorder = Recorder(step, die)
    with pytest.raises(Killed):
        fit(photos, name="colours", backbone=backbone, out=out, watcher=recorder, **settings)
    assert not out.exists()
    again = Recorder()
    done = fit(
        photos, name="colours", backbone=backbone, out=out, resume=True, watcher=again, **settings
    )
    # Dying between a step and its checkpoint loses that step.
    assert [tick.step for tick in again.ticks] == list(range(step, 25))
    assert done.bundle.digest == whole_run(augment=augment)
    assert not checkpoint_path(out).exists()


def test_a_killed_run_of_all_regimes_resumes_to_the_same_bundle(backbone, photos, out, monkeypatch):
    settings = {**ALL, "epochs": 3}
    monkeypatch.setattr("engram_training.run.MIN_VALIDATION", 1)
    monkeypatch.setattr(checkpoint, "CHECKPOINT_SECONDS", 0.0)

    def die():
        raise Killed

    with pytest.raises(Killed):
        fit(photos, name="c", backbone=backbone, out=out, watcher=Recorder(6, die), **settings)
    resumed = fit(photos, name="c", backbone=backbone, out=out, resume=True, **settings)
    whole = fit(photos, name="c", backbone=backbone, **settings)
    assert resumed.bundle.digest == whole.bundle.digest
    assert [epoch.val_loss for epoch in resumed.epochs] == [
        epoch.val_loss for epoch in whole.epochs
    ], "of every variant"


def test_ctrl_c_keeps_the_best_so_far_and_resume_finishes(backbone, photos, out, whole_run):
    recorder = Recorder(9, lambda: signal.raise_signal(signal.SIGINT))
    stopped = fit(photos, name="colours", backbone=backbone, out=out, watcher=recorder, **QUICK)
    assert stopped.interrupted
    assert stopped.bundle.manifest.training["interrupted"] is True
    assert TaskBundle.load(out) == stopped.bundle
    assert checkpoint_path(out).exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    done = fit(photos, name="colours", backbone=backbone, out=out, resume=True, **QUICK)
    assert done.bundle.digest == whole_run()


def test_ctrl_c_before_the_first_epoch_still_gives_a_bundle(backbone, photos, out, whole_run):
    recorder = Recorder(1, lambda: signal.raise_signal(signal.SIGINT))
    stopped = fit(photos, name="colours", backbone=backbone, out=out, watcher=recorder, **QUICK)
    assert TaskBundle.load(out) == stopped.bundle
    done = fit(photos, name="colours", backbone=backbone, out=out, resume=True, **QUICK)
    assert done.bundle.digest == whole_run()


def test_ctrl_c_before_the_first_step_keeps_nothing(backbone, photos, out, monkeypatch):
    monkeypatch.setattr(Interruption, "requested", lambda self: True)
    with pytest.raises(KeyboardInterrupt):
        fit(photos, name="colours", backbone=backbone, out=out, **QUICK)
    assert not out.exists()


def test_a_second_ctrl_c_stops_at_once(backbone, photos, out):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(photos, name="colours", backbone=backbone, out=out, watcher=Recorder(5, twice), **QUICK)
    assert not out.exists()


@pytest.mark.long
def test_a_process_killed_outright_resumes_to_the_same_bundle(folder_of, photos, out):
    settings = {**QUICK, "epochs": 80}
    program = (
        "import json, sys; from engram_training import fit;"
        "from engram_training.fitting import checkpoint;"
        "checkpoint.CHECKPOINT_SECONDS = 0.1;"
        "s = json.loads(sys.argv[4]);"
        "fit(sys.argv[1], name='c', backbone=sys.argv[2], out=sys.argv[3], resume=True, **s)"
    )
    command = [sys.executable, "-c", program, photos, folder_of("vit"), out, json.dumps(settings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(list(map(str, command)), cwd=REPOSITORY, env=environment)
    deadline = time.monotonic() + 60
    while not checkpoint_path(out).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.4)
    process.kill()
    process.wait()
    assert not out.exists()
    assert checkpoint_path(out).exists()
    backbone = load_backbone(folder_of("vit"))
    done = fit(photos, name="c", backbone=backbone, out=out, resume=True, **settings)
    assert done.bundle.digest == fit(photos, name="c", backbone=backbone, **settings).bundle.digest


def test_another_run_is_not_resumed(backbone, photos, out):
    recorder = Recorder(5, lambda: signal.raise_signal(signal.SIGINT))
    fit(photos, name="colours", backbone=backbone, out=out, watcher=recorder, **QUICK)
    with pytest.raises(CannotResume, match=r"another batch \(8 instead of 16\)"):
        fit(photos, name="c", backbone=backbone, out=out, resume=True, **{**QUICK, "batch": 16})
    checkpoint_path(out).write_bytes(b"rubbish")
    with pytest.raises(CannotResume, match=r"damaged\. Delete it"):
        fit(photos, name="colours", backbone=backbone, out=out, resume=True, **QUICK)


def test_nothing_to_resume_starts_from_the_beginning(backbone, photos, out):
    recorder = Recorder()
    fit(photos, name="c", backbone=backbone, out=out, resume=True, watcher=recorder, **QUICK)
    assert "starting from the beginning" in recorder.notes[0]


# --- bad data and bad disks -----------------------------------------------------------------------


def test_unreadable_images_are_skipped_counted_and_listed(backbone, tmp_path, out):
    photos = class_folders(tmp_path / "data", each=6)
    (photos / "red" / "zz.png").write_text("no image at all")
    (photos / "blue" / "00.png").write_bytes(b"")
    recorder = Recorder()
    fitted = fit(photos, name="colours", backbone=backbone, out=out, watcher=recorder, **QUICK)
    assert {one.path.name for one in fitted.skipped} == {"zz.png", "00.png"}
    assert "skipped 2 images" in recorder.notes[0]
    assert fitted.bundle.manifest.training["data"]["skipped"] == 2
    assert "zz.png" in out.with_suffix(".html").read_text()


def test_a_class_of_unreadable_images_is_left_out(backbone, tmp_path):
    photos = class_folders(tmp_path / "data", each=4)
    (photos / "notes").mkdir()
    (photos / "notes" / "scan.jpg").write_text("hello")
    recorder = Recorder()
    fitted = fit(photos, name="colours", backbone=backbone, watcher=recorder, **QUICK)
    assert fitted.bundle.labels == ("blue", "green", "red", "yellow")
    assert any("no image of 'notes' can be read" in note for note in recorder.notes)


def test_a_class_of_one_image_is_trained_on(backbone, tmp_path):
    photos = class_folders(tmp_path / "data", each=6, colours=("red", "blue"))
    class_folders(photos, each=1, colours=("green",))
    recorder = Recorder()
    fitted = fit(photos, name="colours", backbone=backbone, watcher=recorder, **QUICK)
    assert fitted.bundle.labels == ("blue", "green", "red")
    assert any("no validation image of 'green'" in note for note in recorder.notes)


def test_without_validation_images_the_training_loss_decides(backbone, tmp_path, out):
    photos = class_folders(tmp_path / "data", each=1)
    recorder = Recorder()
    fitted = fit(photos, name="colours", backbone=backbone, out=out, watcher=recorder, **QUICK)
    assert any("no validation images" in note for note in recorder.notes)
    assert fitted.figures == {}
    assert fitted.bundle.manifest.training["selected_on"] == "train"
    assert "golden.pixels" in fitted.bundle.tensors


def test_missing_files_of_a_table_are_skipped_and_listed(backbone, tmp_path):
    photos = class_folders(tmp_path / "data", each=6)
    paths = [str(path.relative_to(tmp_path)) for path in sorted(photos.rglob("*.png"))]
    lines = [f"{path},{path.split('/')[1]}" for path in [*paths, "data/red/gone.png"]]
    (tmp_path / "data.csv").write_text("\n".join(lines))
    fitted = fit(tmp_path / "data.csv", name="colours", backbone=backbone, **QUICK)
    assert [one.path.name for one in fitted.skipped] == ["gone.png"]
    assert fitted.skipped[0].reason == "the file does not exist"


def test_no_readable_training_image_is_an_error(backbone, tmp_path, out):
    (tmp_path / "data.csv").write_text("a.png,cat\nb.png,dog\n")
    with pytest.raises(DataError, match=r"No training image of 'data.csv' can be read"):
        fit(tmp_path / "data.csv", name="c", backbone=backbone, out=out, **QUICK)


@pytest.mark.parametrize("name", ["colours.safetensors", "colours.checkpoint"])
def test_a_full_disk_is_an_error_and_leaves_no_partial_file(
    backbone, photos, out, monkeypatch, name
):
    out.write_bytes(b"what was there before")
    real = os.fsync

    def full(handle):
        if name in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(28, "No space left on device")
        real(handle)

    if not os.path.exists("/proc/self/fd"):
        pytest.skip("needs /proc to tell files apart")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CannotWrite, match=f"Cannot write '.*{name}': No space left on device"):
        fit(photos, name="colours", backbone=backbone, out=out, **QUICK)
    assert out.read_bytes() == b"what was there before"
    assert {file.suffix for file in out.parent.iterdir()} <= {".safetensors", ".checkpoint"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": "colours.bin"}, "must be named"),
        ({"out": "nowhere/colours.safetensors"}, "not in a writable folder"),
        ({"epochs": 3, "minutes": 1.0}, "epochs or minutes, not both"),
        ({"resume": True}, "resume needs `out`"),
        ({"batch": 0}, "must be at least 1"),
        ({"split": (0.0, 0.5, 0.5)}, "train must have one"),
    ],
)
def test_invalid_options_are_rejected_before_training(backbone, photos, tmp_path, changes, message):
    if "out" in changes:
        changes = {**changes, "out": tmp_path / changes["out"]}
    with pytest.raises(SettingsConflict, match=message):
        fit(photos, name="colours", backbone=backbone, **changes)


def test_a_diverging_sweep_is_an_error(backbone, photos, out):
    wild = {**QUICK, "rates": (1e30,), "starts": ("zero",)}
    with pytest.raises(DataError, match="All variants diverged"):
        fit(photos, name="c", backbone=backbone, out=out, **wild)
    assert not out.exists()
