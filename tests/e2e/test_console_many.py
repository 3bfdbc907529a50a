"""The console with many photos and many tasks, in a real browser."""

import csv
import io
import json
import re
import shutil
import zipfile
from pathlib import Path
from unittest import mock

import httpx
import pytest
from engram_server.embedded import BACKBONE
from engram_server.model import load_backbone
from engram_store import open_store
from engram_vit.answers import COLUMNS
from playwright.sync_api import expect

from tests.conftest import PHOTOS, REPOSITORY
from tests.e2e.browser import DESKTOP, WAIT_MS, axe_violations, drop, open_page
from tests.e2e.server_process import serving
from tests.serving import make_bundle, photo

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True}
HEIC = REPOSITORY / "tests" / "data" / "drawn.heic"
TASKS = 2000
SCREENS = 3  # the tallest page, in heights of the window
PAINT_MS = 1000


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    """The embedded backbone and its demo tasks."""
    with serving(tmp_path_factory.mktemp("photos")) as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """60 readable photos in two folders, one of them twice, and two files that are not images."""
    folder = tmp_path_factory.mktemp("folder") / "photos"
    (folder / "more").mkdir(parents=True)
    samples = sorted(PHOTOS.glob("*.jpg"))
    for sample in samples:
        shutil.copy(sample, folder)
    for number in range(60 - len(samples)):
        (folder / "more" / f"{number:02}.png").write_bytes(photo(number))
    shutil.copy(folder / "cat.jpg", folder / "more" / "again.jpg")
    (folder / "notes.jpg").write_text("not an image\n" * 20)
    (folder / "cut.jpg").write_bytes((folder / "dog.jpg").read_bytes()[:4000])
    (folder / ".DS_Store").write_bytes(b"hidden")
    (folder / "labels.csv").write_text("not an image either")
    return folder


def choose_folder(page, folder) -> None:
    page.set_input_files("#folder", folder)
    page.wait_for_selector("#table-progress p")


def rows(page) -> list[str]:
    """The names of the photos on this page of the table."""
    return page.locator(".answers-table tbody .file").all_inner_texts()


def set_choice(page, name: str, value: str) -> None:
    page.select_option(f"select[name='{name}'] >> visible=true", value)


def download(page, text: str) -> str:
    with page.expect_download() as waiting:
        page.click(f"text={text}")
    return Path(waiting.value.path()).read_text(encoding="utf-8")


def height_in_screens(page) -> float:
    return page.evaluate("document.documentElement.scrollHeight / window.innerHeight")


