"""`engram tasks gc|purge|verify|backup|restore-backup`."""

import os
from datetime import timedelta

import pytest
import typer
from engram_store import Correction, open_store
from engram_store.commands.tasks import (
    back_up,
    collect_garbage,
    parse_age,
    purge,
    restore_backup,
    verify,
)
from engram_store.layout import blob_path, log_path
from engram_vit.commands.main import main
from typer.testing import CliRunner

from tests.bundles import bundle

runner = CliRunner()


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(collect_garbage)
    return app


@pytest.fixture
def orphan(local, tmp_path):
    """A bundle that nothing published, two days old."""
    local.publish("t", bundle(1))
    path = tmp_path / "store" / "blobs" / "sha256" / ("0" * 64)
    path.write_bytes(b"x" * 1234)
    os.utime(path, (path.stat().st_mtime - 2 * 86400,) * 2)
    return path


def test_unpublished_bundle_is_deleted_and_counted(app, orphan, tmp_path):
    result = runner.invoke(app, ["--store", str(tmp_path / "store")], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "unpublished bundle" in result.output
    assert "1 objects, 1,234 bytes freed" in result.output
    assert not orphan.exists()


def test_dry_run_deletes_nothing(app, orphan, tmp_path):
    result = runner.invoke(app, ["--store", str(tmp_path / "store"), "--dry-run"])
    assert result.exit_code == 0
    assert "1,234 bytes would be freed" in result.output
    assert orphan.exists()


def test_objects_younger_than_the_grace_period_are_kept(app, orphan, tmp_path):
    result = runner.invoke(app, ["--store", f"file://{tmp_path}/store", "--grace", "3d"])
    assert result.exit_code == 0
    assert "1 younger kept" in result.output
    assert orphan.exists()


@pytest.fixture
def error_of(capfd):
    """Run `engram tasks …`, which fails with exit code 1, and return its one line of stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit, match=r"^1$"):
            main(["tasks", *map(str, arguments)])
        (line,) = capfd.readouterr().err.splitlines()
        return line

    return run


def test_store_that_cannot_be_opened_exits_with_code_one(error_of, tmp_path):
    assert "There is no task store" in error_of("gc", "--store", tmp_path / "typo")
    assert not (tmp_path / "typo").exists()


def test_wrong_usage_has_exit_code_two(app, tmp_path):
    assert runner.invoke(app, []).exit_code == 2
    assert runner.invoke(app, ["--store", str(tmp_path), "--grace", "soon"]).exit_code == 2


@pytest.mark.parametrize(
    ("text", "age"),
    [
        ("0s", timedelta()),
        ("90s", timedelta(seconds=90)),
        ("30m", timedelta(minutes=30)),
        ("24h", timedelta(hours=24)),
        ("1d12h", timedelta(hours=36)),
    ],
)
def test_ages_are_read(text, age):
    assert parse_age(text) == age


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "1.5h", "1w", "1h x", " 1h"])
def test_invalid_age_is_rejected(text):
    with pytest.raises(typer.BadParameter):
        parse_age(text)


@pytest.fixture
def tasks() -> typer.Typer:
    app = typer.Typer()
    app.command("gc")(collect_garbage)
    app.command("purge")(purge)
    app.command("verify")(verify)
    app.command("backup")(back_up)
    app.command("restore-backup")(restore_backup)
    return app


def invoke(app, *arguments):
    return runner.invoke(app, [str(each) for each in arguments], env={"COLUMNS": "250"})


def test_backup_and_back_again(tasks, local, tmp_path):
    store, backup, again = (tmp_path / name for name in ("store", "backup", "again"))
    local.publish("t", bundle(1))
    result = invoke(tasks, "backup", backup, "--store", store)
    assert result.exit_code == 0, result.output
    assert "is at generation 1: 1 log entries and 1 bundles" in result.output
    result = invoke(tasks, "restore-backup", backup, "--store", again)
    assert result.exit_code == 0, result.output
    assert open_store(again).catalog() == local.catalog()
    result = invoke(tasks, "verify", "--store", again)
    assert result.exit_code == 0
    assert "generation 1: 1 bundles of" in result.output


def test_backup_of_another_store_is_refused_in_one_line(error_of, local, tmp_path):
    local.publish("t", bundle(1))
    open_store(tmp_path / "other").publish("t", bundle(1))
    line = error_of("backup", tmp_path / "other", "--store", tmp_path / "store")
    assert "is not a prefix of" in line
    line = error_of("backup", tmp_path / "new", "--store", tmp_path / "typo")
    assert "There is no task store" in line


def test_damage_is_listed_with_exit_code_one(tasks, error_of, local, tmp_path):
    local.publish("t", bundle(1))
    local.publish("t", bundle(2))
    blob = blob_path(bundle(1).digest)
    (tmp_path / "store" / blob).write_bytes(b"x")
    (tmp_path / "store" / log_path(2)).write_bytes(b"{")
    result = invoke(tasks, "verify", "--store", tmp_path / "store")
    assert result.exit_code == 1
    assert blob in result.output
    assert log_path(2) in result.output
    assert "damaged log entry" in result.output
    line = error_of("gc", "--store", tmp_path / "store")
    assert "repair the log before deleting anything" in line
    assert log_path(2) in line
    assert invoke(tasks, "backup", tmp_path / "b", "--store", tmp_path / "store").exit_code == 1


def test_purge_deletes_and_may_be_repeated(tasks, local, tmp_path):
    store = tmp_path / "store"
    for seed in (1, 2, 3):
        local.publish("t", bundle(seed))
    result = invoke(tasks, "purge", "t@1", "--store", store)
    assert result.exit_code == 0, result.output
    assert "t: purged version 1; 1 bundles deleted." in result.output
    assert "t: purged version 2, 3; 2" in invoke(tasks, "purge", "t", "--store", store).output
    assert "was purged before" in invoke(tasks, "purge", "t", "--store", store).output
    assert not list((store / "blobs" / "sha256").iterdir())
    assert invoke(tasks, "verify", "--store", store).exit_code == 0
    assert invoke(tasks, "purge", "t:canary", "--store", store).exit_code == 2


def test_corrections_are_deleted_by_age(tasks, local, tmp_path):
    local.publish("t", bundle(1))
    local.correct("t", [Correction(digest=f"sha256:{'0' * 64}", labels=("a",))])
    store = tmp_path / "store"
    kept = invoke(tasks, "gc", "--store", store, "--corrections-older-than", "30d")
    assert (kept.exit_code, local.corrections.read("t").records[0].version) == (0, 1)
    gone = invoke(tasks, "gc", "--store", store, "--corrections-older-than", "0s")
    assert "corrections" in gone.output
    assert not local.corrections.read("t").records[0].corrections
