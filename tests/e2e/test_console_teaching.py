"""Teaching and correcting in a real browser, on a real server, by drop, type and click alone.

Pictures of the pages are written to the folder that SCREENSHOTS names, or to a temporary one.
"""

import hashlib
import io
import re
import time
from collections.abc import Iterator

import httpx
import pytest
from PIL import Image, ImageEnhance

from tests.conftest import PHOTOS
from tests.e2e.browser import DESKTOP, drop, low_contrast, open_page
from tests.e2e.server_process import serving
from tests.texts import text_folder

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
CLASSES = {"cat": "cat", "bird": "parrot", "drink": "coffee"}  # and the sample photo of each

File = tuple[str, str, bytes]  # name, type, content


def photo(name: str) -> File:
    return (f"{name}.jpg", "image/jpeg", (PHOTOS / f"{name}.jpg").read_bytes())


def views(name: str, count: int = 5) -> Iterator[File]:
    """Different photos of the same thing: parts of a sample, brighter and darker."""
    image = Image.open(PHOTOS / f"{name}.jpg").convert("RGB")
    width, height = image.size
    for place in range(count):
        margin = 0.04 * (place + 1)
        part = image.crop((int(width * margin), 0, width, int(height * (1 - margin / 2))))
        written = io.BytesIO()
        ImageEnhance.Brightness(part).enhance(0.85 + 0.08 * place).save(written, "JPEG")
        yield (f"{name}-{place + 1}.jpg", "image/jpeg", written.getvalue())


@pytest.fixture(scope="module")
def photos_by_label() -> dict[str, list[File]]:
    return {label: list(views(name)) for label, name in CLASSES.items()}


@pytest.fixture(scope="module")
def server(browser, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("teaching")) as server:
        yield server


def teach_over_http(server, task: str, photos_by_label: dict[str, list[File]]) -> None:
    files = [(label, file) for label, photos in photos_by_label.items() for file in photos]
    form = [(label, (name, content, kind)) for label, (name, kind, content) in files]
    answer = httpx.post(f"{server.url}/tasks/{task}/examples", files=form, timeout=60)
    assert answer.status_code == 201, answer.text


def examples_of(server, task: str) -> dict[str, int]:
    """How many each class has."""
    answer = httpx.get(f"{server.url}/tasks/{task}/examples", timeout=60).json()
    return {each["label"]: each["examples"] for each in answer["classes"]}


def column(place: int) -> str:
    return f"#class-list > li:nth-child({place})"


def open_teach(page, task: str | None = None) -> None:
    page.goto(f"{page.url.partition('#')[0]}#teach{f'/{task}' if task else ''}")
    page.wait_for_selector("#page-teach:not([hidden])")
    if task:
        page.wait_for_selector("#taught-title")


def name_and_fill(page, task: str, photos_by_label: dict[str, list[File]]) -> None:
    page.fill("#teach-task", task)
    for place, (label, photos) in enumerate(photos_by_label.items(), 1):
        if place > page.locator("#class-list > li").count():
            page.click("#add-class")
        page.fill(f"{column(place)} header input", label)
        drop(page, column(place), *photos)
    count = sum(map(len, photos_by_label.values()))
    page.locator("[data-fresh]").nth(count - 1).wait_for()


def teach(page, task: str, photos_by_label: dict[str, list[File]]) -> None:
    name_and_fill(page, task, photos_by_label)
    page.click("#teach")
    page.wait_for_selector("#taught-title")


def best_answer(page, card: str) -> str:
    return page.inner_text(f"{card} .bars li:first-child .label")


def correct_by_typing(page, card: str, label: str) -> None:
    page.click(f"{card} .correct > button")
    page.fill(f"{card} .choices input", label)
    page.press(f"{card} .choices input", "Enter")


# --- a task in a minute ---------------------------------------------------------------------------


