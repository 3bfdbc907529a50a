"""Thumbnails, file names and predictions of examples, and photos that cannot be read."""

import base64
import io

import pytest
from engram_bundle import TaskBundle
from engram_bundle.media import unpack_media
from PIL import Image
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.api.test_examples import FOUR, digest_of, forget, listed, taught, teach_json
from tests.conftest import PHOTOS
from tests.serving import photo

CAT = (PHOTOS / "cat.jpg").read_bytes()


def send(client, name, *photos, query=""):
    """Photos as (label, file name, bytes)."""
    files = [(label, (file, data, "image/png")) for label, file, data in photos]
    return client.post(f"/tasks/{name}/examples{query}", files=files)


def named(photos=FOUR):
    return [(label, f"{label}-{n}.png", data) for n, (label, data) in enumerate(photos)]


def by_name(client, name, query="?thumbnails=true"):
    return {each.name: each for each in listed(client, name, query).examples}


def picture_of(example):
    head, data = example.thumbnail.split(",")
    assert head == "data:image/webp;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def media_of(client, name, version=1):
    content = client.get(f"/tasks/{name}/versions/{version}/bundle").content
    return unpack_media(TaskBundle.from_bytes(content).tensors)


# --- pictures and names ---------------------------------------------------------------------------


def test_examples_are_listed_with_pictures_and_names(client, fresh):
    taught(send(client, fresh, *named(), query="?description=Rust"))
    found = by_name(client, fresh)
    assert set(found) == {"rust-0.png", "rust-1.png", "clean-2.png", "clean-3.png"}
    picture = picture_of(found["rust-0.png"])
    assert (picture.format, picture.size) == ("WEBP", (50, 40)), "a small photo is not enlarged"
    assert all(each.thumbnail is None for each in listed(client, fresh).examples)


def test_a_thumbnail_is_small_upright_and_has_the_proportions_of_the_photo(client, fresh):
    upright = Image.open(io.BytesIO(CAT)).resize((600, 300))
    out, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6  # lies on its side
    upright.save(out, "JPEG", exif=exif)
    taught(send(client, fresh, ("a", "side.jpg", out.getvalue()), ("b", "x.png", photo(1))))
    example = by_name(client, fresh)["side.jpg"]
    assert picture_of(example).size == (48, 96)
    assert len(base64.b64decode(example.thumbnail.split(",")[1])) < 4000


def test_a_photo_whose_context_is_cached_gets_a_picture_too(client, fresh):
    client.post("/predict?tasks=pets", content=photo(31))
    taught(
        send(
            client,
            fresh,
            *named(),
        )
    )
    taught(send(client, fresh, ("rust", "seen.png", photo(31))))
    assert by_name(client, fresh)["seen.png"].thumbnail


def test_a_photo_that_is_sent_as_a_digest_has_no_picture_until_its_bytes_come(client, fresh):
    digest = client.post("/predict?tasks=pets", content=photo(32)).json()["images"][0]["digest"]
    taught(send(client, fresh, *named()))
    taught(teach_json(client, fresh, {"digest": digest, "label": "rust", "name": "later.png"}))
    assert by_name(client, fresh)["later.png"].thumbnail is None
    taught(send(client, fresh, ("rust", "again.png", photo(32))))
    example = by_name(client, fresh)["later.png"]
    assert example.thumbnail, "it keeps its first name, and gets its first picture"


def test_a_moved_example_keeps_its_picture_and_a_removed_one_takes_it_along(client, fresh):
    taught(send(client, fresh, *named()))
    taught(teach_json(client, fresh, {"digest": digest_of(photo(3)), "label": "rust"}))
    moved = by_name(client, fresh)["clean-2.png"]
    assert (moved.labels, bool(moved.thumbnail)) == (["rust"], True)
    taught(forget(client, fresh, photo(3)))
    assert [media.name for media in media_of(client, fresh, 3)].count("clean-2.png") == 0


def test_the_same_photos_give_the_same_bytes_in_any_order(client, fresh):
    together = taught(send(client, fresh, *named()))
    taught(forget(client, fresh, photo(2), photo(4)))
    first, second = named()[3], named()[1]
    assert taught(send(client, fresh, first, second), created=False).digest == together.digest


