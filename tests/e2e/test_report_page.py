"""The training report's drawings in a real browser."""

from pathlib import Path

import numpy as np
import pytest
from engram_training.judging import charts, report
from engram_training.judging.metrics import Calibration

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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