@pytest.mark.parametrize("look", ["desktop", "phone"])
def test_a_task_is_taught_tried_corrected_and_rolled_back_in_a_minute(
    browser, server, photos_by_label, pictures, look
):
    task = f"things-{look}"
    shape = PHONE if look == "phone" else DESKTOP
    with open_page(browser, server.url, **shape) as page:

        def check(name):
            page.screenshot(path=pictures / f"{look}-teach-{name}.png", full_page=True)
            assert low_contrast(page) == []
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= shape["viewport"]["width"]

        page.wait_for_selector("#server[data-state='ready']")
        began = time.monotonic()
        page.click(".pages a[href='#teach']")
        check("begin")
        name_and_fill(page, task, photos_by_label)
        check("filled")
        page.click("#teach")
        page.wait_for_selector("#taught-title")
        assert examples_of(server, task) == {"bird": 5, "cat": 5, "drink": 5}
        assert "15 photos right" in page.inner_text(".headline")
        assert page.locator(".photos canvas").count() == 15  # what was sent is still seen
        drop(page, "#trial", photo("dog"))
        page.wait_for_selector(".tried .card")
        check("taught")

        page.click(".pages a[href='#ask']")
        page.fill("#refs", task)
        drop(page, "#drop", photo("dog"))
        card = f"#answers .card[data-task='{task}']"
        page.wait_for_selector(card)
        assert best_answer(page, card) != "dog"
        correct_by_typing(page, card, "dog")
        page.wait_for_selector(f"{card} .bars li:first-child .label >> text=dog")
        assert examples_of(server, task)["dog"] == 1
        assert f"{task} version 2 is served with this example: dog." in page.inner_text("#notes")
        page.click(f"{card} .correct > button")
        page.wait_for_selector(f"{card} .choices")
        check("corrected")

        page.click(".pages a[href='#tasks']")
        page.click(f".tasks [data-task='{task}'] .name")
        page.click("#task-detail >> text=Roll back")
        page.wait_for_selector("[data-version='1'] .tag >> text=default")
        page.click("details >> text=History")
        assert "1 example added" in page.inner_text(".history")
        assert "on 15 leave-one-out images" in page.inner_text("[data-version='1'] .headline")
        check("history")
        assert "dog" not in examples_of(server, task)
        assert time.monotonic() - began < 60


def test_a_server_without_a_text_tower_offers_no_names(page):
    open_teach(page)
    assert not page.is_visible("#teach-names")


def test_classes_are_taught_by_their_names_and_take_photos_later(
    browser, tmp_path, photos_by_label
):
    folder = text_folder("clip", tmp_path / "clip")
    with (
        serving(tmp_path, folder) as server,
        open_page(browser, server.url, **DESKTOP) as page,
    ):
        page.wait_for_selector("#server[data-state='ready']")
        open_teach(page)
        page.check("#read-names")
        page.fill("#teach-task", "scene")
        page.fill(f"{column(1)} header input", "beach")
        page.click("#teach")
        page.wait_for_selector("#teach-errors >> text=Name at least two classes.")
        page.fill(f"{column(2)} header input", "snow")
        page.click("#teach")
        page.wait_for_selector("#taught-title")
        assert examples_of(server, "scene") == {"beach": 0, "snow": 0}
        for place, photos in enumerate(list(photos_by_label.values())[:2], 1):
            drop(page, column(place), photos[0])
        page.locator("[data-fresh]").nth(1).wait_for()
        page.uncheck("#read-names")
        page.click("#teach")
        page.wait_for_selector("#notes >> text=scene version 2 is being served.")
        assert examples_of(server, "scene") == {"beach": 1, "snow": 1}
        assert low_contrast(page) == []