@pytest.mark.parametrize("way", ["request", "server"])
def test_no_pictures_and_no_names_are_kept_when_turned_off(world, client, fresh, way):
    with TestClient(world.app(keep_pictures=way != "server")) as other:
        query = "?keep_pictures=false" if way == "request" else ""
        version = taught(send(other, fresh, *named(), query=query)).version
    assert media_of(client, fresh, version) == ()
    found = listed(client, fresh, "?thumbnails=true").examples
    assert {(each.name, each.thumbnail) for each in found} == {(None, None)}
    taught(send(client, fresh, ("rust", "new.png", photo(9))))
    assert by_name(client, fresh)["new.png"].thumbnail, "the others go on without"


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("C:\\photos\\a.png", "a.png"),
        ("photos/b/a.png", "a.png"),
        ("x" * 300 + ".png", "x" * 255),
        ("naïve 猫.png", "naïve 猫.png"),
    ],
)
def test_only_the_last_part_of_a_path_is_kept(client, fresh, sent, kept):
    example = {"b64": base64.b64encode(photo(1)).decode(), "label": "rust", "name": sent}
    other = {"b64": base64.b64encode(photo(2)).decode(), "label": "clean"}
    taught(teach_json(client, fresh, example, other))
    assert {each.name for each in listed(client, fresh).examples} == {kept, None}


def test_pictures_are_listed_in_pages(client, fresh):
    taught(send(client, fresh, *named()))
    page = listed(client, fresh, "?thumbnails=true&limit=2&offset=3")
    assert (len(page.examples), page.total) == (1, 4)
    response = client.get(f"/tasks/{fresh}/examples?thumbnails=true&limit=201")
    assert "at most 200" in assert_problem(response, 422, "invalid-request")["detail"]


def test_only_the_named_examples_are_listed(client, fresh):
    taught(send(client, fresh, *named()))
    digests = "".join(f"&digest={digest_of(photo(seed))}" for seed in (2, 3, 99))
    page = listed(client, fresh, f"?thumbnails=true{digests}")
    assert {each.name for each in page.examples} == {"rust-1.png", "clean-2.png"}
    assert page.total == 4


# --- predictions ----------------------------------------------------------------------------------


def test_predictions_without_each_example_are_listed_with_the_accuracy_of_classes(client, fresh):
    photos = [("a", photo(1)), ("a", photo(2)), ("b", photo(3)), ("c", photo(4))]
    result = taught(send(client, fresh, *named(photos)))
    found = listed(client, fresh)
    assert found.classes == result.classes
    alone = [each for each in found.examples if each.labels in (["b"], ["c"])]
    assert [(each.predicted, each.probability) for each in alone] == [(None, None)] * 2
    both = [each for each in found.examples if each.labels == ["a"]]
    assert all(len(each.predicted) == 1 for each in both)
    right = sum(each.predicted == ["a"] for each in both)
    assert [each.accuracy for each in found.classes] == [right / 2, None, None]
    assert (found.leave_one_out.images, found.leave_one_out.correct) == (2, right)


def test_suspected_label_errors_have_the_name_of_their_file(client, fresh):
    # One picture of each class in several files, and once under the other label.
    formats = ("PNG", "TIFF", "BMP", "PPM")
    a, b = ([photo(n, image_format=each) for each in formats] for n in (1, 2))
    taught(send(client, fresh, *named([("a", each) for each in a[:3]] + [("b", b[0])])))
    more = [("b", f"more-{n}.png", each) for n, each in enumerate(b[1:])]
    result = taught(send(client, fresh, *more, ("b", "wrong.png", a[3])))
    assert [issue.name for issue in result.label_issues] == ["wrong.png"]


# --- photos that cannot be read -------------------------------------------------------------------

BAD = [("rust", "notes.txt", b"not a picture"), ("clean", "empty.png", b"")]


def test_all_unreadable_photos_are_listed_and_nothing_is_taught(client, fresh):
    problem = assert_problem(send(client, fresh, *named()[:2], *BAD), 422, "unreadable-image")
    assert "2 photos cannot be read" in problem["detail"]
    assert [(each["index"], each["name"]) for each in problem["unreadable"]] == [
        (2, "notes.txt"),
        (3, "empty.png"),
    ]
    assert all(each["reason"] for each in problem["unreadable"])
    assert client.get(f"/tasks/{fresh}").status_code == 404


def test_the_readable_photos_are_taught_if_the_others_may_be_skipped(client, fresh):
    photos = [named()[0], BAD[0], named()[2], BAD[1]]
    result = taught(send(client, fresh, *photos, query="?skip_unreadable=true"))
    assert (result.examples, result.added) == (2, 2)
    assert [(each.index, each.name) for each in result.unreadable] == [
        (1, "notes.txt"),
        (3, "empty.png"),
    ]
    nothing = send(client, fresh, *BAD, query="?skip_unreadable=true")
    assert len(assert_problem(nothing, 422, "unreadable-image")["unreadable"]) == 2


def test_an_unreadable_correction_is_named(client):
    wrong = {"b64": base64.b64encode(b"no picture").decode(), "label": "cat"}
    response = client.post("/tasks/pets/corrections", json={"examples": [wrong, wrong]})
    problem = assert_problem(response, 422, "unreadable-image")
    assert [each["index"] for each in problem["unreadable"]] == [0, 1]
