"""Teaching through both clients: what is sent in which order, and what an error says."""

import asyncio
import json
import re
from pathlib import Path

import httpx
import pytest
from engram_vit import AsyncClient, Client
from engram_vit.answers import CorrectionsResult
from engram_vit.errors import Conflict, UnreadablePhotos, UsageError
from engram_vit.teaching import BATCH_PHOTOS

from tests.client.fake_server import bodies_of, digest_of, problem

URL = "http://server:1"


class FakeTeacher:
    """Takes examples by the names of form fields; `refuse(labels, count)` may answer instead."""

    def __init__(self, refuse=None, task_type="single_label"):
        self.refuse = refuse or (lambda labels, count: None)
        self.task_type = task_type
        self.all_sent: list[list[tuple[str, bytes]]] = []
        self.requests: list[httpx.Request] = []
        self.count = 0

    def __call__(self, request):
        self.requests.append(request)
        if request.method == "GET":
            about = {"task": "rust", "version": 1, "status": "ready", "reason": None}
            about |= {"task_type": self.task_type, "classes": 2, "description": "", "aliases": {}}
            about |= {"versions": [], "generation": 1, "class_labels": None, "version_details": []}
            return httpx.Response(200, json=about)
        self.count += 1
        content_type, body = request.headers.get("Content-Type", ""), request.read()
        if content_type.startswith("application/json"):
            listed = json.loads(body)["examples"]
            examples_sent = [(one.get("label") or tuple(one["labels"]), one) for one in listed]
        elif body:
            names = re.findall(rb'form-data; name="([^"]*)"', body)
            labels = [name.decode() for name in names]
            examples_sent = list(zip(labels, bodies_of(content_type, body), strict=True))
        else:
            examples_sent = []
        refused = self.refuse(examples_sent, self.count)
        if refused is not None:
            return refused
        if request.method == "DELETE" and "upload" in request.url.params:
            return httpx.Response(204)
        bad = [index for index, (_, data) in enumerate(examples_sent) if data == b"bad"]
        unreadable = [{"index": index, "name": None, "reason": "Not an image."} for index in bad]
        if examples_sent:
            self.all_sent.append(examples_sent)
        if "upload" in request.url.params and "publish" not in request.url.params:
            part = {"parts": 1, "examples": len(examples_sent) - len(bad)}
            return httpx.Response(202, json={"task": "rust", **part, "unreadable": unreadable})
        return httpx.Response(201, json={**self.answer(examples_sent), "unreadable": unreadable})

    def queries(self):
        """Method and parameters of each request, without the random id of an upload."""
        return [
            (request.method, {key: "…" if key == "upload" else value for key, value in params})
            for request in self.requests
            for params in [request.url.params.multi_items()]
        ]

    def answer(self, examples_sent):
        issues = [
            {"digest": digest_of(data), "labels": [label], "suggested": ["x"], "probability": 0.1}
            for label, data in examples_sent
            if data == b"mislabelled"
        ]
        return {
            "task": "rust",
            "version": self.count,
            "digest": "sha256:1",
            "generation": self.count,
            "created": True,
            "aliases": ["default"],
            "task_type": self.task_type,
            "examples": sum(map(len, self.all_sent)),
            "classes": [{"label": "a", "examples": 1}],
            "leave_one_out": {
                "accuracy": 0.9,
                "low": 0.7,
                "high": 0.95,
                "images": 10,
                "correct": 9,
            },
            "label_issues": issues,
            "added": sum(map(len, self.all_sent)),
            "moved": 0,
            "removed": 0,
        }


def ask(fake, which, name, *args, **options):
    """One method of one of the clients, done."""
    if which is Client:
        with Client(URL, transport=httpx.MockTransport(fake)) as client:
            return getattr(client, name)(*args, **options)

    async def run():
        async with AsyncClient(URL, transport=httpx.MockTransport(fake)) as client:
            return await getattr(client, name)(*args, **options)

    return asyncio.run(run())


both = pytest.mark.parametrize("which", [Client, AsyncClient])


@both
def test_a_folder_of_class_folders_is_taught_and_label_issues_are_named(which, tmp_path):
    for label, content in (("rust", b"mislabelled"), ("clean", b"fine")):
        (tmp_path / label).mkdir()
        (tmp_path / label / "1.jpg").write_bytes(content)
        (tmp_path / label / "notes.txt").write_text("no photo")
    fake = FakeTeacher()
    taught = ask(fake, which, "teach", "rust", tmp_path, description="Rust?", wait="all")
    assert fake.all_sent == [[("clean", b"fine"), ("rust", b"mislabelled")]]
    query = fake.requests[0].url.params
    assert (query["description"], query["wait"]) == ("Rust?", "all")
    (issue,) = taught.label_issues
    assert (issue.photo, issue.labels) == (str(tmp_path / "rust" / "1.jpg"), ("rust",))
    assert taught.leave_one_out.accuracy == 0.9