def test_everything_about_teaching_can_be_done_with_the_keyboard(page, server, photos_by_label):
    def tab_to(selector):
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("(target) => document.activeElement.matches(target)", selector):
                return
        raise AssertionError(f"the Tab key does not reach {selector}")

    def choose(photos):
        """The Enter key opens the browser's own dialogue, in which these are chosen."""
        files = [{"name": name, "mimeType": kind, "buffer": data} for name, kind, data in photos]
        with page.expect_file_chooser() as opened:
            page.keyboard.press("Enter")
        opened.value.set_files(files)

    # Intercept the dialogue from here on: a listener added with the key press comes too late.
    page.on("filechooser", lambda _: None)
    tab_to(".pages a[href='#teach']")
    page.keyboard.press("Enter")
    tab_to("#teach-task")
    page.keyboard.type("keyed")
    for place, label in enumerate(("cat", "bird"), 1):
        tab_to(f"{column(place)} header input")
        page.keyboard.type(label)
        tab_to(f"{column(place)} .choose")
        choose(photos_by_label[label][:2])
        page.wait_for_selector(f"{column(place)} li:nth-child(2)")
    tab_to("#teach")
    page.keyboard.press("Enter")
    page.wait_for_selector("#taught-title")
    assert examples_of(server, "keyed") == {"bird": 2, "cat": 2}
    tab_to("#trial .choose")
    choose([photo("coffee")])
    page.wait_for_selector(".tried .card")
    tab_to(".tried .correct > button")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tried .choices")
    tab_to(".tried .choices input")
    page.keyboard.type("drink")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{column(3)} .photos li")
    page.wait_for_selector(".tried .bars li:first-child .label >> text=drink")
    page.wait_for_selector(".tried .correct > button:focus")
    tab_to("#notes button:not([aria-label])")
    page.keyboard.press("Enter")  # Undo
    page.wait_for_selector(column(3), state="detached")
    assert examples_of(server, "keyed") == {"bird": 2, "cat": 2}


# --- more and fewer examples ----------------------------------------------------------------------


def test_a_task_whose_photos_have_several_labels_is_taught(page, server, photos_by_label):
    open_teach(page)
    page.check("#teach-kind [value='multi_label']")
    pets = {
        "cat": photos_by_label["cat"],
        "indoors": [*photos_by_label["cat"][:2], *photos_by_label["drink"]],
    }
    name_and_fill(page, "labels", pets)
    page.click("#teach")
    page.wait_for_selector("#taught-title")
    answer = httpx.get(f"{server.url}/tasks/labels/examples", timeout=60).json()
    assert answer["task_type"] == "multi_label"
    assert examples_of(server, "labels") == {"cat": 5, "indoors": 7}
    assert answer["total"] == 10  # two have both
    assert page.is_disabled("#teach-kind input >> nth=0")  # settled
    page.click("#another")
    page.wait_for_selector("#teach-kind:not(:disabled)")


def test_photos_are_added_to_a_taught_task_and_removed(page, server, photos_by_label):
    first = {label: photos[:2] for label, photos in photos_by_label.items()}
    teach_over_http(server, "grown", first)
    open_teach(page, "grown")
    names = [field.input_value() for field in page.locator("#class-list header input").all()]
    assert names == ["bird", "cat", "drink"]
    page.locator("#class-list canvas").nth(5).wait_for()  # pictures of the server
    drop(page, column(2), *photos_by_label["cat"][:3])
    page.locator(column(2), has_text="2 taught, 1 new").wait_for()
    assert "cat-2.jpg is in this class already." in page.inner_text(column(2))
    page.click("#teach")
    page.locator(column(2), has_text="3 photos").wait_for()
    assert examples_of(server, "grown") == {"bird": 2, "cat": 3, "drink": 2}

    page.click(f"{column(2)} [aria-label='Remove cat-3.jpg']")
    page.locator(column(2), has_text="2 photos").wait_for()
    assert examples_of(server, "grown")["cat"] == 2
    page.click("#notes >> text=Undo")
    page.locator(column(2), has_text="3 photos").wait_for()


def test_a_photo_in_the_wrong_class_is_suspected_and_moved(page, server, photos_by_label):
    wrong = {**photos_by_label, "bird": [*photos_by_label["bird"], list(views("cat", 6))[5]]}
    open_teach(page)
    teach(page, "mislabelled", wrong)
    issue = page.locator(".label-issues li", has_text="In bird, looks like cat")
    assert issue.locator("canvas").get_attribute("aria-label") == "cat-6.jpg"
    with page.expect_response(lambda answer: answer.request.method == "POST"):
        issue.locator("text=Move to cat").click()
    assert examples_of(server, "mislabelled") == {"bird": 5, "cat": 6, "drink": 5}


