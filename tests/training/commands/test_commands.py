"""`engram train` and `engram evaluate` as people type them."""

import json

import pytest
import typer
from typer.testing import CliRunner

from task_store import TaskBundle
from tests.training.pictures import class_folders
from training.commands.evaluate import evaluate_bundles
from training.commands.train import find_backbone, train
from training.errors import SettingsConflict, TrainingError

runner = CliRunner()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("cli") / "colours", each=10)


@pytest.fixture
def run(folder_of, monkeypatch):
    """`run(function, *arguments)`: what is printed; errors come through as raised."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("ENGRAM_BACKBONE", str(folder_of("vit")))

    def command(function, *arguments):
        app = typer.Typer()
        app.command()(function)
        return runner.invoke(app, list(map(str, arguments)), catch_exceptions=False).stdout

    return command


def test_train_then_evaluate(run, photos, tmp_path):
    out = tmp_path / "colours.safetensors"
    printed = run(
        train, photos, "--name", "colours", "--out", out, "--memory", "1,2", "--lr", "0.03,0.1",
        "--regime", "memory,class", "--regime", "head", "--epochs", "6", "--batch", "8",
        "--description", "Which colour?", "--license", "CC0-1.0",
    )  # fmt: skip
    bundle = TaskBundle.load(out)
    assert (bundle.manifest.description, bundle.manifest.license) == ("Which colour?", "CC0-1.0")
    assert bundle.manifest.training["variants"] == 11, "ten that are trained, and the solved head"
    assert "memory 2, rate 0.1, seed 0" in printed
    assert "images/s" in printed
    assert "· accuracy " in printed
    assert f"engram push {out}\n" in printed
    assert out.with_suffix(".html").exists()

    printed = run(evaluate_bundles, photos, "--tasks", out)
    assert "95 % interval" in printed
    assert "held out" in printed
    printed = run(evaluate_bundles, photos, "--tasks", out, "--json")
    found = json.loads(printed)["results"][0]["metrics"]["accuracy"]
    assert found == bundle.manifest.metrics["test_accuracy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lr", "fast"], "--lr is 'fast'; give numbers"),
        (["--memory", "1,x"], "--memory is '1,x'"),
        (["--regime", "full"], "'full' is no regime; use head, class, memory, adapter"),
        (["--augment", "mixup"], "'mixup' is no augmentation"),
        (["--problem", "ranking"], "'ranking' is no problem"),
        (["--description", "x" * 5000], "the description has 5000 characters"),
        (["--split", "80,20"], "give the shares of train, val and test"),
    ],
)
def test_options_are_refused_in_a_sentence(run, photos, tmp_path, arguments, message):
    out = tmp_path / "c.safetensors"
    with pytest.raises(SettingsConflict, match=message):
        run(train, photos, "--name", "c", "--out", out, *arguments)


def test_without_a_backbone_the_embedded_one_is_used(monkeypatch):
    monkeypatch.delenv("ENGRAM_BACKBONE", raising=False)
    assert find_backbone(None).name == "engram-mini"


def test_every_refusal_is_for_people():
    assert issubclass(SettingsConflict, TrainingError)


def test_an_unknown_split_is_refused(run, photos, tmp_path):
    with pytest.raises(SettingsConflict, match="'dev' is no split"):
        run(evaluate_bundles, photos, "--tasks", tmp_path / "x.safetensors", "--split", "dev")