PART, PUBLISH = ("POST", {"upload": "…"}), ("POST", {"upload": "…", "publish": "true"})


@both
def test_a_long_list_is_uploaded_in_parts_and_published_once(which):
    photos = {label: [f"{label}{n}".encode() for n in range(100)] for label in "ab"}
    fake, seen = FakeTeacher(), []
    taught = ask(
        fake,
        which,
        "teach",
        "rust",
        photos,
        only_new=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert [len(examples_sent) for examples_sent in fake.all_sent] == [64, 64, 64, 8]
    assert sorted(data for examples_sent in fake.all_sent for _, data in examples_sent) == sorted(
        photos["a"] + photos["b"]
    )
    assert fake.queries() == [*4 * [PART], PUBLISH]
    assert len({request.url.params["upload"] for request in fake.requests}) == 1
    assert seen == [(64, 200), (128, 200), (192, 200), (200, 200), (200, 200)]
    assert taught.added == 200
    assert {request.headers.get("If-None-Match") for request in fake.requests} == {"*"}


@both
def test_requests_shrink_to_what_the_server_accepts(which):
    def refuse(examples_sent, count):
        if len(examples_sent) > 20:
            return problem(422, "too-many-images", "At most 20.")
        return None

    fake = FakeTeacher(refuse)
    photos = {label: [f"{label}{n}".encode() for n in range(20)] for label in "ab"}
    assert ask(fake, which, "teach", "rust", photos).added == 40
    assert {len(examples_sent) for examples_sent in fake.all_sent} == {20}
    assert fake.queries()[-3:] == [PART, PART, PUBLISH]


@both
def test_a_few_photos_are_one_request_with_their_options(which):
    fake = FakeTeacher()
    photos, about = {"a": [b"1"], "b": [b"2"]}, {"task_type": "single_label", "description": "x"}
    ask(fake, which, "teach", "rust", photos, keep_pictures=False, **about)
    assert fake.queries() == [
        ("POST", {"skip_unreadable": "true", "keep_pictures": "false", **about})
    ]


@both
@pytest.mark.parametrize("each", [1, 50], ids=["one request", "parts"])
def test_photos_that_cannot_be_read_are_reported_and_the_others_taught(which, tmp_path, each):
    (tmp_path / "bad.jpg").write_bytes(b"bad")
    (tmp_path / "empty.jpg").write_bytes(b"")
    fine = [(f"{label}{n}".encode(), label) for n in range(each) for label in "ab"]
    pairs = [*fine, *((tmp_path / f"{name}.jpg", "a") for name in ("bad", "empty", "gone"))]
    taught = ask(FakeTeacher(), which, "teach", "rust", pairs)
    assert {(Path(one.photo).name, one.reason) for one in taught.unreadable} == {
        ("bad.jpg", "Not an image."),
        ("empty.jpg", "The image is empty."),
        ("gone.jpg", "The file does not exist."),
    }


@both
def test_strict_publishes_nothing_if_a_photo_cannot_be_read(which, tmp_path):
    fake = FakeTeacher()
    with pytest.raises(
        UnreadablePhotos, match=r"image 1: Not an image.*Nothing was published"
    ) as e:
        ask(fake, which, "teach", "rust", [(b"fine", "a"), (b"bad", "b")], strict=True)
    assert fake.queries() == [PART, ("DELETE", {"upload": "…"})]
    assert [one.photo for one in e.value.unreadable] == ["image 1"]
    fake = FakeTeacher()
    with pytest.raises(UnreadablePhotos, match="does not exist"):
        ask(fake, which, "teach", "rust", [(b"fine", "a"), (tmp_path / "no.jpg", "b")], strict=True)
    assert not fake.requests
    ask(fake, which, "teach", "rust", [(b"fine", "a"), (b"too", "b")], strict=True)
    assert fake.queries() == [PART, PUBLISH]


@both
def test_a_failure_in_between_publishes_nothing_and_says_so(which):
    def refuse(examples_sent, count):
        return problem(409, "too-many-uploads", "Abort one.") if count == 2 else None

    fake = FakeTeacher(refuse)
    photos = {label: [f"{label}{n}".encode() for n in range(BATCH_PHOTOS)] for label in "ab"}
    with pytest.raises(Conflict, match=r"Abort one\. Nothing was published"):
        ask(fake, which, "teach", "rust", photos)
    assert fake.queries() == [PART, PART, ("DELETE", {"upload": "…"})]


@both
def test_a_photo_in_two_classes_is_reported_before_anything_is_sent(which, tmp_path):
    (tmp_path / "1.jpg").write_bytes(b"one")
    (tmp_path / "2.jpg").write_bytes(b"one")
    fake = FakeTeacher()
    pairs = [(tmp_path / "1.jpg", "a"), (tmp_path / "2.jpg", "b")]
    with pytest.raises(UsageError, match=r"1\.jpg and .*2\.jpg are the same photo.*'a'.*'b'"):
        ask(fake, which, "teach", "rust", pairs)
    assert not fake.all_sent


@both
def test_a_photo_of_a_multi_label_task_has_all_its_labels_in_one_request(which):
    fake = FakeTeacher(task_type="multi_label")
    photos = [(b"one", "a"), (b"two", ["b", "c"]), (b"one", "b"), (b"none", [])]
    ask(fake, which, "teach", "rust", photos)
    (examples_sent,) = fake.all_sent
    assert {label for label, _ in examples_sent} == {(), ("a", "b"), ("b", "c")}


@both
def test_nothing_is_sent_if_there_is_nothing_to_teach(which, tmp_path):
    fake = FakeTeacher()
    with pytest.raises(UnreadablePhotos, match=r"gone\.jpg: The file does not exist"):
        ask(fake, which, "teach", "rust", [(tmp_path / "gone.jpg", "b")])
    with pytest.raises(UsageError, match="no class folders with images"):
        ask(fake, which, "teach", "rust", tmp_path)
    with pytest.raises(UsageError, match="no photos"):
        ask(fake, which, "teach", "rust", {})
    assert not fake.requests


@both
def test_a_correction_is_an_example_or_kept_for_the_next_training(which):
    fake = FakeTeacher()
    done = ask(fake, which, "correct", "rust", b"photo", "a")
    assert (done.version, fake.requests[0].url.path) == (1, "/tasks/rust/examples")

    def trained(examples_sent, count):
        if count == 1:
            return problem(409, "not-taught", "It was trained.")
        return httpx.Response(201, json={"task": "rust", "corrections": 1})

    fake = FakeTeacher(trained)
    kept = ask(fake, which, "correct", "rust", f"sha256:{'0' * 64}", "a")
    assert kept == CorrectionsResult("rust", 1)
    assert [request.url.path for request in fake.requests] == [
        "/tasks/rust/examples",
        "/tasks/rust/corrections",
    ]


@both
def test_many_examples_are_removed_in_several_requests(which):
    fake = FakeTeacher()
    digests = [f"sha256:{number:064x}" for number in range(300)]
    ask(fake, which, "remove_examples", "rust", digests)
    sent = [request.url.params.get_list("digest") for request in fake.requests]
    assert [len(each) for each in sent] == [256, 44]
    assert [*sent[0], *sent[1]] == digests


@both
def test_corrections_are_read_page_by_page_and_the_newest_of_a_photo_counts(which):
    def page(request):
        offset = int(request.url.params["offset"])
        label = "new" if offset == 0 else "old"
        one = {"labels": [label], "version": 1, "time": "", "actor": "ada"}
        found = [{"digest": f"sha256:{n:064x}", **one} for n in ([0] if offset == 0 else [0, 1])]
        return httpx.Response(200, json={"task": "rust", "records": 150, "corrections": found})

    found = ask(page, which, "corrections", "rust")
    assert [(one.digest[-1], one.labels) for one in found] == [("0", ("new",)), ("1", ("old",))]


@both
def test_corrections_and_examples_are_removed_for_good_on_request(which):
    requests = []

    def removed(request):
        requests.append((request.method, request.url.path, request.url.params.multi_items()))
        return httpx.Response(200, json={"task": "rust", "removed": 2})

    digest = f"sha256:{'0' * 64}"
    assert ask(removed, which, "remove_corrections", "rust").removed == 2
    assert ask(removed, which, "remove_corrections", "rust", [digest]).removed == 2
    assert requests == [
        ("DELETE", "/tasks/rust/corrections", []),
        ("DELETE", "/tasks/rust/corrections", [("digest", digest)]),
    ]
    fake = FakeTeacher()
    ask(fake, which, "remove_examples", "rust", [digest], purge=True)
    assert fake.requests[0].url.params["purge"] == "true"
