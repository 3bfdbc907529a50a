"""Names and files of the bundles, and that all of them are written or none."""

from pathlib import Path

import pytest
from engram_bundle import InvalidName, TaskBundle, UnreadableBundle
from engram_training.errors import WrongOutput

from tests.training.importing.checkpoints import (
    assert_nothing_written,
    combined,
)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b"], "has 3 tasks, but there are 2 names"),
        (["a", "b", "c", "d"], "has 3 tasks, but there are 4 names"),
        (["a", "b", "a"], "Several tasks have the name 'a'"),
    ],
)
def test_names_that_do_not_fit_are_refused(reproduction, engram_import, names, message):
    arguments = [argument for name in names for argument in ("--name", name)]
    with pytest.raises(WrongOutput, match=message):
        engram_import(str(reproduction / "extended_model.pt"), *arguments)
    assert_nothing_written()


@pytest.mark.parametrize("name", ["base", "CIFAR", "../x", "a/b/c"])
def test_an_invalid_name_is_rejected(reproduction, engram_import, name):
    with pytest.raises(InvalidName):
        engram_import(str(reproduction / "Sun_model.pt"), name=name)
    assert_nothing_written()


@pytest.mark.parametrize(
    ("out", "files"),
    [
        ("new/folder", ["new/folder/t-1.safetensors", "new/folder/t-3.safetensors"]),
        ("seed-{name}.safetensors", ["seed-t-1.safetensors", "seed-t-3.safetensors"]),
        ("{name}/task.safetensors", ["t-1/task.safetensors", "t-3/task.safetensors"]),
    ],
)
def test_several_tasks_go_to_a_folder_or_a_pattern(reproduction, engram_import, out, files):
    engram_import(str(reproduction / "extended_model.pt"), out=out, name="t")
    assert all(Path(file).is_file() for file in files)


def test_one_file_for_several_tasks_is_refused(reproduction, engram_import):
    with pytest.raises(WrongOutput, match=r"has 3 tasks, but 'a\.safetensors' is one file"):
        engram_import(str(reproduction / "extended_model.pt"), out="a.safetensors")
    assert_nothing_written()


def test_two_tasks_of_one_file_name_are_refused(state, engram_import):
    both = combined([state("Sun"), state("Places")], [[], []])
    with pytest.raises(WrongOutput, match="Two tasks have the file"):
        engram_import(both, "--name", "a/b", "--name", "a-b")


def test_existing_file_is_never_replaced(reproduction, engram_import):
    Path("bundles").mkdir()
    Path("bundles/task-3.safetensors").write_text("mine")
    with pytest.raises(WrongOutput, match=r"task-3\.safetensors' already exists"):
        engram_import(str(reproduction / "extended_model.pt"))
    assert [file.name for file in Path("bundles").iterdir()] == ["task-3.safetensors"]
    assert Path("bundles/task-3.safetensors").read_text() == "mine"


def test_a_folder_that_cannot_be_created_is_an_error(reproduction, engram_import):
    Path("file").write_text("not a folder")
    with pytest.raises(WrongOutput, match="file"):
        engram_import(str(reproduction / "Sun_model.pt"), out="file/inside")
    assert [file.name for file in Path.cwd().iterdir()] == ["file"]


def test_failure_while_writing_takes_back_what_was_written(
    reproduction, engram_import, monkeypatch
):
    save, saved = TaskBundle.save, []

    def full_after_two(bundle, path):
        if len(saved) == 2:
            raise UnreadableBundle("No space left on device")
        saved.append(save(bundle, path))

    monkeypatch.setattr(TaskBundle, "save", full_after_two)
    with pytest.raises(UnreadableBundle):
        engram_import(str(reproduction / "extended_model.pt"), out="new/folder")
    assert len(saved) == 2
    assert_nothing_written()
