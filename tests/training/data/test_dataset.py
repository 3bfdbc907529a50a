"""Data sets: what is read from folders and tables, and how it is split."""

import json
from collections import Counter

import pytest
from engram_training.data.dataset import classes_without, read_data, split_data
from engram_training.errors import DataError
from engram_training.options import TrainOptions

from tests.training.pictures import class_folders


def splits_of(data, label=None):
    return Counter(s.split for s in data.samples if label is None or s.values[0] == label)


def table(tmp_path, text, name="data.csv"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


# --- folders --------------------------------------------------------------------------------------


def test_a_folder_of_class_folders_is_read_in_a_fixed_order(tmp_path):
    data = read_data(class_folders(tmp_path / "photos", each=3))
    assert data.task_type == "single_label"
    assert data.labels == ("blue", "green", "red", "yellow")
    assert [sample.path.name for sample in data.samples[:3]] == ["00.png", "01.png", "02.png"]
    assert splits_of(data) == {None: 12}
    assert data.targets().tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3


@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_folders_named_after_splits_are_splits(tmp_path, val):
    for name in ("train", val, "test"):
        class_folders(tmp_path / name, each=2, colours=("red", "blue"))
    data = read_data(tmp_path)
    assert data.labels == ("blue", "red")
    assert splits_of(data) == {"train": 4, "val": 4, "test": 4}


def test_a_class_may_be_called_test(tmp_path):
    class_folders(tmp_path, each=2, colours=("red",))
    (tmp_path / "red").rename(tmp_path / "test")
    class_folders(tmp_path, each=2, colours=("blue",))
    assert read_data(tmp_path).labels == ("blue", "test")


def test_hidden_files_are_ignored_and_nested_folders_belong_to_their_class(tmp_path):
    class_folders(tmp_path, each=2, colours=("red", "blue"))
    (tmp_path / "red" / ".DS_Store").write_bytes(b"x")
    (tmp_path / ".cache").mkdir()
    class_folders(tmp_path / "red" / "more", each=1, colours=("red",))
    assert Counter(sample.values[0] for sample in read_data(tmp_path).samples) == {
        "red": 3,
        "blue": 2,
    }


def test_names_of_200_characters_are_read(tmp_path):
    class_folders(tmp_path, each=1, colours=("red", "blue"))
    (tmp_path / "red").rename(tmp_path / ("r" * 200))
    (tmp_path / "blue" / "00.png").rename(tmp_path / "blue" / ("b" * 196 + ".png"))
    assert read_data(tmp_path).labels == ("blue", "r" * 200)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: None, "does not exist"),
        (lambda root: root.mkdir(), "contains no images"),
        (lambda root: class_folders(root, each=2, colours=("red",)), "'red' is the only class"),
        (lambda root: (root.mkdir(), (root / "a.png").write_bytes(b"x")), "not in class folders"),
        (lambda root: root.write_text("x"), "neither a folder of class folders nor a table"),
    ],
)
def test_an_invalid_folder_is_rejected(tmp_path, make, message):
    make(tmp_path / "photos")
    with pytest.raises(DataError, match=message):
        read_data(tmp_path / "photos")


def test_the_digest_follows_paths_sizes_and_labels_alone(tmp_path):
    one = read_data(class_folders(tmp_path / "one", each=2)).digest
    moved = read_data(class_folders(tmp_path / "two", each=2)).digest
    assert one == moved
    (tmp_path / "two" / "red" / "00.png").write_bytes(b"longer than it was before" * 100)
    assert read_data(tmp_path / "two").digest != one


# --- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", ["", "path,label\n", "File,Class\n", "\ufeffpath,label\n"])
def test_a_table_of_paths_and_names_is_single_label(tmp_path, header):
    data = read_data(table(tmp_path, header + "a.png,cat\nb/b.png,dog\n\nc.png,cat\n"))
    assert data.task_type == "single_label"
    assert data.labels == ("cat", "dog")
    assert data.samples[1].path == tmp_path / "b" / "b.png"


@pytest.mark.parametrize(
    "text",
    [
        "path,label\na.png,cat;dog\nb.png,cat\n",
        "a.png,cat,dog\nb.png,cat\n",
        "path,labels\na.png,cat;dog\nb.png,cat\n",
    ],
)
def test_several_labels_in_a_row_are_multi_label(tmp_path, text):
    data = read_data(table(tmp_path, text))
    assert data.task_type == "multi_label"
    assert data.targets().tolist() == [[1, 1], [1, 0]]


def test_a_row_of_several_labels_may_have_none(tmp_path):
    data = read_data(table(tmp_path, "path,labels\na.png,cat;dog\nb.png,\n"))
    assert data.targets().tolist() == [[1, 1], [0, 0]]


