"""The training report's drawings in a real browser."""

from pathlib import Path

import numpy as np
import pytest
from engram_server.model import load_backbone
from engram_training.judging import charts, report
from engram_training.judging.metrics import Calibration
from engram_training.run import fit

from tests.e2e.browser import axe_violations, low_contrast
from tests.training.pictures import class_folders

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

CUT_OFF = """() => [...document.querySelectorAll("svg text")].filter((text) => {
  const inner = text.getBoundingClientRect();
  const outer = text.ownerSVGElement.getBoundingClientRect();
  return inner.left < outer.left || inner.right > outer.right
    || inner.top < outer.top || inner.bottom > outer.bottom + 1;
}).map((text) => text.textContent)"""


@pytest.mark.parametrize("font", ["system-ui, sans-serif", "monospace"])
def test_no_label_is_cut_off(browser, font):
    classes = ["Tomato: yellow leaf curl virus", "WWWWWWWWWWWW", "ship", "日本語の名前"]
    drawings = [
        charts.curves("loss", [1, 12345], [("a", [0.00123, 123456.0])], best=0),
        charts.curves("loss", [1, 2], [("a", [-0.000123, 0.00012])], best=0),
        charts.reliability(Calibration([0.5], [0.5], [3], 0.0)),
        charts.confusion(np.eye(4, dtype=np.int64), classes),
    ]
    template = Path(report.__file__).with_name("report.html").read_text(encoding="utf-8")
    own = template.partition("<style>")[2].partition("</style>")[0]
    style = f"<style>{own} body{{font-family:{font}}}</style>"
    page = browser.new_page()
    page.set_content(style + "".join(drawings))
    assert page.locator("svg text").count() > 15
    assert page.evaluate(CUT_OFF) == []


@pytest.fixture(scope="module")
def report_file(folder_of, tmp_path_factory) -> Path:
    """The report of a run with mistakes, skipped images, several variants and data issues."""
    root = tmp_path_factory.mktemp("report")
    photos = root / "data"
    for split in ("train", "test"):
        class_folders(photos / split, each=8, seed=split == "test")
    for number, path in enumerate(sorted((photos / "test" / "green").iterdir())[:3]):
        path.rename(photos / "test" / "yellow" / f"mixed-{number}.png")
    (photos / "train" / "red" / "00.png").rename(photos / "train" / "blue" / "wrong.png")
    (photos / "train" / "red" / "broken.png").write_text("x")
    out = root / "colours.safetensors"
    quick = {"memory": (1,), "rates": (0.01, 0.1), "epochs": 2, "batch": 8}
    backbone = load_backbone(folder_of("vit"))
    fit(photos, name="colours", backbone=backbone, out=out, regimes=("memory", "layers"), **quick)
    return out.with_suffix(".html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_is_accessible(browser, report_file, scheme):
    page = browser.new_page(color_scheme=scheme)
    page.goto(report_file.as_uri())
    assert page.locator("h2:text-is('Data check')").count() == 1
    assert page.locator("th:text-is('')").count() == 0
    assert axe_violations(page) == []
    assert low_contrast(page) == []
    assert page.evaluate(CUT_OFF) == []


def test_lines_and_axes_are_named(browser, report_file):
    page = browser.new_page()
    page.goto(report_file.as_uri())
    names = page.locator(".legend li").all_text_contents()
    assert len(names) == 3
    assert names[0].endswith("(selected)")
    drawings = page.locator("svg").evaluate_all("all => all.map((one) => one.ariaLabel)")
    assert "validation accuracy by step" in drawings
    matrix = page.locator("svg.confusion").first.locator("text").all_text_contents()
    assert matrix.count("yellow") == 2, "as a row and as a column"
    assert {"predicted →", "true ↓"} <= set(matrix)
