"""`engram batch` as people type it."""

import json
import re
import sys

import pytest
import typer
from engram_server.batch.summary import ERRORS_KEPT
from engram_server.commands.batch import batch
from engram_server.errors import SettingsError
from engram_store import StoreUnavailable, open_store
from typer.testing import CliRunner

from tests.batch.conftest import rows_of
from tests.serving import photo

runner = CliRunner()


@pytest.fixture
def command(world, folder_of, tmp_path, monkeypatch):
    """`command(*arguments)`: what is printed; errors come through as raised."""
    store = open_store(tmp_path / "store")
    store.publish("pets", world.bundles["pets"])
    store.publish("scene", world.bundles["scene"])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("ENGRAM_BACKBONE", str(folder_of("vit")))
    monkeypatch.setenv("ENGRAM_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ENGRAM_DEVICES", "cpu")
    app = typer.Typer()
    app.command()(batch)

    def run(*arguments, code=0, stdin=None):
        arguments = [*arguments, "--out", tmp_path / "out"]
        result = runner.invoke(app, [*map(str, arguments)], input=stdin, catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.stdout

    return run


def test_summary_counts_classes_and_errors(command, photos, tmp_path):
    printed = json.loads(command(photos, "--tasks", "pets,scene", "--part-images", 4))
    assert (printed["images"], printed["errors"]) == (10, 0)
    rows = rows_of(tmp_path / "out")
    counts = {}
    for row in rows:
        counts[row["pets_label"]] = counts.get(row["pets_label"], 0) + 1
    assert printed["tasks"]["pets"]["classes"] == counts
    again = json.loads(command(photos, "--tasks", "pets,scene", "--part-images", 4))
    assert again["tasks"] == printed["tasks"], "also over parts of an earlier run"


def test_summary_is_the_same_when_csv_parts_are_read_again(command, photos):
    arguments = (photos, "--tasks", "pets,scene", "--format", "csv")
    first, again = json.loads(command(*arguments)), json.loads(command(*arguments))
    assert again["tasks"] == first["tasks"]


def test_table_fits_into_80_columns(command, photos):
    printed = command(photos, "--tasks", "pets,scene", "--table")
    assert re.search(r"pets +(cat|dog|rabbit) +\d+ +\d+\.\d%", printed)
    assert "10 images in" in printed
    assert max(map(len, printed.splitlines()[:-1])) <= 80


def test_bad_files_are_named_and_strict_fails(command, tmp_path):
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "good.png").write_bytes(photo())
    for number in range(ERRORS_KEPT + 2):
        (mixed / f"{number:02}.png").write_text("text")
    printed = command(mixed, "--tasks", "pets", "--table")
    assert printed.count("skipped ") == ERRORS_KEPT
    assert f"{ERRORS_KEPT + 2} with an error" in printed
    command(mixed, "--tasks", "pets", "--strict", code=1)


def test_exit_code_is_1_if_no_image_can_be_read(command, tmp_path):
    (tmp_path / "bad.png").write_text("text")
    command(tmp_path / "bad.png", "--tasks", "pets", code=1)


def test_paths_come_from_standard_input(command, photos, tmp_path):
    paths = [str(photos / "b" / "1.png"), str(photos / "a" / "0.png")]
    command("-", "--tasks", "pets", stdin="\n".join(paths))
    assert [row["path"] for row in rows_of(tmp_path / "out")] == paths


def test_without_pyarrow_parquet_is_explained_and_csv_works(command, photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SettingsError, match=r"--format csv.*engram-vit-server\[batch\]"):
        command(photos, "--tasks", "pets")
    assert not (tmp_path / "out").exists()
    command(photos, "--tasks", "pets", "--format", "csv")
    assert (tmp_path / "out" / "part-00000.csv").exists()


def test_missing_store_is_an_error_and_nothing_is_created(command, photos, tmp_path):
    with pytest.raises(StoreUnavailable, match="no task store at"):
        command(photos, "--tasks", "pets", "--store", tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
