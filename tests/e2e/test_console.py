"""The console in a real browser, on a real server: what people see and do there works.

Pictures of the pages are written to the folder that SCREENSHOTS names, or to a temporary one.
"""

import json
import re
from pathlib import Path

import httpx
import pytest
from engram_server.embedded import BACKBONE
from engram_server.model import load_backbone
from engram_store import open_store
from playwright.sync_api import expect

from tests.bundles import bundle as foreign_bundle
from tests.e2e.browser import DESKTOP, WAIT_MS, drop, low_contrast, open_page, paste
from tests.e2e.server_process import serving
from tests.serving import make_bundle

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True}
OCTETS = "application/octet-stream"
READ, ADMIN = "read-key-123", "admin-key-456"


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    """The embedded backbone and its demo tasks, as `make serve` gives them."""
    with serving(tmp_path_factory.mktemp("console")) as server:
        yield server


@pytest.fixture(scope="module")
def bundles():
    """Two bundles for the embedded backbone."""
    backbone = load_backbone(BACKBONE)
    return [
        make_bundle(backbone, seed, classes=3, description=text, metrics={"test_accuracy": 0.875})
        for seed, text in enumerate(["A first try", "A second try"])
    ]


def api(server, method, path, **options):
    answer = httpx.request(method, f"{server.url}{path}", timeout=60, **options)
    assert answer.is_success, answer.text
    return answer.json()


def open_tasks(page):
    page.click(".pages a[href='#tasks']")
    page.wait_for_selector(".tasks .name")


def open_task(page, name):
    open_tasks(page)
    page.click(f".tasks [data-task='{name}'] .name")
    page.wait_for_selector(".version")


def picture_of(page) -> str:
    """The large picture's pixels."""
    return page.evaluate("document.getElementById('canvas').toDataURL()")


def shown_answer(page, task) -> list[tuple[str, str]]:
    """The labels and scores on a task's card."""
    rows = page.locator(f".card[data-task='{task}'] .bars li")
    return [
        (row.locator(".label").inner_text(), row.locator(".score").inner_text())
        for row in rows.all()
    ]


def expected_answer(answer, task) -> list[tuple[str, str]]:
    found = answer["images"][0]["tasks"][task]["predictions"]
    return [(each["label"].replace("_", " "), f"{each['score'] * 100:.1f} %") for each in found]


def chosen_tasks(page) -> list[str]:
    """The chips of the task picker."""
    chips = page.locator(".task-picker .chip").all_inner_texts()
    return [chip.removesuffix("×").strip() for chip in chips]


# --- asking ---------------------------------------------------------------------------------------


def test_a_dropped_image_is_answered_by_every_task(page, server, rocket):
    drop(page, "#drop", ("rocket.jpg", "image/jpeg", rocket))
    page.wait_for_selector(".card")
    tasks = page.locator(".card h2").all_inner_texts()
    assert set(tasks) == {"base", "cifar10", "cifar100", "flowers", "leaves", "quality"}
    answer = api(server, "POST", "/predict", content=rocket)
    for task in ("base", "cifar10", "flowers"):
        shown, expected = shown_answer(page, task), expected_answer(answer, task)
        assert [label for label, _ in shown] == [label for label, _ in expected]
        # The second request has a context in half precision: the last digit may differ.
        for (_, score), (_, target) in zip(shown, expected, strict=True):
            assert float(score.rstrip(" %")) == pytest.approx(float(target.rstrip(" %")), abs=0.11)
    assert "6 tasks answered for rocket.jpg" in page.inner_text("#spoken")
    assert page.locator(".facts .badge").inner_text() in ("cache miss", "cache hit")
    page.click("#again")
    page.wait_for_selector(".badge[data-cache='hit']")
    assert "ms" in page.inner_text(".took")