def test_numbers_with_a_point_are_quantities_and_without_are_classes(tmp_path):
    quantities = read_data(table(tmp_path, "a.png,1\nb.png,2.5\n"))
    assert quantities.task_type == "regression"
    assert quantities.targets().tolist() == [[1.0], [2.5]]
    classes = read_data(table(tmp_path, "a.png,1\nb.png,2\n"))
    assert classes.task_type == "single_label"
    assert classes.labels == ("1", "2")
    data = read_data(table(tmp_path, "a.png,1\nb.png,2\n"), "regression")
    assert data.task_type == "regression"


def test_a_class_that_reads_like_a_number_keeps_its_spelling(tmp_path):
    data = read_data(table(tmp_path, "a.png,1e5\nb.png,nan\nc.png,other\n"))
    assert data.labels == ("1e5", "nan", "other")


def test_a_column_names_the_split(tmp_path):
    data = read_data(table(tmp_path, "path,label,split\na,x,train\nb,y,valid\nc,y,test\n"))
    assert [sample.split for sample in data.samples] == ["train", "val", "test"]


def test_jsonl_is_read_like_csv(tmp_path):
    rows = [{"path": "a.png", "label": "cat"}, {"path": "b.png", "label": "dog", "split": "val"}]
    data = read_data(table(tmp_path, "\n".join(map(json.dumps, rows)), "data.jsonl"))
    assert data.labels == ("cat", "dog")
    several = [{"path": "a.png", "labels": ["cat", "dog"]}, {"path": "b.png", "labels": []}]
    data = read_data(table(tmp_path, "\n".join(map(json.dumps, several)), "data.jsonl"))
    assert data.targets().tolist() == [[1, 1], [0, 0]]
    numbers = [{"path": "a.png", "label": 0.5}, {"path": "b.png", "label": 2}]
    data = read_data(table(tmp_path, "\n".join(map(json.dumps, numbers)), "data.jsonl"))
    assert data.task_type == "regression"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.csv", "path,label\na.png\n", "line 2 of .* has no label"),
        ("d.csv", "path,label\n,cat\n", "line 2 of .* has no path"),
        ("d.csv", "path,label,split\na,x,dev\nb,y,train\n", "unknown split 'dev'"),
        ("d.csv", "path,label\n", "contains no images"),
        ("d.csv", "a,0.5\nb,0.5;0.7\n", "Some images have 1 numbers and others 2"),
        ("d.jsonl", '{"path": "a.png"}', "line 1 of .* has no label"),
        ("d.jsonl", "[1]", "line 1 of .* is not a JSON object"),
        ("d.jsonl", '{"path": "a", "label": true}', "Use a text or a number"),
        ("d.jsonl", "{", "line 1 of .* is not valid JSON"),
    ],
)
def test_an_invalid_table_is_rejected_with_its_line(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        read_data(table(tmp_path, text, name))


# --- splits ---------------------------------------------------------------------------------------


def test_a_split_is_stratified_seeded_and_repeatable(tmp_path):
    data = read_data(class_folders(tmp_path, each=20))
    one = split_data(data, TrainOptions().split, seed=0)
    for label in data.labels:
        assert splits_of(one, label) == {"train": 16, "val": 2, "test": 2}
    assert split_data(data, TrainOptions().split, seed=0) == one
    assert split_data(data, TrainOptions().split, seed=1) != one


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, {"train": 1}),
        (2, {"train": 1, "val": 1}),
        (3, {"train": 2, "val": 1}),
        (6, {"train": 4, "val": 1, "test": 1}),
    ],
)
def test_small_classes_keep_an_image_to_train_on_first(tmp_path, count, expected):
    data = read_data(class_folders(tmp_path, each=count, colours=("red", "blue")))
    split = split_data(data, TrainOptions().split, seed=0)
    assert splits_of(split, "red") == expected
    assert classes_without(split, "train") == []


def test_validation_is_taken_from_training_where_there_is_none(tmp_path):
    class_folders(tmp_path / "train", each=10)
    class_folders(tmp_path / "test", each=3)
    split = split_data(read_data(tmp_path), TrainOptions().split, seed=0)
    assert splits_of(split, "red") == {"train": 9, "val": 1, "test": 3}


def test_existing_splits_are_kept(tmp_path):
    for name in ("train", "val"):
        class_folders(tmp_path / name, each=4)
    data = read_data(tmp_path)
    assert split_data(data, TrainOptions().split, seed=0) is data


def test_data_without_training_images_is_refused(tmp_path):
    path = table(tmp_path, "path,label,split\na,x,val\nb,y,test\n")
    with pytest.raises(DataError, match="in the split 'train'"):
        split_data(read_data(path), TrainOptions().split, seed=0)
