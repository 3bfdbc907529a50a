"""A real browser, Debian's chromium without a window, and what may be done with a page in it."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, sync_playwright

from tests.conftest import REPOSITORY
from tests.tools import find_tool, skip_without

WAIT_MS = 90_000  # generous: the machine may have other work
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
_FLAGS = [
    "--no-sandbox",  # tests run as root in containers, where chromium refuses its own sandbox
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A camera that shows a test picture, and is allowed without asking.
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
]
_AXE = REPOSITORY / "node_modules" / "axe-core" / "axe.min.js"


@contextmanager
def chromium() -> Iterator[Browser]:
    path = find_tool("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_FLAGS, timeout=WAIT_MS)
        yield browser
        browser.close()


@contextmanager
def open_page(browser: Browser, url: str, **options) -> Iterator[Page]:
    """A page with a profile of its own; afterwards nothing may have gone wrong in it.

    Answers that are refusals are logged by the browser as errors; those are the tests' own.
    """
    wrong: list[str] = []
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(WAIT_MS)
    page.on(
        "console",
        lambda message: (
            wrong.append(f"{message.type}: {message.text}")
            if message.type in ("error", "warning")
            and not message.text.startswith("Failed to load resource")
            else None
        ),
    )
    page.on("pageerror", lambda error: wrong.append(f"uncaught: {error}"))
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((f"{url}/", "blob:"))
            else wrong.append(f"request to another site: {request.url}")
        ),
    )
    page.goto(url)
    yield page
    context.close()
    assert wrong == []


_MAKE_TRANSFER = """([files]) => {
  const transfer = new DataTransfer();
  for (const { name, type, content } of files) {
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    transfer.items.add(new File([bytes], name, { type }));
  }
  return transfer;
}"""


def drop(page: Page, selector: str, *files: tuple[str, str, bytes]) -> None:
    """Let go of files (name, type, content) over an element."""
    encoded_files = [
        {"name": name, "type": kind, "content": base64.b64encode(content).decode()}
        for name, kind, content in files
    ]
    transfer = page.evaluate_handle(_MAKE_TRANSFER, [encoded_files])
    for event in ("dragover", "drop"):
        page.dispatch_event(selector, event, {"dataTransfer": transfer})


def paste(page: Page, *files: tuple[str, str, bytes]) -> None:
    encoded_files = [
        {"name": name, "type": kind, "content": base64.b64encode(content).decode()}
        for name, kind, content in files
    ]
    page.evaluate(
        f"""(files) => document.body.dispatchEvent(new ClipboardEvent("paste", {{
          bubbles: true, clipboardData: ({_MAKE_TRANSFER})([files]) }}))""",
        encoded_files,
    )


# The contrast of every piece of text with what is behind it, by the formula of WCAG 2.2.
_LOW_CONTRAST = """() => {
  const channels = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const parse = (colour) => {
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = canvas.getImageData(0, 0, 1, 1).data;
    const alpha = channels(colour).length === 4 ? channels(colour)[3] : 1;
    return { rgb: [r, g, b], alpha };
  };
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = getComputedStyle(each).backgroundColor;
      if (colour !== "rgba(0, 0, 0, 0)" && colour !== "transparent") return parse(colour).rgb;
    }
    return [255, 255, 255];
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92
      : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const low = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || element.closest(":disabled, .unseen, noscript")) {
      continue;
    }
    const style = getComputedStyle(element);
    const pair = [light(parse(style.color).rgb), light(behind(element))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) low.push(`${ratio.toFixed(2)}: ${text.slice(0, 40)}`);
  }
  return low;
}"""


def low_contrast(page: Page) -> list[str]:
    """Text that is fainter than WCAG AA allows."""
    found: list[str] = page.evaluate(_LOW_CONTRAST)
    return found


def axe_violations(page: Page) -> list[str]:
    """What axe-core finds wrong with the accessibility of a page, by rule and element."""
    if not _AXE.exists():
        skip_without("axe-core", "npm ci")
    page.evaluate(_AXE.read_text(encoding="utf-8"))
    violations = page.evaluate("axe.run().then((found) => found.violations)")
    return [f"{each['id']}: {node['html'][:120]}" for each in violations for node in each["nodes"]]