def test_the_heat_map_is_switched_between_tasks_and_off_again(page, rocket):
    drop(page, "body", ("rocket.jpg", "image/jpeg", rocket))
    page.wait_for_selector(".card")
    plain = picture_of(page)
    seen = {}
    for task in ("cifar10", "flowers"):
        page.click(f".look[data-task='{task}']")
        assert page.get_attribute(f".look[data-task='{task}']", "aria-pressed") == "true"
        assert page.locator(".look[aria-pressed='true']").count() == 1
        assert page.inner_text("#caption").startswith(f"Attention of {task}")
        assert task in page.get_attribute("#canvas", "aria-label")
        seen[task] = picture_of(page)
    assert len({plain, *seen.values()}) == 3
    page.click("#caption >> text=Hide")
    assert picture_of(page) == plain
    assert page.locator(".look[aria-pressed='true']").count() == 0


def test_images_can_be_pasted_chosen_or_picked_from_the_samples(page, cat, rocket):
    paste(page, ("pasted.png", "image/jpeg", cat))
    page.wait_for_selector(".card")
    page.set_input_files("#files", {"name": "r.jpg", "mimeType": "image/jpeg", "buffer": rocket})
    page.wait_for_selector("#strip .thumbnail[aria-label='r.jpg'][aria-current]")
    page.click("#samples button[title='A cup of espresso']")
    page.wait_for_selector("#strip .thumbnail[aria-label='coffee.jpg'][aria-current]")
    assert page.locator("#strip .thumbnail").count() == 3
    page.click("#strip .thumbnail[aria-label='pasted.png']")
    assert page.inner_text("#caption .file") == "pasted.png"


def test_samples_go_to_the_tasks_that_know_them_and_own_images_to_all(page, cat):
    page.click("#samples button[title='A honey bee']")
    page.wait_for_selector(".card")
    assert chosen_tasks(page) == ["base", "cifar100", "quality"]
    assert page.locator(".card h2").all_inner_texts() == ["base", "cifar100", "quality"]
    drop(page, "#drop", ("cat.jpg", "image/jpeg", cat))
    page.wait_for_selector(".card[data-task='leaves']")
    assert chosen_tasks(page) == []
    page.fill("#refs", "flowers")
    page.click("#samples button[title='A camel']")
    page.wait_for_selector("#strip .thumbnail[aria-label='camel.jpg'][aria-current]")
    assert page.input_value("#refs") == "flowers"


def test_tasks_are_chosen_by_name_and_a_wrong_name_is_explained(page, cat):
    page.fill("#refs", "flowers, cifar10@1")
    drop(page, "#drop", ("cat.jpg", "image/jpeg", cat))
    page.wait_for_selector(".card")
    assert page.locator(".card h2").all_inner_texts() == ["flowers", "cifar10@1"]
    page.fill("#refs", "flovers")
    page.press("#refs", "Enter")
    page.wait_for_selector(".problem")
    assert page.inner_text(".problem-title") == "Unknown task"
    assert "Did you mean 'flowers'" in page.inner_text(".problem")


def test_what_is_no_image_is_explained(page):
    drop(page, "#drop", ("notes.txt", "text/plain", b"just some notes\n" * 20))
    page.wait_for_selector(".problem")
    assert page.inner_text(".problem-title") == "Unreadable image"
    assert "text" in page.inner_text(".problem p >> nth=1")
    assert not page.is_visible("#no-preview")  # which says that the server can read it


def test_an_unreachable_server_is_reported(page, cat):
    page.route("**/predict*", lambda route: route.abort())
    drop(page, "#drop", ("cat.jpg", "image/jpeg", cat))
    page.wait_for_selector(".problem")
    assert page.inner_text(".problem-title") == "The server does not answer"


# --- tasks ----------------------------------------------------------------------------------------