def test_the_focus_moves_on_when_a_label_issue_is_settled(page, photos_by_label):
    cats, birds = list(views("cat", 13)), list(views("parrot", 13))
    open_teach(page)
    teach(
        page,
        "settled",
        {**photos_by_label, "bird": [*birds[1:], cats[0]], "cat": [*cats[1:], birds[0]]},
    )
    issues = page.locator(".label-issues li")
    count = issues.count()
    assert count >= 2
    move = issues.first.locator("text=Move to")
    move.focus()
    page.keyboard.press("Enter")
    while count:
        # The place of the one that is settled, and in the end what comes next.
        page.wait_for_function(
            "(before) => document.querySelectorAll('.label-issues li').length < before", arg=count
        )
        count = issues.count()
        expected = ".label-issues li:first-child button:focus" if count else "#trial .choose:focus"
        page.wait_for_selector(expected)
        page.keyboard.press("Tab")
        if count:
            page.keyboard.press("Enter")  # Remove


def versions_of(server, task: str) -> list[str]:
    """The notes of the history, newest first."""
    entries = httpx.get(f"{server.url}/tasks/{task}/history", timeout=60).json()["entries"]
    return [entry.get("note", entry["kind"]) for entry in entries]


def test_one_press_makes_one_version_of_many_photos(page, server, photos_by_label):
    many = {"cat": list(views("cat", 20)), "bird": list(views("parrot", 20))}
    open_teach(page)
    teach(page, "many", many)
    assert examples_of(server, "many") == {"bird": 20, "cat": 20}
    assert versions_of(server, "many") == ["40 examples added"]


# Buttons whose accessible name does not contain their text (WCAG 2.5.3), except symbols.
MISNAMED = """() => [...document.querySelectorAll("#page-teach button[aria-label]")]
  .map((button) => [button.textContent.trim(), button.getAttribute("aria-label")])
  .filter(([text, name]) => /\\w/.test(text) && !name.includes(text))"""


def test_a_lesson_is_reviewed_after_a_reload_fixed_and_rolled_back(
    browser, server, photos_by_label, pictures
):
    wrong = {**photos_by_label, "bird": [*photos_by_label["bird"], list(views("cat", 6))[5]]}
    named = {label.replace("drink", "hot_drink"): photos for label, photos in wrong.items()}
    teach_over_http(server, "reviewed", named)  # as from the command line
    names = {name for photos in named.values() for name, _, _ in photos}
    for look, shape in (("desktop", DESKTOP), ("phone", PHONE)):
        for scheme in ("light", "dark"):
            with open_page(browser, server.url, color_scheme=scheme, **shape) as page:
                open_teach(page, "reviewed")
                page.locator("#class-list canvas").nth(15).wait_for()
                shown = page.locator("#class-list canvas").all()
                assert {each.get_attribute("aria-label") for each in shown} == names
                assert "hot drink" in page.inner_text("#confusions-title ~ .matrix-frame")
                page.click(".matrix [aria-label^='1: bird predicted as cat']")
                page.wait_for_selector(".cell-photos canvas[aria-label='cat-6.jpg']")
                page.screenshot(path=pictures / f"review-{look}-{scheme}.png", full_page=True)
                assert low_contrast(page) == []
                assert page.evaluate(MISNAMED) == []
                width = page.evaluate("document.documentElement.scrollWidth")
                assert width <= shape["viewport"]["width"]
    with open_page(browser, server.url, **DESKTOP) as page:
        open_teach(page, "reviewed")
        page.click(".matrix [aria-label^='1: bird predicted as cat']")
        page.click(".cell-photos [aria-label='Move to cat: cat-6.jpg']")
        page.wait_for_selector("#notes >> text=reviewed version 2 is being served.")
        assert examples_of(server, "reviewed") == {"bird": 5, "cat": 6, "hot_drink": 5}
        page.goto(f"{server.url}/#tasks/reviewed")
        page.click("#task-detail >> text=Roll back")
        page.wait_for_selector("[data-version='1'] .tag >> text=default")
        assert examples_of(server, "reviewed") == {"bird": 6, "cat": 5, "hot_drink": 5}
        page.goto(f"{server.url}/#teach/reviewed")
        page.locator(column(1), has_text="6 photos").wait_for()


