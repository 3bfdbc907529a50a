"""Takes the picture of the page Teach that the documents show.

python -m tests.e2e.teach_picture
"""

import io
import tempfile
from pathlib import Path

from PIL import Image

from tests.conftest import REPOSITORY
from tests.e2e.browser import chromium, drop, open_page
from tests.e2e.server_process import serving
from tests.e2e.test_console_teaching import open_teach, teach, views

PICTURE = REPOSITORY / "docs" / "images" / "teach.png"
WINDOW = {"width": 1180, "height": 1330}
CLASSES = {
    "mammal": ("camel", "cat", "dog"),
    "insect": ("bee", "butterfly"),
    "building": ("bridge", "castle"),
}


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder)) as server,
        chromium() as browser,
        open_page(browser, server.url, viewport=WINDOW, color_scheme="light") as page,
    ):
        page.wait_for_selector("#server[data-state='ready']")
        open_teach(page)
        photos_by_label = {
            label: [each for name in names for each in views(name, 2)]
            for label, names in CLASSES.items()
        }
        photos_by_label["building"].append(list(views("dog", 3))[2])  # in the wrong class
        teach(page, "photos", photos_by_label)
        drop(page, "#trial", list(views("camel", 4))[3])
        page.wait_for_selector(".tried .card")
        page.evaluate("() => window.scrollTo(0, 0)")
        page.click("#notes button[aria-label='Close']")
        page.mouse.move(0, WINDOW["height"])
        screenshot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    # Its many small photos look as good in 256 colours, in a third of the bytes.
    screenshot.quantize(256).save(PICTURE, optimize=True)


if __name__ == "__main__":
    main()