def test_a_bundle_is_checked_published_moved_and_rolled_back(page, server, bundles, cat):
    open_tasks(page)
    drop(page, "body", ("My Pets.safetensors", OCTETS, bundles[0].to_bytes()))
    page.wait_for_selector(".verdict[data-valid='true']")
    verdict = page.inner_text(".verdict")
    assert "A first try" in verdict
    assert "test_accuracy 0.8750" in verdict
    assert page.input_value("input[name='task']") == "my-pets"
    page.fill("input[name='task']", "Not A Name")
    assert page.is_disabled("text=Publish >> nth=-1")
    page.fill("input[name='task']", "pets")
    page.wait_for_selector("#publish-hint >> text=A new task")
    page.click(".publish button[type='submit']")
    page.wait_for_selector(".tasks [data-task='pets']")
    assert "pets version 1 is being served" in page.inner_text("#notes")

    page.set_input_files(
        "#bundle", {"name": "pets.safetensors", "mimeType": OCTETS, "buffer": bundles[1].to_bytes()}
    )
    page.wait_for_selector(".verdict[data-valid='true']")
    page.wait_for_selector("#publish-hint >> text=1 version")
    page.click(".publish button[type='submit']")
    page.wait_for_selector(".tasks [data-task='pets'] >> text=version 2 of 2")

    open_task(page, "pets")
    assert page.locator(".version h2").all_inner_texts() == ["Version 2", "Version 1"]
    assert page.inner_text("[data-version='2'] .tag") == "default"
    assert "87.5 %" in page.inner_text("[data-version='1'] .metrics")
    page.click("text=Roll back to version 1")
    page.wait_for_selector("[data-version='1'] .tag >> text=default")
    assert api(server, "GET", "/tasks/pets")["aliases"] == {"default": 1}
    answer = api(server, "POST", "/predict?tasks=pets", content=cat)
    assert answer["images"][0]["tasks"]["pets"]["version"] == 1

    assert page.locator("text=Roll back").count() == 0  # there is nothing before version 1

    page.click("[data-version='2'] >> text=Point an alias here…")
    page.fill("dialog input", "canary")
    page.click("dialog >> text=Move >> nth=-1")
    page.wait_for_selector("[data-version='2'] .tag >> text=canary")
    assert api(server, "GET", "/tasks/pets")["aliases"] == {"canary": 2, "default": 1}

    page.click("details >> text=History")
    assert "rolled default back to version 1" in page.inner_text(".history")

    with page.expect_download() as download:
        page.click("[data-version='1'] >> text=Download")
    assert Path(download.value.path()).read_bytes() == bundles[0].to_bytes()


def test_a_bundle_with_a_name_is_published_under_it(page):
    bundle = make_bundle(load_backbone(BACKBONE), 5, classes=3, name="team/pets")
    drop(page, "body", ("download (2).safetensors", OCTETS, bundle.to_bytes()))
    page.wait_for_selector(".verdict[data-valid='true']")
    assert page.input_value("input[name='task']") == "team/pets"


def test_retiring_is_confirmed_and_can_be_undone(page, server, bundles):
    for bundle in bundles:
        httpx.put(f"{server.url}/tasks/passing", content=bundle.to_bytes(), timeout=60)
    open_task(page, "passing")
    page.click("[data-version='1'] >> text=Retire…")
    page.click("dialog >> text=Retire it")
    page.wait_for_selector("[data-version='1']", state="detached")
    assert api(server, "GET", "/tasks/passing")["versions"] == [2]

    page.click("text=Retire the task…")
    page.click("dialog >> text=Cancel")
    assert api(server, "GET", "/tasks/passing")["versions"] == [2]
    page.click("text=Retire the task…")
    page.click("dialog >> text=Retire it")
    page.wait_for_selector(".tasks [data-task='cifar10']")
    page.wait_for_selector(".tasks [data-task='passing']", state="detached")
    page.click("#notes >> text=Undo >> nth=-1")
    page.wait_for_selector(".tasks [data-task='passing']")
    assert api(server, "GET", "/tasks/passing")["versions"] == [2]


