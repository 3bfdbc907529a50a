"""`engram train` and `engram evaluate` as people type them."""

import io
import json
import re

import pytest
import typer
from engram_bundle import TaskBundle
from engram_training.commands import train as train_command
from engram_training.commands.evaluate import evaluate_bundles
from engram_training.commands.options import find_backbone, option_rows, show_progress
from engram_training.commands.train import train
from engram_training.data.workspace import Tick
from engram_training.errors import DataError, SettingsConflict
from engram_training.options import TrainOptions, flags
from rich.console import Console
from typer.testing import CliRunner

from tests.training.pictures import class_folders

runner = CliRunner()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return class_folders(tmp_path_factory.mktemp("cli") / "colours", each=10)


@pytest.fixture
def run(folder_of, monkeypatch):
    """`run(function, *arguments)`: what is printed; errors come through as raised."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("ENGRAM_BACKBONE", str(folder_of("vit")))

    def command(function, *arguments, code=0):
        app = typer.Typer()
        app.command()(function)
        result = runner.invoke(app, list(map(str, arguments)), catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.stdout

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
    assert bundle.manifest.training["variants"] == 10
    assert "memory 2, rate 0.1, seed 0" in printed
    assert "images/s" in printed
    assert "· accuracy " in printed
    assert f"engram push {out}\n" in printed
    assert out.with_suffix(".html").exists()

    printed = run(evaluate_bundles, photos, "--tasks", out, "--table")
    assert "95 % interval" in printed
    assert "held-out" in printed
    printed = run(evaluate_bundles, photos, "--tasks", out)
    found = json.loads(printed)["results"][0]["metrics"]["accuracy"]
    assert found == bundle.manifest.metrics["test_accuracy"]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Photos of two classes, two files that cannot be read, and two that are not photos."""
    root = class_folders(
        tmp_path_factory.mktemp("cli") / "damaged", each=8, colours=("red", "blue")
    )
    (root / "red" / "cut.png").write_bytes((root / "red" / "00.png").read_bytes()[:60])
    (root / "blue" / "scan.jp2").write_bytes(b"\0\0\0\x0cjP  \r\n\x87\n")
    (root / "blue" / "notes.txt").write_text("two photos are missing")
    (root / "blue" / "LICENSE").write_text("as you like")
    (root / "red" / "00.png").rename(root / "red" / "IMG_0001")
    return root


def test_bad_files_are_named_and_counted_and_strict_makes_them_an_error(run, damaged, tmp_path):
    out = tmp_path / "d.safetensors"
    arguments = (train, damaged, "--name", "d", "--out", out, "--fast")
    printed = run(*arguments)
    for name in ("cut.png", "scan.jp2"):
        assert f"{name}: " in printed
    assert "2 images could not be read" in printed
    assert "notes.txt" not in printed
    assert TaskBundle.load(out).manifest.training["data"]["skipped"] == 2
    with pytest.raises(DataError, match=r"(?s)2 images cannot be read.*scan.jp2.*cut.png"):
        run(*arguments, "--strict")

    judged = (evaluate_bundles, damaged, "--tasks", out, "--split", "train", "--table")
    assert "could not be read" in run(*judged)
    assert run(*judged, "--strict", code=1)


def test_evaluate_fails_at_the_end_if_a_task_fails(run, photos, damaged, tmp_path):
    out = tmp_path / "d.safetensors"
    run(train, damaged, "--name", "d", "--out", out, "--fast")
    printed = run(evaluate_bundles, damaged, photos, "--tasks", out, "--table", code=1)
    assert "accuracy" in printed
    assert "failed: colours: " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lr", "fast"], "Invalid value 'fast' for --lr. Use numbers"),
        (["--memory", "1,x"], "Invalid value '1,x' for --memory"),
        (["--regime", "full"], "Invalid value 'full' for --regime. Valid values: head, layers"),
        (["--start", "warm"], "Invalid value 'warm' for --start. Valid values: zero, solved"),
        (["--description", "x" * 5000], "The description has 5000 characters"),
        (["--split", "80,20"], "Use three shares, for train, val and test"),
    ],
)
def test_invalid_values_are_rejected(run, photos, tmp_path, arguments, message):
    out = tmp_path / "c.safetensors"
    with pytest.raises(SettingsConflict, match=message):
        run(train, photos, "--name", "c", "--out", out, *arguments)


def test_without_a_backbone_the_embedded_one_is_used(monkeypatch):
    monkeypatch.delenv("ENGRAM_BACKBONE", raising=False)
    assert find_backbone(None).name == "engram-mini"


@pytest.mark.parametrize(
    ("command", "option", "value", "valid"),
    [
        (train, "--augment", "mixup", "inception"),
        (train, "--task-type", "ranking", "single_label"),
        (evaluate_bundles, "--split", "dev", "test"),
        (evaluate_bundles, "--task-type", "ranking", "multi_label"),
    ],
)
def test_invalid_choices_are_usage_errors(command, option, value, valid):
    app = typer.Typer()
    app.command()(command)
    result = runner.invoke(app, [option, value], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"'{value}'" in result.stderr
    assert valid in result.stderr


def test_every_option_of_a_run_is_on_the_command_line():
    rows = {row.option: row for row in option_rows(train)}
    assert {f"--{(flag.name or name).replace('_', '-')}" for name, flag in flags().items()} <= set(
        rows
    )
    assert rows["--lr"].value == "auto|R,… (default: auto)"
    assert rows["--augment"].value == "auto|inception|clip|none (default: none)"
    assert rows["--resume"].value == ""
    assert all(row.help for row in rows.values())


def test_options_of_the_command_line_reach_the_run(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(train_command, "_print", lambda *_: None)
    monkeypatch.setattr(train_command, "find_backbone", lambda name: name)
    monkeypatch.setattr(train_command, "fit", lambda *_, **named: calls.append(named["options"]))
    app = typer.Typer()
    app.command()(train)
    arguments = [tmp_path, "--name", "x", "--out", tmp_path / "x.safetensors"]
    runner.invoke(app, list(map(str, arguments)), catch_exceptions=False)
    more = ["--lr", "0.1", "--regime", "memory,class", "--regime", "head", "--any-image"]
    more += ["--augment", "auto", "--task-type", "multi_label", "--split", "2,1,1"]
    runner.invoke(app, [*map(str, arguments), *more], catch_exceptions=False)
    assert calls[0] == TrainOptions()
    assert calls[1] == TrainOptions(
        rates=(0.1,),
        regimes=("head", "class", "memory"),
        any_image=True,
        augment=None,
        task_type="multi_label",
        split=(0.5, 0.25, 0.25),
    )


@pytest.mark.parametrize("width", [80, 120])
def test_progress_shows_counters_and_remaining_time_at_any_width(width):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system=None)
    with show_progress(console) as watcher:
        watcher.stage("evaluating on test")(18_000, 18_000)
        on_step = watcher.training(12_000, "micro F1")
        on_step(Tick(step=11_999, steps=12_000, loss=0.123, score=0.987, images_per_second=123.0))
    last = next(line for line in reversed(out.getvalue().splitlines()) if "training" in line)
    for part in ("11999/12000", "loss 0.123", "micro F1 0.987"):
        assert part in last
    assert re.search(r"\d:\d\d:\d\d|-:--:--", last)
    assert "…" not in last
