"""Class names from text and JSON files."""

from pathlib import Path

import pytest
from engram_bundle import TaskBundle
from engram_training.bundles import default_labels
from engram_training.errors import WrongLabels
from engram_training.importing.outputs import read_labels


@pytest.fixture
def written(tmp_path):
    def write(content, name="labels.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("labels.txt", "cat\ndog\nbird of prey\n"),
        ("labels.txt", "cat\ndog\nbird of prey"),
        ("labels.txt", "\ufeffcat\r\n dog \r\nbird of prey\r\n\r\n"),
        ("labels.json", '["cat", "dog", "bird of prey"]'),
        ("labels.txt", ' ["cat", "dog", "bird of prey"]'),
        ("labels.json", '{"2": "bird of prey", "0": "cat", "1": "dog"}'),
    ],
)
def test_names_are_read_in_order(written, name, content):
    assert read_labels(written(content, name)) == ("cat", "dog", "bird of prey")


def test_more_than_ten_indices_are_ordered_as_numbers(written):
    content = "{" + ", ".join(f'"{index}": "n{index}"' for index in reversed(range(12))) + "}"
    assert read_labels(written(content, "l.json")) == tuple(f"n{index}" for index in range(12))


@pytest.mark.parametrize("content", ["[unknown]\ncat", "{}x\ncat", "été\n猫"])
def test_text_may_look_like_anything(written, content):
    assert read_labels(written(content)) == tuple(content.split("\n"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.txt", "", "is empty"),
        ("l.txt", "\n \n", "is empty"),
        ("l.txt", "cat\n\ndog", "line 2 is empty"),
        ("l.txt", b"\xff\xfe\x00", "not UTF-8"),
        ("l.json", "[", "not valid JSON"),
        ("l.json", "[" * 100_000, "not valid JSON"),
        ("l.json", "[]", "is empty"),
        ("l.json", '"cat"', "expected a list"),
        ("l.json", '["cat", 3]', "class 1 is 3"),
        ("l.json", '["cat", " "]', "class 1 is"),
        ("l.json", '["cat", {"a": 1}]', "class 1 is"),
        ("l.json", '{"0": "cat", "2": "dog"}', "without gaps"),
        ("l.json", '{"0": "cat", "0": "dog"}', "without gaps or repetitions"),
        ("l.json", '{"0": 1, "0": "dog"}', "without gaps or repetitions"),
        ("l.json", '{"1": "cat", "2": "dog"}', "must be 0, 1, 2"),
        ("l.json", '{"cat": 0}', "'cat' is not an index"),
        ("l.json", '{"-1": "cat"}', "'-1' is not an index"),
    ],
)
def test_an_invalid_labels_file_is_rejected(written, name, content, message):
    with pytest.raises(WrongLabels, match=message) as error:
        read_labels(written(content, name))
    assert name in str(error.value)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(WrongLabels, match="No such file"):
        read_labels(tmp_path / "typo.txt")


# --- through the command --------------------------------------------------------------------------


def test_labels_reach_the_bundle(reproduction, written, engram_import):
    file = written("\n".join(f"scene {index}" for index in range(11)))
    engram_import(str(reproduction / "Sun_model.pt"), "--labels", str(file), out="t.safetensors")
    labels = TaskBundle.load("t.safetensors").labels
    assert labels[0] == "scene 0"
    assert labels[10] == "scene 10"


def test_without_labels_classes_are_numbered(reproduction, engram_import):
    engram_import(str(reproduction / "Sun_model.pt"), out="t.safetensors")
    assert TaskBundle.load("t.safetensors").labels == default_labels(11)
    assert default_labels(2) == ("class_0", "class_1")


def test_several_tasks_take_their_files_in_order(reproduction, written, engram_import):
    options = []
    for classes in (100, 36, 11):
        names = "\n".join(f"{classes}-{index}" for index in range(classes))
        options += ["--labels", str(written(names, f"{classes}.txt"))]
    engram_import(str(reproduction / "extended_model.pt"), *options)
    found = [
        TaskBundle.load(f"bundles/task-{number}.safetensors").labels[0] for number in (1, 2, 3)
    ]
    assert found == ["100-0", "36-0", "11-0"]


def test_wrong_number_of_labels_is_refused(reproduction, written, engram_import):
    file = written("cat\ndog")
    with pytest.raises(WrongLabels, match="has 2 labels, but task 'task' has 11 classes"):
        engram_import(str(reproduction / "Sun_model.pt"), "--labels", str(file))
    assert list(Path.cwd().iterdir()) == []


def test_wrong_number_of_files_is_refused(reproduction, written, engram_import):
    file = written("cat\ndog")
    with pytest.raises(WrongLabels, match="has 3 tasks, but there are 1 labels files"):
        engram_import(str(reproduction / "extended_model.pt"), "--labels", str(file))
    assert list(Path.cwd().iterdir()) == []