def test_a_change_made_by_somebody_else_in_the_meantime_is_seen(page, server, bundles):
    for bundle in bundles:
        httpx.put(f"{server.url}/tasks/shared", content=bundle.to_bytes(), timeout=60)
    open_task(page, "shared")
    api(server, "PUT", "/tasks/shared/aliases/best", json={"version": 1})
    page.click("[data-version='1'] >> text=Make default")
    page.wait_for_selector("#task-errors .problem")
    assert page.inner_text("#task-errors .problem-title") == "Precondition failed"
    page.wait_for_selector("[data-version='1'] .tag >> text=best")
    page.click("[data-version='1'] >> text=Make default")
    page.wait_for_selector("[data-version='1'] .tag >> text=default")


def test_a_version_is_judged_in_one_line_and_the_other_figures_are_folded(page, server):
    metrics = {
        "test_accuracy": 0.667,
        "test_accuracy_low": 0.6372,
        "test_accuracy_high": 0.695522,
        "test_images": 1000.0,
        "test_loss": 0.922443,
        "val_accuracy": 0.705,
        "val_images": 400,
    }
    bundle = make_bundle(load_backbone(BACKBONE), 3, classes=3, metrics=metrics)
    api(server, "PUT", "/tasks/judged", content=bundle.to_bytes())
    open_task(page, "judged")
    line = page.inner_text(".version .headline")
    assert line == "66.7 % (63.7 to 69.6) on 1,000 test images"
    assert not page.is_visible(".version .figures")
    page.click(".version >> text=All figures")
    rows = [row.inner_text().split("\t") for row in page.locator(".figures tr").all()]
    assert rows == [
        ["", "test", "validation"],
        ["accuracy", "66.7 % (63.7 to 69.6)", "70.5 %"],
        ["images", "1,000", "400"],
        ["loss", "0.9224", ""],
    ]


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (b"this is no bundle at all", "it is not a bundle"),
        (foreign_bundle().to_bytes(), "fingerprint"),
    ],
    ids=["no bundle", "of another backbone"],
)
def test_a_bad_bundle_is_refused_with_its_reason(page, server, content, detail):
    before = api(server, "GET", "/tasks")["generation"]
    # Also from the page that asks: a bundle is recognised by its name.
    drop(page, "#drop", ("broken.safetensors", OCTETS, content))
    page.wait_for_selector(".verdict[data-valid='false']")
    assert page.inner_text(".problem-title") == "This bundle cannot be served here"
    assert detail in page.inner_text(".problem")
    assert page.locator(".publish").count() == 0
    assert api(server, "GET", "/tasks")["generation"] == before
    page.click(".verdict >> text=Close")
    page.wait_for_selector("#upload .drop")


# --- keys and failed loads ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(browser, folder_of, tmp_path_factory):
    """A server with both keys, a task, and another whose bundle was damaged on disk."""
    folder = tmp_path_factory.mktemp("guarded")
    backbone = load_backbone(folder_of("vit"))
    store = open_store(folder / "store")
    store.publish("pets", make_bundle(backbone, 1, classes=3))
    broken = make_bundle(backbone, 2)
    store.publish("broken", broken)
    (blob,) = (folder / "store").rglob(broken.digest.removeprefix("sha256:"))
    blob.chmod(0o644)
    blob.write_bytes(b"not what was published")
    with serving(folder, folder_of("vit"), api_key=READ, admin_key=ADMIN) as server:
        yield server


def give_key(page, key):
    page.fill("dialog input[type='password']", key)
    page.press("dialog input[type='password']", "Enter")


