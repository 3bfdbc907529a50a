"""`engram zero-shot` as people type it."""

import numpy as np
import pytest
import typer
from engram_bundle import TaskBundle
from engram_server.commands.zero_shot import zero_shot
from engram_server.errors import NoTextTower, UnteachableExamples
from engram_server.model.families.text_tower import open_text_tower
from typer.testing import CliRunner

from tests.texts import text_folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return text_folder("clip", tmp_path_factory.mktemp("text") / "clip")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("ENGRAM_BACKBONE", raising=False)
    app = typer.Typer()
    app.command()(zero_shot)

    def command(*arguments):
        command_line = ["--name", "scene", *map(str, arguments)]
        return CliRunner().invoke(app, command_line, catch_exceptions=False).stdout

    return command


def test_all_texts_after_classes_are_classes(run, clip, tmp_path):
    printed = run("--classes", "a photo of a beach", "snow", "--backbone", clip)
    assert "engram push scene.safetensors" in printed
    bundle = TaskBundle.load(tmp_path / "scene.safetensors")
    assert bundle.labels == ("a photo of a beach", "snow")
    assert (bundle.task_type, bundle.manifest.normalised) == ("single_label", True)
    head = open_text_tower(clip).read(bundle.labels)
    assert np.array_equal(bundle.tensors["head.weight"], head.weight)
    assert np.array_equal(bundle.tensors["head.projection"], head.projection)


def test_the_bundle_says_how_it_was_made(run, clip, tmp_path):
    out = tmp_path / "other.safetensors"
    printed = run(
        "--classes", "snow", "--classes", "beach", "--template", "a photo of a {}", "--template",
        "a {} .", "--backbone", clip, "--out", out, "--task-type", "multi_label", "--description",
        "Where?", "--license", "CC0",
    )  # fmt: skip
    assert "engram push" in printed
    assert "--name" not in printed, "the bundle has it"
    manifest = TaskBundle.load(out).manifest
    assert (manifest.name, manifest.labels) == ("scene", ("beach", "snow"))
    assert manifest.training == {"tool": "engram teach"}
    assert manifest.taught is not None
    assert manifest.taught.templates == ("a photo of a {}", "a {} .")
    assert (manifest.task_type, manifest.description) == ("multi_label", "Where?")


def test_the_embedded_backbone_reads_no_names(run):
    with pytest.raises(NoTextTower, match="'engram-mini' has no text tower"):
        run("--classes", "snow", "beach")


def test_wrong_options_are_refused_in_a_sentence(run, clip):
    printed = run("--classes", "snow", "beach", "--backbone", clip, "--task-type", "ranking")
    assert printed == "", "a usage error"
    with pytest.raises(UnteachableExamples, match="twice"):
        run("--classes", "snow", "snow", "--backbone", clip)
