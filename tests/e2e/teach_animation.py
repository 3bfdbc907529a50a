"""Takes the animation of the page Teach that the documents show, frame by frame in Chromium.

python -m tests.e2e.teach_animation
"""

import io
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page

from tests.conftest import REPOSITORY
from tests.e2e.browser import chromium, drop, open_page
from tests.e2e.server_process import serving
from tests.e2e.test_console_teaching import column, correct_by_typing, open_teach, photo

ANIMATION = REPOSITORY / "docs" / "images" / "teach.webp"
WINDOW = {"width": 1000, "height": 820}
WIDTH = 800  # of the animation
CLASSES = {
    "mammal": ("camel", "cat", "dog"),
    "insect": ("bee", "butterfly"),
    "building": ("bridge", "castle"),
}
TRIALS = ("horse", "coffee")  # a new photo of a class, and one of no class, which is corrected
NEW_CLASS = "drink"
SHORT_MS, LONG_MS = 450, 2200


class Recorder:
    def __init__(self, page: Page) -> None:
        self._page = page
        self._frames: list[Image.Image] = []
        self._durations: list[int] = []

    def take(self, duration: int = SHORT_MS, below: str | None = None) -> None:
        """Add the visible part of the page, from a little above the element `below`."""
        top = "() => window.scrollTo(0, 0)"
        to_element = "(each) => window.scrollTo(0, each.getBoundingClientRect().top + scrollY - 24)"
        if below is None:
            self._page.evaluate(top)
        else:
            self._page.locator(below).first.evaluate(to_element)
        frame = Image.open(io.BytesIO(self._page.screenshot(animations="disabled"))).convert("RGB")
        height = round(frame.height * WIDTH / frame.width)
        self._frames.append(frame.resize((WIDTH, height), Image.Resampling.LANCZOS))
        self._durations.append(duration)

    def save(self, path: Path) -> None:
        first, *others = self._frames
        first.save(
            path,
            save_all=True,
            append_images=others,
            duration=self._durations,
            loop=0,
            quality=70,
            method=6,
        )


def record(page: Page) -> Recorder:
    recorder = Recorder(page)
    open_teach(page)
    recorder.take()
    page.fill("#teach-task", "photos")
    for place, (label, names) in enumerate(CLASSES.items(), 1):
        if place > page.locator("#class-list > li").count():
            page.click("#add-class")
        page.fill(f"{column(place)} header input", label)
        recorder.take()
        for name in names:
            count = page.locator("[data-fresh]").count()
            drop(page, column(place), photo(name))
            page.locator("[data-fresh]").nth(count).wait_for()
            recorder.take()
    recorder.take(LONG_MS)
    page.click("#teach")
    page.wait_for_selector("#taught-title")
    page.click("#notes button[aria-label='Close']")
    page.mouse.move(0, WINDOW["height"])
    recorder.take(LONG_MS)
    for name in TRIALS:
        page.locator(".tried").evaluate("(each) => each.replaceChildren()")
        drop(page, "#trial", photo(name))
        page.wait_for_selector(".tried .card")
        recorder.take(LONG_MS, below="#trial")
    correct_by_typing(page, ".tried .card", NEW_CLASS)
    page.locator(".tried .bars li:first-child .label", has_text=NEW_CLASS).wait_for()
    page.mouse.move(0, WINDOW["height"])
    recorder.take(LONG_MS, below="#trial")
    return recorder


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder)) as server,
        chromium() as browser,
        open_page(browser, server.url, viewport=WINDOW, color_scheme="light") as page,
    ):
        page.wait_for_selector("#server[data-state='ready']")
        record(page).save(ANIMATION)


if __name__ == "__main__":
    main()