def test_a_dialog_requests_the_key_and_the_tab_keeps_it(browser, guarded, cat):
    with open_page(browser, guarded.url, **DESKTOP) as page:
        page.wait_for_selector("dialog")
        assert page.inner_text("dialog h2") == "This server needs a key"
        assert "Authorization" not in page.inner_text("dialog")
        give_key(page, "wrong")
        # Another dialog appears, and its field is empty.
        expect(page.locator("dialog input")).to_have_value("", timeout=WAIT_MS)
        give_key(page, READ)
        page.wait_for_selector("dialog", state="detached")
        drop(page, "#drop", ("cat.jpg", "image/jpeg", cat))
        page.wait_for_selector(".card[data-task='pets']")
        assert page.is_visible("#key")
        page.reload()
        page.wait_for_selector("#server[data-state='ready']")
        open_tasks(page)  # no dialog
        assert page.locator("dialog").count() == 0

        open_task(page, "pets")
        page.click("text=Point an alias here…")
        page.fill("dialog input", "canary")
        page.click("dialog >> text=Move >> nth=-1")  # needs the other key
        page.wait_for_selector("dialog input[type='password']")
        assert "admin key" in page.inner_text("dialog")
        give_key(page, ADMIN)
        page.wait_for_selector(".version .tag >> text=canary")
        page.click("#key")
        page.click("dialog >> text=Forget the key")
        assert page.evaluate("sessionStorage.length") == 0


def test_cancelling_the_key_dialog_shows_the_error(browser, guarded):
    with open_page(browser, guarded.url, **DESKTOP) as page:
        page.wait_for_selector("dialog")
        page.keyboard.press("Escape")
        page.click(".pages a[href='#tasks']")
        page.click("dialog >> text=Cancel")
        page.wait_for_selector("#tasks-errors .problem")
        assert page.inner_text(".problem-title") == "Key required"


def test_a_task_that_could_not_be_loaded_says_why(browser, guarded):
    with open_page(browser, guarded.url, **DESKTOP) as page:
        give_key(page, READ)
        open_tasks(page)
        row = page.locator(".tasks [data-task='broken']")
        assert row.locator(".badge").inner_text() == "Failed"
        assert "damaged or replaced" in row.locator(".failed").inner_text()
        row.locator(".name").click()
        page.wait_for_selector(".version .problem")


# --- live -----------------------------------------------------------------------------------------


def numbers(page) -> dict[str, tuple[str, str]]:
    """The number of each tile of the live page, and what it is about."""
    tiles = page.locator(".tile").all()
    return {
        tile.locator("h2").inner_text(): (
            tile.locator(".number").inner_text(),
            tile.locator(".hint").inner_text(),
        )
        for tile in tiles
    }


def test_one_reading_of_the_metrics_is_enough_for_a_number_in_every_tile(page, server, cat):
    for _ in range(2):
        httpx.post(f"{server.url}/predict?tasks=cifar10", content=cat, timeout=60)
    urls = []

    def only_once(route):
        urls.append(route.request.url)
        route.continue_() if len(urls) == 1 else route.abort()

    page.route("**/metrics", only_once)
    page.click(".pages a[href='#live']")
    page.locator(".tile .hint", has_text="since the start").first.wait_for()
    shown = numbers(page)
    assert len(shown) == 6
    assert all(re.match(r"\d+(\.\d)?( ms| %|/s)?$", number) for number, _ in shown.values()), shown
    assert shown["Queue"] == ("0", "images waiting for the model now")
    assert shown["Answer"][1] == "mean time from request to answer since the start"


def test_tiles_go_back_to_the_whole_time_when_nothing_happens(page, server, cat):
    httpx.post(f"{server.url}/predict?tasks=cifar10", content=cat, timeout=60)
    page.click(".pages a[href='#live']")
    page.locator(".tile polyline[points]").first.wait_for(state="attached")
    shown = numbers(page)
    assert shown["Throughput"][0] == "0.0/s"
    assert re.fullmatch(r"images admitted per second · \d+ since the start", shown["Throughput"][1])
    assert shown["Batch"][1] == "mean number of images in a pass since the start"
    assert float(shown["Batch"][0]) >= 1


def test_traffic_shows_in_the_live_page(page, server, cat):
    page.click(".pages a[href='#live']")
    tile = page.locator(".tile").filter(has=page.locator("h2", has_text="Throughput"))
    tile.locator("polyline[points]").wait_for(state="attached")
    for _ in range(200):
        httpx.post(f"{server.url}/predict?tasks=cifar10", content=cat, timeout=60)
        if tile.locator(".number").inner_text() not in ("–", "0.0/s"):
            break
    assert float(tile.locator(".number").inner_text().removesuffix("/s")) > 0
    assert page.locator(".tile").count() == 6