def test_no_pictures_are_kept_if_they_are_not_wanted(page, server, photos_by_label):
    open_teach(page)
    page.check("#no-pictures")
    teach(page, "unpictured", photos_by_label)
    listed = httpx.get(f"{server.url}/tasks/unpictured/examples?thumbnails=true", timeout=60).json()
    assert {(one["name"], one.get("thumbnail")) for one in listed["examples"]} == {(None, None)}
    page.reload()
    page.locator(column(1), has_text="5 photos").wait_for()
    assert page.locator("#class-list canvas").count() == 0


def test_several_photos_are_tried_at_once(page, server, photos_by_label):
    teach_over_http(server, "tried", photos_by_label)
    open_teach(page, "tried")
    drop(page, "#trial", *(photo(name) for name in ("cat", "parrot", "coffee", "dog")))
    page.locator(".tried-list .correct").nth(3).wait_for()
    rows = [row.inner_text() for row in page.locator(".tried-list > li").all()]
    assert [row.split("\n")[0] for row in rows] == [
        "cat.jpg",
        "parrot.jpg",
        "coffee.jpg",
        "dog.jpg",
    ]
    assert ["cat" in rows[0], "bird" in rows[1], "drink" in rows[2]] == [True] * 3
    correct_by_typing(page, ".tried-list > li:nth-child(4)", "dog")
    page.locator(".tried-list > li:nth-child(4) b", has_text="dog").wait_for()
    assert examples_of(server, "tried")["dog"] == 1


def test_a_folder_of_class_folders_is_dropped_or_chosen(page, server, photos_by_label, tmp_path):
    for label, photos in photos_by_label.items():
        (tmp_path / "photos" / label).mkdir(parents=True)
        for name, _, content in photos:
            (tmp_path / "photos" / label / name).write_bytes(content)
        (tmp_path / "photos" / label / "notes.txt").write_text("no photo")
    open_teach(page)
    page.fill("#teach-task", "folders")
    drop_path(page, "#teach-task", tmp_path / "photos")
    page.locator("[data-fresh]").nth(14).wait_for()
    drop_path(page, column(1), tmp_path / "photos" / "drink")  # another class has them
    page.locator(column(1), has_text="is in drink too").wait_for()
    page.click("#teach")
    page.wait_for_selector("#taught-title")
    assert examples_of(server, "folders") == {"bird": 5, "cat": 5, "drink": 5}
    page.click("#another")
    with page.expect_file_chooser() as opened:
        page.click("text=Add a folder")
    opened.value.set_files(tmp_path / "photos")
    page.locator("[data-fresh]").nth(14).wait_for()
    names = [field.input_value() for field in page.locator("#class-list header input").all()]
    assert sorted(names) == ["bird", "cat", "drink"]


def drop_path(page, selector: str, path) -> None:
    """Drop a file or folder of the disk, as the desktop does."""
    box = page.locator(selector).bounding_box()
    at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + 12}
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    session = page.context.new_cdp_session(page)
    for kind in ("dragEnter", "dragOver", "drop"):
        session.send("Input.dispatchDragEvent", {"type": kind, **at, "data": data})


# --- the webcam -----------------------------------------------------------------------------------


