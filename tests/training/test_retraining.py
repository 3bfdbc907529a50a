"""Training a task again on another backbone, and comparing both in pairs."""

import dataclasses
import math

import pytest
import torch
import typer
from engram_bundle import TaskBundle
from engram_training import fit
from engram_training.commands.train import check_same_data, options_like, train
from engram_training.data.dataset import read_data, split_data
from engram_training.errors import DataError, SettingsConflict
from engram_training.judging.pairs import Contender, Pairs, compare
from engram_training.options import TrainOptions
from typer.testing import CliRunner

from tests.training.pictures import brightness, class_folders

QUICK = TrainOptions(
    regimes=("head",), rates=(0.03,), epochs=2, batch=8, seed=3, split=(0.6, 0.2, 0.2)
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("moving") / "colours", each=10)


@pytest.fixture(scope="module")
def old(photos, folder_of, tmp_path_factory):
    out = tmp_path_factory.mktemp("old") / "colours.safetensors"
    fit(photos, name="colours", backbone=folder_of("vit"), out=out, options=QUICK)
    return out


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("ENGRAM_BACKBONE", raising=False)
    app = typer.Typer()
    app.command()(train)

    def command(*arguments):
        return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).stdout

    return command


def test_the_manifest_keeps_the_options(old):
    assert options_like(
        TaskBundle.load(old), TrainOptions(description="new")
    ) == dataclasses.replace(QUICK, description="new")


def test_only_the_named_options_change(old):
    options = TrainOptions(memory=(4,), minutes=2.0)
    options = options_like(TaskBundle.load(old), options, {"memory", "minutes"})
    assert (options.memory, options.minutes, options.epochs) == ((4,), 2.0, None)
    assert (options.seed, options.split) == (QUICK.seed, QUICK.split)


def test_train_like_repeats_the_run_and_compares_in_pairs(run, photos, old, folder_of, tmp_path):
    out = tmp_path / "moved.safetensors"
    printed = run(
        photos, "--name", "colours", "--out", out, "--like", old, "--old-backbone",
        folder_of("vit"), "--backbone", folder_of("dinov2"), "--batch", "4",
    )  # fmt: skip
    before, after = TaskBundle.load(old).manifest, TaskBundle.load(out).manifest
    assert after.backbone != before.backbone
    assert after.training["like"] == TaskBundle.load(old).digest
    assert after.training["images"] == before.training["images"]
    assert after.training["options"] == before.training["options"] | {"batch": 4}
    for manifest in (before, after):
        assert f"{manifest.metrics['test_accuracy']:.1%}".replace("%", " %") in printed
    assert "on the same 8 test images: the new task is better on" in printed


def test_other_data_is_refused_before_training(run, old, folder_of, tmp_path):
    other = class_folders(tmp_path / "other", each=10, seed=1)
    (other / "red" / "00.png").unlink()
    with pytest.raises(DataError, match="is not the data of the --like bundle"):
        run(
            other, "--name", "c", "--out", tmp_path / "c.safetensors", "--like", old,
            "--old-backbone", folder_of("vit"), "--backbone", folder_of("dinov2"),
        )  # fmt: skip


def test_another_old_backbone_is_refused_before_training(run, photos, old, folder_of, tmp_path):
    with pytest.raises(SettingsConflict, match="--old-backbone"):
        run(
            photos, "--name", "c", "--out", tmp_path / "c.safetensors", "--like", old,
            "--old-backbone", folder_of("deit"), "--backbone", folder_of("dinov2"),
        )  # fmt: skip


def changed(bundle: TaskBundle, **changes) -> TaskBundle:
    manifest = bundle.manifest.model_copy(update=changes)
    return dataclasses.replace(bundle, manifest=manifest)


def test_a_bundle_without_options_is_rejected(old):
    bundle = changed(TaskBundle.load(old), training={"tool": "engram teach"})
    with pytest.raises(SettingsConflict, match="does not record its training options"):
        options_like(bundle, TrainOptions())
    bundle = changed(TaskBundle.load(old), training={"options": {"regimes": ["full"]}})
    with pytest.raises(SettingsConflict, match="regimes"):
        options_like(bundle, TrainOptions())


def test_the_same_data_is_recognised_by_its_digest(old, photos):
    check_same_data(read_data(photos), TaskBundle.load(old))


def test_pairs_count_images_that_only_one_task_gets_right():
    old = torch.tensor([1.0, 1.0, 0.0, 0.0])
    new = torch.tensor([1.0, 0.0, 1.0, 1.0])
    pairs = Pairs.of(old, new, "accuracy")
    assert (pairs.only_old, pairs.only_new) == (1, 2)
    assert (pairs.old, pairs.new, pairs.difference) == (0.5, 0.75, 0.25)
    half = 1.959964 * math.sqrt(0.9166667) / 2
    assert pairs.interval == pytest.approx((0.25 - half, 0.25 + half), abs=1e-5)


def test_numbers_are_compared_by_their_errors(folder_of, backbone_of, tmp_path):
    table = brightness(tmp_path / "grey", count=30)
    bundles = []
    for family in ("vit", "dinov2"):
        bundles.append(tmp_path / f"{family}.safetensors")
        fit(table, name="grey", backbone=folder_of(family), out=bundles[-1], options=QUICK)
    data = split_data(read_data(table), QUICK.split, QUICK.seed)
    contenders = [
        Contender([bundle], backbone_of(family))
        for bundle, family in zip(bundles, ("vit", "dinov2"), strict=True)
    ]
    split, pairs = compare(data, *contenders)
    metrics = [TaskBundle.load(bundle).manifest.metrics for bundle in bundles]
    errors = [one["test_mean_absolute_error"] for one in metrics]
    assert (split, pairs.figure) == ("test", "mean absolute error")
    assert (pairs.old, pairs.new) == pytest.approx(errors, rel=1e-4)
