"""`engram backbone check`, and what it rests on."""

import re
from dataclasses import replace

import pytest
import typer
from engram_server.commands.backbone import check_backbone
from engram_server.errors import BackboneError, BrokenCheckpoint
from engram_server.model import load_backbone
from engram_server.model.families import checking
from engram_server.model.families.checking import compare_with_transformers
from typer.testing import CliRunner

from tests.families import FAMILIES


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    app = typer.Typer()
    app.command()(check_backbone)

    def command(*arguments):
        return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).stdout

    return command


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_transformers(folder_of, backbone_of, family):
    agreement = compare_with_transformers(folder_of(family), backbone_of(family))
    assert agreement.holds
    assert agreement.largest > 0.1


def test_another_image_size_is_compared_too(folder_of):
    for family in ("vit", "dinov2", "dinov3", "clip", "siglip", "ijepa"):
        backbone = load_backbone(folder_of(family), image_size=48)
        assert compare_with_transformers(folder_of(family), backbone).holds


def test_a_backbone_that_was_read_wrong_does_not_agree(folder_of, backbone_of):
    backbone = backbone_of("vit")
    wrong = replace(backbone, final_norm_bias=backbone.final_norm_bias + 0.01)
    assert not compare_with_transformers(folder_of("vit"), wrong).holds


def test_the_command_says_what_serving_costs(run, folder_of, backbone_of):
    printed = run(folder_of("clip"))
    backbone = backbone_of("clip")
    assert backbone.fingerprint in printed
    assert f"{backbone.geometry.tokens} tokens" in printed
    # Keys and values of all layers in float16, and little beside them.
    geometry = backbone.geometry
    states = geometry.layers * 2 * geometry.tokens * geometry.attention_width * 2
    (context,) = re.findall(r"a context +([\d,]+) bytes in float16", printed)
    assert states < int(context.replace(",", "")) < 1.2 * states
    assert "no text tower" not in printed
    assert re.search(r"transformers +agrees", printed)
    assert len(re.findall(r"[\d.]+ ms", printed)) == 2


def test_a_folder_that_differs_fails_the_command(run, folder_of, monkeypatch):
    monkeypatch.setattr(checking, "TOLERANCE", 0.0)
    with pytest.raises(BrokenCheckpoint, match="features differ from those of transformers"):
        run(folder_of("vit"))


def test_a_folder_that_cannot_be_read_is_named(run, tmp_path):
    with pytest.raises(BackboneError, match=re.escape(str(tmp_path))):
        run(tmp_path)