def test_photos_are_taken_with_the_webcam_while_a_button_is_held(
    browser, server, photos_by_label, pictures
):
    with open_page(browser, server.url, permissions=["camera"], **DESKTOP) as page:
        open_teach(page)
        page.fill("#teach-task", "filmed")
        page.fill(f"{column(1)} header input", "screen")
        page.click(f"{column(1)} .webcam")
        page.wait_for_function("() => document.querySelector('video')?.videoWidth > 0")
        tracks = page.evaluate_handle("document.querySelector('video').srcObject.getTracks()")
        page.hover(f"{column(1)} .record")
        page.mouse.down()
        page.wait_for_selector(f"{column(1)} [data-fresh]:nth-child(3)")
        page.mouse.up()
        page.screenshot(path=pictures / "webcam.png", full_page=True)
        assert low_contrast(page) == []
        page.focus(f"{column(1)} .record")
        page.keyboard.down("Space")
        page.wait_for_selector(f"{column(1)} [data-fresh]:nth-child(6)")
        page.keyboard.up("Space")
        page.click(f"{column(1)} >> text=Done")
        assert page.evaluate("(all) => all.map((one) => one.readyState)", tracks) == ["ended"]
        taken = page.locator(f"{column(1)} [data-fresh]").count()
        page.fill(f"{column(2)} header input", "cat")
        drop(page, column(2), *photos_by_label["cat"])
        page.wait_for_selector(f"{column(2)} li:nth-child(5)")
        page.click("#teach")
        page.wait_for_selector("#taught-title")
        assert examples_of(server, "filmed") == {"cat": 5, "screen": taken}


def test_leaving_the_page_turns_the_webcam_off(browser, server):
    with open_page(browser, server.url, permissions=["camera"], **DESKTOP) as page:
        open_teach(page)
        page.click(f"{column(1)} .webcam")
        page.wait_for_function("() => document.querySelector('video')?.videoWidth > 0")
        tracks = page.evaluate_handle("document.querySelector('video').srcObject.getTracks()")
        page.click(".pages a[href='#tasks']")
        page.wait_for_function(
            "(all) => all.every((one) => one.readyState === 'ended')", arg=tracks
        )


@pytest.mark.parametrize(
    ("error", "says"),
    [("NotAllowedError", "Allow it for this page"), ("NotFoundError", "No camera was found")],
)
def test_a_camera_that_cannot_be_used_says_why(page, error, says):
    open_teach(page)
    page.evaluate(
        """(name) => {
          navigator.mediaDevices.getUserMedia = async () => { throw new DOMException("", name); };
        }""",
        error,
    )
    page.click(f"{column(1)} .webcam")
    page.locator(f"{column(1)} .webcam-panel", has_text=says).wait_for()


# --- what goes wrong ------------------------------------------------------------------------------


def test_missing_input_is_reported_where_it_is_missing(page, photos_by_label):
    open_teach(page)
    page.click("#teach")
    page.locator("#teach-task-hint", has_text="Enter a name for the task.").wait_for()
    assert page.evaluate("document.activeElement.id") == "teach-task"
    page.fill("#teach-task", "Not A Name")
    page.press("#teach-task", "Tab")
    page.locator("#teach-task-hint", has_text="lower-case letters").wait_for()
    page.fill("#teach-task", "missing")
    page.press("#teach-task", "Tab")
    page.locator("#teach-task-hint", has_text="A new task.").wait_for()
    drop(page, column(1), *photos_by_label["cat"])
    page.wait_for_selector(f"{column(1)} li:nth-child(5)")
    page.click("#teach")
    page.locator(column(1), has_text="Name this class.").wait_for()
    page.fill(f"{column(1)} header input", "cat")
    page.click("#teach")
    page.locator("#teach-errors", has_text="at least two classes").wait_for()
    drop(page, column(2), photos_by_label["cat"][0])
    page.locator(column(2), has_text="is in cat too: a photo has one class").wait_for()
    page.fill(f"{column(2)} header input", "notes")
    drop(page, column(2), ("notes.txt", "text/plain", b"just some notes\n" * 20))
    page.wait_for_selector(f"{column(2)} .photos li")
    page.click("#teach")
    page.wait_for_selector("#teach-errors .problem-title")
    assert "notes.txt" in page.inner_text("#teach-errors")
    assert page.locator("[data-fresh]").count() == 6  # nothing is lost