def fits_the_width(page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


# --- many photos ----------------------------------------------------------------------------------


def test_a_folder_of_photos_becomes_a_table_that_can_be_filtered_and_saved(page, folder):
    choose_folder(page, folder)
    outcome = page.inner_text("#table-progress")
    assert outcome == "60 photos answered, 2 could not be read, 1 duplicate left out."
    assert page.inner_text("#spoken") == outcome
    assert page.inner_text("#table-count") == "62 photos."
    assert len(rows(page)) == 20
    assert axe_violations(page) == []

    lines = list(csv.DictReader(io.StringIO(download(page, "Download CSV"))))
    assert list(lines[0]) == list(COLUMNS)
    assert len({line["image"] for line in lines}) == 62
    assert len(lines) == 60 * 6 + 2
    cat = next(
        line for line in lines if line["image"] == "photos/cat.jpg" and line["task"] == "cifar10"
    )
    assert (cat["label"], cat["version"]) == ("cat", "1")
    assert cat["in_distribution"] in ("true", "false")
    rejected = {line["image"]: line["error"] for line in lines if line["error"]}
    assert set(rejected) == {"photos/notes.jpg", "photos/cut.jpg"}
    assert "looks like text" in rejected["photos/notes.jpg"]

    set_choice(page, "show", "unreadable")
    assert sorted(rows(page)) == ["cut.jpg", "notes.jpg"]
    documents = json.loads(download(page, "Download JSON"))
    assert {each["image"] for each in documents} == set(rejected)
    set_choice(page, "show", "unknown")
    flagged = {line["image"] for line in lines if line["in_distribution"] == "false"}
    assert page.inner_text("#table-count") == f"{len(flagged)} of 62 photos."
    set_choice(page, "show", "all")
    set_choice(page, "task", "cifar10")
    set_choice(page, "class", "cat")
    assert "cat.jpg" in rows(page)
    set_choice(page, "class", "")
    set_choice(page, "sort", "lowest")
    scores = page.locator(".answers-table .score").all_inner_texts()
    numbers = [float(score.removesuffix(" %")) for score in scores]
    assert numbers == sorted(numbers)
    page.click("text=Next")
    expect(page.locator(".pager")).to_contain_text("21 to 40 of 62")


def test_a_photo_of_the_table_is_shown_large_and_removed(page, folder):
    choose_folder(page, folder)
    page.click("[data-photo='photos/cat.jpg'] .thumbnail")
    page.wait_for_selector(".look[data-task='cifar10']")
    assert page.inner_text("#caption .file") == "cat.jpg"
    page.click("#strip [aria-label='Remove cat.jpg']")
    page.click("text=Table of all 61 photos")
    expect(page.locator("#table-count")).to_have_text("61 photos.")
    assert page.locator("[data-photo='photos/cat.jpg']").count() == 0


def test_photos_of_a_zip_file_are_answered(page, rocket):
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("trip/rocket.jpg", rocket, zipfile.ZIP_STORED)
        archive.writestr("trip/noise.png", photo(1), zipfile.ZIP_DEFLATED)
        archive.writestr("__MACOSX/trip/._rocket.jpg", b"hidden")
        archive.writestr("trip/packed.jpg", rocket, zipfile.ZIP_BZIP2)
    drop(page, "#drop", ("trip.zip", "application/zip", packed.getvalue()))
    page.wait_for_selector("#table-progress p")
    assert page.inner_text("#table-progress") == "2 photos answered, 1 could not be read."
    assert rows(page) == ["rocket.jpg", "noise.png", "packed.jpg"]
    assert "packed with method 12" in page.inner_text(".answers-table .rejected")


def test_heic_photos_are_answered_without_a_preview(page):
    files = [HEIC, HEIC.with_name("alpha.heic")]
    drop(page, "#drop", *((each.name, "", each.read_bytes()) for each in files))
    page.wait_for_selector("#table-progress >> text=2 photos answered.")
    assert page.locator(".answers-table .thumbnail").all_inner_texts() == ["heic", "heic"]
    page.click(".answers-table .thumbnail >> nth=0")
    page.wait_for_selector(".card")
    assert page.is_visible("#no-preview")


def test_several_photos_are_corrected_at_once_and_a_correction_is_removed(page, server, folder):
    choose_folder(page, folder)
    for name in ("camel.jpg", "castle.jpg"):
        page.check(f"[data-photo='photos/{name}'] input")
    page.click("text=Correct 2 selected…")
    set_choice(page, "task to correct", "cifar100")
    page.locator(".selection-work option[value='camel']").wait_for(state="attached")
    page.fill(".selection-work input[list]", "camel")
    assert axe_violations(page) == []
    page.click(".selection-work >> text=Correct it")
    page.wait_for_selector("#notes >> text=Corrections of 2 photos stored")
    kept = httpx.get(f"{server.url}/tasks/cifar100/corrections", timeout=60).json()
    assert [each["labels"] for each in kept["corrections"]] == [["camel"], ["camel"]]

    page.goto(f"{server.url}/#tasks/cifar100")
    page.click("text=Corrections received (2)")
    assert axe_violations(page) == []
    page.click(".corrections button >> nth=0")
    page.wait_for_selector(".corrections >> text=1 correction removed.")
    kept = httpx.get(f"{server.url}/tasks/cifar100/corrections", timeout=60).json()
    assert len(kept["corrections"]) == 1


def test_classes_of_a_task_chosen_before_do_not_replace_those_of_the_last(page, folder):
    choose_folder(page, folder)
    page.check("[data-photo='photos/camel.jpg'] input")
    waiting = []
    page.route("**/tasks/cifar10", lambda route: waiting.append(route))
    page.click("text=Correct 1 selected…")
    set_choice(page, "task to correct", "cifar10")
    set_choice(page, "task to correct", "cifar100")
    offered = page.locator(".selection-work option[value='camel']")
    offered.wait_for(state="attached")
    for route in waiting:
        route.continue_()
    page.wait_for_load_state("networkidle")
    assert offered.count() == 1


def test_sending_can_be_stopped_and_continued(page, folder):
    page.route("**/predict*", lambda route: None)  # no answer comes
    page.set_input_files("#folder", folder)
    page.wait_for_selector("#table-progress >> text=Stop")
    page.click("#table-progress >> text=Stop")
    page.wait_for_selector("#table-progress >> text=/6[23] not sent/")
    page.unroute("**/predict*")
    page.click("text=Continue")
    page.wait_for_selector("#table-progress >> text=60 photos answered")


def test_a_busy_server_is_asked_again(page, rocket, cat):
    def reject_once(route):
        problem = {
            "type": "urn:engram:problem:overloaded",
            "title": "Overloaded",
            "detail": "Busy.",
        }
        route.fulfill(status=429, headers={"Retry-After": "1"}, body=json.dumps(problem))

    page.route("**/predict*", reject_once, times=1)
    files = [("a.jpg", "image/jpeg", rocket), ("b.jpg", "image/jpeg", cat)]
    drop(page, "#drop", *files)
    page.wait_for_selector("#table-progress >> text=2 photos answered")


def test_a_picture_is_taken_with_the_camera(page):
    page.click("#camera")
    page.wait_for_selector("dialog video")
    expect(page.locator("dialog .primary")).to_be_enabled(timeout=WAIT_MS)
    assert axe_violations(page) == []
    page.click("text=Take the picture")
    page.wait_for_selector(".card")
    assert re.fullmatch(r"camera-[\d-]+\.jpg", page.inner_text("#caption .file"))
    assert page.locator("dialog").count() == 0


def test_an_image_out_of_distribution_has_a_badge_that_explains_itself(page, server):
    noise = next(
        content
        for content in map(photo, range(20))
        if not httpx.post(
            f"{server.url}/predict?tasks=flowers", content=content, timeout=60
        ).json()["images"][0]["tasks"]["flowers"]["in_distribution"]
    )
    drop(page, "#drop", ("noise.png", "image/png", noise))
    badge = page.locator(".card[data-task='flowers'] button.badge")
    badge.wait_for()
    assert badge.inner_text() == "Out of distribution"
    badge.focus()
    assert "does not look like the images" in page.locator("#distribution-tip").inner_text()
    assert axe_violations(page) == []
    page.keyboard.press("Escape")
    expect(page.locator("#distribution-tip")).to_be_hidden()


def test_the_first_answer_is_on_the_first_screen_of_a_phone(browser, server, folder):
    with open_page(browser, server.url, **PHONE) as page:
        page.wait_for_selector("#server[data-state='ready']")
        page.tap("#samples button[title='A tabby cat']")
        page.wait_for_selector(".card")
        page.wait_for_function("""() => {
          const first = document.querySelector(".card .bars li").getBoundingClientRect();
          return first.top > 0 && first.bottom < window.innerHeight;
        }""")
        assert axe_violations(page) == []
        choose_folder(page, folder)
        assert fits_the_width(page)
        assert height_in_screens(page) <= SCREENS
        assert axe_violations(page) == []


def test_the_status_dot_follows_the_server_within_two_seconds(browser, tmp_path):
    with serving(tmp_path) as server, open_page(browser, server.url, **DESKTOP) as page:
        page.wait_for_selector("#server[data-state='ready']")
        server.kill()
        page.wait_for_selector("#server[data-state='failed']", timeout=2000)
        assert page.inner_text("#server") == "The server is not reachable."


# --- many tasks -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded(browser, tmp_path_factory):
    """A server with 2,000 tasks of four teams and of none."""
    folder = tmp_path_factory.mktemp("crowded")
    bundle = make_bundle(load_backbone(BACKBONE), 1, classes=4, memory=0, golden=False)
    store = open_store(folder / "store")
    with mock.patch("os.fsync"):  # which takes most of the time
        for number in range(TASKS):
            team = ("", "birds/", "factory/", "plants/", "roads/")[number % 5]
            store.publish(f"{team}task-{number:04}", bundle)
    with serving(folder) as server:
        yield server


@pytest.mark.parametrize("shape", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_two_thousand_tasks_are_listed_in_pages_and_found(browser, crowded, shape):
    with open_page(browser, f"{crowded.url}", **shape) as page:
        page.click(".pages a[href='#tasks']")
        page.wait_for_selector(".tasks .name")
        page.reload()
        page.wait_for_selector(".tasks .name")
        painted = page.evaluate("performance.getEntriesByType('paint').map((e) => e.startTime)")
        assert max(painted) <= PAINT_MS
        assert page.inner_text("#tasks-summary").startswith("2,001 tasks")
        assert height_in_screens(page) <= SCREENS
        assert fits_the_width(page)
        assert axe_violations(page) == []
        page.click("text=Next")
        expect(page.locator(".tasks [data-task='base']")).to_have_count(0)
        page.click("text=Previous")
        page.wait_for_selector(".tasks [data-task='base']")
        set_choice(page, "team", "roads")
        page.wait_for_selector(".tasks [data-task='roads/task-0004']")
        page.fill("#task-filter input", "1234")
        page.wait_for_selector(".tasks [data-task='roads/task-1234']")
        expect(page.locator(".tasks li")).to_have_count(1)


@pytest.mark.parametrize("shape", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_tasks_are_picked_from_suggestions_and_answers_are_grouped(browser, crowded, shape, cat):
    with open_page(browser, crowded.url, **shape) as page:
        page.wait_for_selector("#server[data-state='ready']")
        page.fill("#refs", "task-123")
        page.wait_for_selector("#task-suggestions [role='option'] >> text=roads/task-1234")
        assert axe_violations(page) == []
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        page.fill("#refs", "roads/task-1234@")
        page.wait_for_selector("#task-suggestions [role='option'] >> text=roads/task-1234@1")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        drop(page, "#drop", ("cat.jpg", "image/jpeg", cat))
        page.wait_for_selector(".card")
        names = page.locator(".card h2").all_inner_texts()
        assert len(names) == 2
        assert names[1] == "roads/task-1234@1"
        page.focus("#refs")
        page.keyboard.press("Backspace")
        page.click(f"[aria-label='Remove {names[0]}']")
        page.press("#refs", "Enter")
        page.wait_for_selector(".group")
        assert page.inner_text("#spoken") == "256 tasks answered for cat.jpg."
        assert page.locator(".group").count() == 5
        assert "left out" in page.inner_text(".took")
        assert height_in_screens(page) <= SCREENS
        assert fits_the_width(page)
        assert axe_violations(page) == []
        page.click(".group >> nth=2 >> summary")
        page.wait_for_selector(".group >> nth=2 >> .card")


def test_a_retired_task_is_listed_and_restored(browser, crowded):
    name = "birds/task-0001"
    with open_page(browser, crowded.url, **DESKTOP) as page:
        page.goto(f"{crowded.url}/#tasks/{name.replace('/', '%2F')}")
        page.click("text=Retire the task…")
        page.click("dialog >> text=Retire it")
        page.wait_for_selector("#task-list:not([hidden])")
        set_choice(page, "show", "retired")
        page.wait_for_selector(f".tasks [data-task='{name}'] .restore")
        assert axe_violations(page) == []
        page.click(f".tasks [data-task='{name}'] .name")
        page.wait_for_selector("#task-detail .badge >> text=Retired")
        assert axe_violations(page) == []
        page.click(".pages a[href='#tasks']")
        page.click(f".tasks [data-task='{name}'] .restore")
        page.wait_for_selector("text=No retired tasks")
        assert httpx.get(f"{crowded.url}/tasks/{name}", timeout=60).json()["versions"] == [1]


# --- one task -------------------------------------------------------------------------------------


def test_the_code_of_a_task_page_works_as_it_is_shown(page, server, cat):
    page.goto(f"{server.url}/#tasks/cifar10")
    page.click("text=Call this from code")
    assert axe_violations(page) == []
    shown = page.inner_text("#code-curl code")
    address = re.search(r'"(http[^"]+)"', shown).group(1)
    answer = httpx.put(address, content=cat, timeout=60).json()  # as `curl -T` does
    assert answer["images"][0]["tasks"]["cifar10"]["predictions"][0]["label"] == "cat"
    page.click("text=Python")
    assert f'Client("{server.url}")' in page.inner_text("#code-Python code")
    page.click("text=TypeScript")
    assert address in page.inner_text("#code-TypeScript code")


def test_all_classes_of_a_task_can_be_searched(page, server):
    page.goto(f"{server.url}/#tasks/base")
    page.click("summary >> text=1,000 classes")
    page.fill("input[name='class']", "espresso m")
    assert page.inner_text(".classes") == "espresso maker"
    assert page.inner_text("#task-detail [role='status']") == "1 class found."
