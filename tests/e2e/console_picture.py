"""Takes the picture of the console that the documents show.

python -m tests.e2e.console_picture [photo] [task]
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.conftest import REPOSITORY
from tests.e2e.browser import chromium, open_page
from tests.e2e.server_process import serving

PICTURE = REPOSITORY / "docs" / "images" / "console.png"
WINDOW = {"width": 1280, "height": 860}


def main(photo: str = "bee", task: str = "cifar100") -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder)) as server,
        chromium() as browser,
        open_page(browser, server.url, viewport=WINDOW, color_scheme="light") as page,
    ):
        page.wait_for_selector("#server[data-state='ready']")
        page.click(f"#samples img[src$='{photo}.jpg']")
        page.wait_for_selector(".card")
        page.click(f".look[data-task='{task}']")
        page.mouse.move(0, WINDOW["height"])
        screenshot = Image.open(io.BytesIO(page.screenshot()))
    # Six bits of a colour are as good to the eye, and two thirds of the bytes.
    screenshot = screenshot.convert("RGB").point(lambda value: min(255, (value + 2) // 4 * 4))
    screenshot.save(PICTURE, optimize=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