def test_the_servers_of_the_store_are_listed(page, server):
    page.click(".pages a[href='#live']")
    row = page.locator("#replicas li")
    row.wait_for()
    assert row.locator(".name").inner_text() == f"{server.url} (this one)"
    assert row.locator(".badge").inner_text() == "Up to date"
    generation = api(server, "GET", "/tasks")["generation"]
    assert row.locator(".versions").inner_text() == f"generation {generation}"
    assert page.locator("#replicas-summary").inner_text() == "1 server on this store."


# --- accessibility --------------------------------------------------------------------------------


def test_everything_can_be_done_with_the_keyboard(page):
    def tab_to(selector):
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("(target) => document.activeElement.matches(target)", selector):
                return
        raise AssertionError(f"the Tab key does not reach {selector}")

    tab_to(".skip")
    tab_to("#choose")
    tab_to("#samples .thumbnail")
    page.keyboard.press("Enter")
    page.wait_for_selector(".card")
    tab_to(".look[data-task='cifar10']")
    page.keyboard.press("Space")
    assert page.get_attribute(".look[data-task='cifar10']", "aria-pressed") == "true"
    page.focus(".brand")
    tab_to(".pages a[href='#tasks']")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tasks .name")
    tab_to(".tasks [data-task='cifar10'] .name")
    page.keyboard.press("Enter")
    page.wait_for_selector(".version")
    tab_to("button.danger")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


def test_the_theme_follows_the_system_until_it_is_chosen(browser, server):
    def back(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    with open_page(browser, server.url, color_scheme="dark", **DESKTOP) as page:
        dark = back(page)
        page.click("#theme")
        light = back(page)
        assert dark != light
        page.reload()
        assert back(page) == light
        page.emulate_media(color_scheme="light")
        assert back(page) == light


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_every_page_is_readable_and_fits(browser, server, bundles, rocket, pictures, look):
    """Contrast by WCAG AA, and nothing wider than the screen."""
    api(server, "PUT", "/tasks/readable", content=bundles[0].to_bytes())
    shape = PHONE if look == "phone" else DESKTOP
    scheme = "dark" if look == "dark" else "light"
    with open_page(browser, server.url, color_scheme=scheme, **shape) as page:

        def check(name):
            page.screenshot(path=pictures / f"{look}-{name}.png", full_page=True)
            assert low_contrast(page) == []
            assert (
                page.evaluate("document.documentElement.scrollWidth") <= shape["viewport"]["width"]
            )

        page.wait_for_selector("#server[data-state='ready']")
        check("empty")
        page.fill("#refs", "base, cifar10, cifar100, flowers")
        drop(page, "body", ("rocket.jpg", "image/jpeg", rocket))
        page.wait_for_selector(".card")
        page.click(".look[data-task='cifar10']")
        check("ask")
        open_tasks(page)
        check("tasks")
        open_task(page, "readable")
        check("task")
        page.click("text=Retire the task…")
        check("dialog")
        page.keyboard.press("Escape")
        drop(page, "body", ("broken.safetensors", OCTETS, b"this is no bundle at all"))
        page.wait_for_selector(".verdict")
        check("refused")
        page.click(".pages a[href='#live']")
        page.locator(".tile polyline[points]").first.wait_for(state="attached")
        check("live")


def test_the_answer_on_the_page_is_the_one_of_the_api_and_no_more(page, cat):
    """The page asks for the attention along with the answers, in one request."""
    with page.expect_response(lambda response: "/predict" in response.url) as waiting:
        drop(page, "#drop", ("cat.jpg", "image/jpeg", cat))
    response = waiting.value
    assert "explain=attention" in response.url
    answer = json.loads(response.body())
    page.wait_for_selector(".card")
    assert page.locator(".card").count() == len(answer["images"][0]["tasks"])
