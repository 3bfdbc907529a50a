"""The console with a shadow version: read the agreement, promote it, roll back; in a browser."""

import io
import time

import httpx
import numpy as np
import pytest
from engram_vit import Client
from PIL import Image

from tests.e2e.browser import axe_violations
from tests.e2e.server_process import serving

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("rollout")) as server:
        yield server


def picture(colour: tuple[int, int, int], seed: int) -> bytes:
    """A noisy picture of one colour."""
    noise = np.random.default_rng(seed).normal(0, 60, (64, 64, 3))
    out = io.BytesIO()
    Image.fromarray(np.clip(noise + colour, 0, 255).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def examples(first: int, count: int, swap: int = 0) -> dict[str, list[bytes]]:
    """Pictures by label; the first `swap` blue ones are called red."""
    found = {
        label: [picture(colour, first + number) for number in range(count)]
        for label, colour in COLOURS.items()
    }
    found["red"] += found["blue"][:swap]
    found["blue"] = found["blue"][swap:]
    return found


def taught_bundle(client: Client, name: str, **options) -> bytes:
    client.teach(name, examples(0, 10, **options))
    return client.pull(name).data


@pytest.fixture(scope="module")
def colours(server):
    """A task, and the bundle of a version that takes most blue pictures for red ones."""
    with Client(server.url) as client:
        client.push(taught_bundle(client, "first"), "colours")
        return taught_bundle(client, "second", swap=8)


def wait_for(page, text: str) -> None:
    """Reload the task page until it has a text: shadows are counted after the answers."""
    deadline = time.monotonic() + 30
    while text not in page.inner_text("#task-detail"):
        assert time.monotonic() < deadline, page.inner_text("#task-detail")
        page.reload()
        page.wait_for_selector(".version")


def test_publish_as_shadow_read_agreement_promote_and_roll_back(page, server, colours, pictures):
    page.click("nav >> text=Tasks")
    page.set_input_files(
        "#bundle",
        {"name": "colours.safetensors", "mimeType": "application/octet-stream", "buffer": colours},
    )
    page.wait_for_selector(".verdict[data-valid='true']")
    page.fill(".publish [name='task']", "colours")
    page.fill(".publish [name='alias']", "shadow")
    page.wait_for_selector("#publish-hint >> text=1 version")
    page.click(".publish button[type='submit']")
    page.wait_for_selector("#notes >> text=colours version 2")
    page.goto(f"{server.url}/#tasks/colours")
    page.wait_for_selector(".comparison >> text=Nothing was compared yet")

    for seed in range(100, 145):
        for colour in COLOURS.values():
            answer = httpx.post(
                f"{server.url}/predict?tasks=colours", content=picture(colour, seed), timeout=60
            ).json()
            assert answer["images"][0]["tasks"]["colours"]["version"] == 1

    wait_for(page, "agreement on")
    found = httpx.get(f"{server.url}/tasks/colours/comparison").json()["pairs"][0]
    assert 0 < found["agreement"] < 1
    page.reload()
    page.wait_for_selector(".comparison .agreement")
    shown = page.inner_text(".comparison")
    assert f"{100 * found['agreement']:.1f} %" in shown.replace("\u202f", " ").replace(
        "\u00a0", " "
    )
    assert "Last disagreements" in shown
    assert found["disagreements"][0]["digest"][7:19] in shown
    assert page.locator(".drift svg polyline").count() == 2  # from two points of 50 images on
    assert axe_violations(page) == []
    page.screenshot(path=pictures / "rollout.png", full_page=True)

    page.click("text=Promote…")
    page.fill("dialog [name='min_agreement']", "1")
    page.fill("dialog [name='min_images']", "10")
    page.click("dialog >> text=Promote >> nth=-1")
    page.wait_for_selector("#task-errors >> text=is required")

    page.click("text=Promote…")
    page.fill("dialog [name='min_agreement']", "0.2")
    page.fill("dialog [name='min_images']", "10")
    assert axe_violations(page) == []
    page.click("dialog >> text=Promote >> nth=-1")
    page.wait_for_selector("[data-version='2'] .tag >> text=default")
    page.click("details >> text=History")
    assert "promoted version 2 on evidence" in page.inner_text(".history")

    page.click("text=Roll back to version 1")
    page.wait_for_selector("[data-version='1'] .tag >> text=default")
