"""The report: one page that needs nothing else and trusts no name in it."""

from html.parser import HTMLParser

import numpy as np
import pytest
from engram_server.model import load_backbone
from engram_training.judging import charts
from engram_training.run import fit

from tests.training.pictures import brightness, class_folders, several_labels

QUICK = {"memory": (1, 2), "rates": (0.01, 0.1), "epochs": 3, "batch": 8, "ranks": (3,)}
NASTY = "<script>alert('x')</script>"
VOID = {"meta", "img", "br", "rect", "line", "path", "polyline", "link", "input", "hr"}


@pytest.fixture(scope="module")
def backbone(folder_of):
    return load_backbone(folder_of("vit"))


@pytest.fixture(scope="module")
def page(backbone, tmp_path_factory):
    root = tmp_path_factory.mktemp("report")
    photos = root / "data"
    for split in ("train", "test"):
        class_folders(photos / split, each=8, seed=split == "test")
        (photos / split / "red").rename(photos / split / NASTY.replace("/", "-"))
    (photos / "train" / "blue" / "broken & bad.png").write_text("x")
    # Colours mixed up, so that there are mistakes to show.
    for number, path in enumerate(sorted((photos / "test" / "green").iterdir())[:5]):
        path.rename(photos / "test" / "yellow" / f"mixed-{number}.png")
    out = root / "colours.safetensors"
    regimes = ("memory", "head", "lora")
    fit(photos, name="colours", backbone=backbone, out=out, regimes=regimes, **QUICK)
    return out.with_suffix(".html").read_text()


class Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + " "


def test_the_page_is_well_formed_and_loads_nothing(page):
    read = Reader(page)
    assert read.open == []
    assert all(link.startswith("data:image/jpeg;base64,") for link in read.links)
    assert not {"script", "link", "iframe", "object"} & set(read.tags)
    assert "http" not in page.replace("https-equiv", "")
    assert "url(" not in page
    assert "@import" not in page


def test_the_page_shows_all_sections(page):
    read = Reader(page)
    for words in (
        "95 % interval",
        "Variants",
        "memory 2, rate 0.1",
        "lora 3, rate 0.01",
        "AdamW",
        "validation accuracy",
        "accuracy by confidence",
        "Confusion matrix",
        "Most confident mistakes",
        "parameters, D·L·m + D + D·K",
        "FLOPs added by this task",
        "bytes",
        "broken & bad.png",
        "skipped 1 images",
    ):
        assert words in read.text, words
    assert read.tags.count("img") > 0


def test_names_are_never_markup(page):
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("make", [several_labels, brightness])
def test_other_task_types_have_a_page(backbone, tmp_path, make):
    out = tmp_path / "task.safetensors"
    fit(make(tmp_path / "data"), name="task", backbone=backbone, out=out, **QUICK)
    assert Reader(out.with_suffix(".html").read_text()).open == []


def test_curves_stand_values_that_are_not_finite_or_all_the_same():
    drawn = charts.curves("loss", [1, 2], [("a", [float("nan"), 1.0]), ("b", [1.0, 1.0])], best=1)
    assert drawn.count("<polyline") == 2
    assert "nan" not in drawn
    assert charts.curves("loss", [1], [("a", [float("inf")])], best=0) == ""


def test_one_line_far_above_does_not_flatten_the_others():
    wild = ("wild", [1.0, 1e9])
    calm = [(f"calm {n}", [1.0 + n / 10, 0.5]) for n in range(30)]
    drawn = charts.curves("loss", [1, 2], [wild, *calm], best=1)
    assert ">1e+09<" not in drawn


def test_a_confusion_of_very_many_classes_is_left_to_the_table():
    assert charts.confusion(np.eye(500, dtype=np.int64), ["x"] * 500) == ""