@pytest.mark.parametrize("count", [5, 20], ids=["one request", "parts"])
def test_unreadable_photos_are_marked_and_the_rest_is_taught(page, server, pictures, count):
    bad = [("notes.txt", "text/plain", b"just notes\n" * 20), ("empty.jpg", "image/jpeg", b"")]
    cut = ("cut.jpg", "image/jpeg", photo("cat")[2][:2000])
    open_teach(page)
    task = f"bad-{count}"
    name_and_fill(
        page,
        task,
        {"cat": [*views("cat", count), cut], "bird": [bad[0], *views("parrot", count)]},
    )
    page.click("#teach")
    page.wait_for_selector("#teach-rest")
    errors = page.inner_text("#teach-errors")
    assert "2 photos cannot be read. Nothing was taught." in errors
    assert "notes.txt" in errors
    assert "cut.jpg" in errors
    assert page.locator("[data-unreadable]").count() == 2
    assert page.locator("[data-fresh]").count() == 2 * count + 2
    drop(page, column(1), bad[1])
    page.locator("[data-unreadable]", has_text="The file is empty.").wait_for()
    page.screenshot(path=pictures / f"unreadable-{count}.png", full_page=True)
    assert low_contrast(page) == []
    assert httpx.get(f"{server.url}/tasks/{task}", timeout=60).status_code == 404
    page.click("#teach-rest")
    page.wait_for_selector("#taught-title")
    assert examples_of(server, task) == {"bird": count, "cat": count}
    assert versions_of(server, task) == [f"{2 * count} examples added"]
    assert page.inner_text("#teach-errors") == ""


def test_a_trained_task_cannot_be_taught_and_keeps_corrections_beside_it(page, server):
    open_teach(page)
    page.fill("#teach-task", "cifar10")
    page.press("#teach-task", "Tab")
    page.locator("#teach-task-hint", has_text="is a trained task").wait_for()
    page.click(".pages a[href='#ask']")
    page.fill("#refs", "cifar10")
    drop(page, "#drop", photo("camel"))
    card = "#answers .card[data-task='cifar10']"
    page.wait_for_selector(card)
    page.click(f"{card} .correct > button")
    page.wait_for_selector(f"{card} .choices")
    assert "next training" in page.inner_text(f"{card} .choices")
    page.fill(f"{card} .choices input", "camel")
    page.press(f"{card} .choices input", "Enter")
    page.locator(card, has_text="has no class 'camel'").wait_for()
    page.fill(f"{card} .choices input", "horse")
    page.press(f"{card} .choices input", "Enter")
    page.locator("#notes", has_text="Correction stored for the next training of cifar10").wait_for()
    kept = httpx.get(f"{server.url}/tasks/cifar10/corrections", timeout=60).json()
    assert [each["labels"] for each in kept["corrections"]] == [["horse"]]


def test_an_answer_out_of_distribution_says_so(page):
    def unlike(route):
        answer = route.fetch().json()
        answer["images"][0]["tasks"]["cifar10"]["in_distribution"] = False
        route.fulfill(json=answer)

    page.route("**/predict*", unlike)
    page.fill("#refs", "cifar10, flowers")
    drop(page, "#drop", photo("castle"))
    page.wait_for_selector(".card[data-task='cifar10'] .badge >> text=Out of distribution")
    assert re.search(r"cifar10: [a-z]+, [\d.]+ %, out of distribution", page.inner_text("#spoken"))
    assert low_contrast(page) == []


def test_photos_are_known_by_the_digests_of_the_server(page):
    """By our own SHA-256: the browser's is missing where a server is not on https or localhost."""
    contents = [bytes(range(256)) * 300, *(b"x" * length for length in (0, 55, 56, 63, 64, 65))]
    found = page.evaluate(
        """async (contents) => {
          const { sha256 } = await import("/console/sha256.js");
          return contents.map((bytes) => sha256(Uint8Array.from(bytes)));
        }""",
        [list(content) for content in contents],
    )
    assert found == [hashlib.sha256(content).hexdigest() for content in contents]
