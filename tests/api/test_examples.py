"""`/tasks/{task}/examples`: teaching, correcting and forgetting."""

import base64
import hashlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from engram_bundle import TaskBundle
from engram_server.api.routes.examples import ExampleList, TeachResult
from engram_server.engine.taught_bundle import examples_of
from pydantic import SecretStr
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.serving import photo

FORMATS = ("PNG", "TIFF", "BMP", "PPM")


def teach(client, name, *photos, query="", **headers):
    """Photos as (label, bytes)."""
    files = [(label, (f"{label}.png", data, "image/png")) for label, data in photos]
    return client.post(f"/tasks/{name}/examples{query}", files=files, headers=headers)


def teach_json(client, name, *examples, **members):
    return client.post(f"/tasks/{name}/examples", json={"examples": list(examples), **members})


def taught(response, created=True):
    assert response.status_code == (201 if created else 200), response.text
    result = TeachResult.model_validate(response.json())
    assert result.created is created
    return result


def listed(client, name, query=""):
    response = client.get(f"/tasks/{name}/examples{query}")
    assert response.status_code == 200, response.text
    return ExampleList.model_validate(response.json())


def digest_of(data):
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def forget(client, name, *photos, **headers):
    digests = [digest_of(data) for data in photos]
    return client.delete(f"/tasks/{name}/examples", params={"digest": digests}, headers=headers)


FOUR = [("rust", photo(1)), ("rust", photo(2)), ("clean", photo(3)), ("clean", photo(4))]


# --- teaching -------------------------------------------------------------------------------------


def test_a_task_is_served_when_it_was_taught(client, fresh):
    response = teach(client, fresh, *FOUR, query="?description=Rust%20or%20not")
    result = taught(response)
    assert (result.task, result.version, result.aliases) == (fresh, 1, ["default"])
    assert response.headers["location"] == f"/tasks/{fresh}/versions/1"
    assert [(each.label, each.examples) for each in result.classes] == [("clean", 2), ("rust", 2)]
    assert (result.examples, result.added, result.moved, result.removed) == (4, 4, 0, 0)
    assert 0 <= result.leave_one_out.low <= result.leave_one_out.accuracy
    answer = client.post(f"/predict?tasks={fresh}", content=photo(2)).json()
    best = answer["images"][0]["tasks"][fresh]["predictions"][0]
    assert best["label"] == "rust"
    assert client.get(f"/tasks/{fresh}").json()["description"] == "Rust or not"


def test_more_examples_make_the_next_version_and_keep_the_description(client, fresh):
    taught(teach(client, fresh, *FOUR, query="?description=Rust"))
    result = taught(teach(client, fresh, ("moss", photo(5))))
    assert (result.version, result.examples, result.added) == (2, 5, 1)
    assert [each.label for each in result.classes] == ["clean", "moss", "rust"]
    assert client.get(f"/tasks/{fresh}").json()["description"] == "Rust"


def test_only_features_are_kept_and_never_photos(client, world, fresh):
    result = taught(teach(client, fresh, *FOUR))
    bundle = TaskBundle.from_bytes(client.get(f"/tasks/{fresh}/versions/1/bundle").content)
    assert bundle.digest == result.digest
    assert bundle.tensors["examples.features"].shape == (4, world.backbone.width)
    assert bundle.tensors["examples.features"].dtype == "float16"
    assert bundle.get("golden.pixels") is None
    assert examples_of(bundle).labels == ("clean", "rust")


def test_examples_may_be_json_with_images_of_earlier_requests(client, fresh):
    sent = client.post("/predict?tasks=pets", content=photo(6)).json()["images"][0]["digest"]
    result = taught(
        teach_json(
            client,
            fresh,
            {"digest": sent, "label": "rust"},
            {"b64": base64.b64encode(photo(7)).decode(), "label": "clean"},
            description="From JSON",
        )
    )
    assert (result.examples, result.leave_one_out) == (2, None)
    assert {each.digest for each in listed(client, fresh).examples} == {sent, digest_of(photo(7))}


def test_photos_of_a_multi_label_task_have_any_number_of_labels(client, fresh):
    def example(seed, *labels):
        return {"b64": base64.b64encode(photo(seed)).decode(), "labels": list(labels)}

    result = taught(
        teach_json(
            client,
            fresh,
            example(1, "red", "wet"),
            example(2, "wet"),
            example(3),
            task_type="multi_label",
        )
    )
    assert result.task_type == "multi_label"
    assert [(each.label, each.examples) for each in result.classes] == [("red", 1), ("wet", 2)]
    by_digest = {each.digest: each.labels for each in listed(client, fresh).examples}
    assert by_digest[digest_of(photo(1))] == ["red", "wet"]
    assert by_digest[digest_of(photo(3))] == []
    # One photo in two fields of a form has both labels.
    both = taught(teach(client, fresh, ("red", photo(4)), ("blue", photo(4))))
    assert both.examples == 4
    assert {each.label: each.examples for each in both.classes} == {"blue": 1, "red": 2, "wet": 2}


def test_the_same_examples_again_change_nothing(client, fresh):
    first = taught(teach(client, fresh, *FOUR))
    again = taught(teach(client, fresh, *FOUR), created=False)
    assert (again.version, again.digest, again.added) == (1, first.digest, 0)


def test_the_order_of_examples_does_not_matter(client, fresh):
    together = taught(teach(client, fresh, *FOUR))
    taught(forget(client, fresh, photo(2), photo(4)), created=True)
    apart = taught(teach(client, fresh, FOUR[3], FOUR[1]), created=False)
    assert apart.digest == together.digest


def test_adding_and_removing_an_example_gives_the_same_bytes(client, fresh):
    before = taught(teach(client, fresh, *FOUR))
    added = taught(teach(client, fresh, ("rust", photo(8))))
    assert added.digest != before.digest
    after = taught(forget(client, fresh, photo(8)), created=False)
    assert (after.digest, after.version, after.removed) == (before.digest, 1, 1)
    assert client.get(f"/tasks/{fresh}").json()["aliases"] == {"default": 1}


# --- correcting -----------------------------------------------------------------------------------


def test_a_correction_moves_an_example_to_the_right_label(client, fresh):
    taught(teach(client, fresh, *FOUR))
    corrected = taught(teach_json(client, fresh, {"digest": digest_of(photo(3)), "label": "rust"}))
    assert (corrected.examples, corrected.moved, corrected.added) == (4, 1, 0)
    assert {each.label: each.examples for each in corrected.classes} == {"clean": 1, "rust": 3}
    back = taught(teach(client, fresh, ("clean", photo(3))), created=False)
    assert (back.moved, back.version) == (1, 1)


def test_correcting_a_photo_that_was_only_predicted_adds_an_example(client, fresh):
    taught(teach(client, fresh, *FOUR))
    digest = client.post(f"/predict?tasks={fresh}", content=photo(9)).json()["images"][0]["digest"]
    result = taught(teach_json(client, fresh, {"digest": digest, "label": "clean"}))
    assert (result.examples, result.added) == (5, 1)


def test_history_has_the_author_and_a_note_of_each_update(client, fresh):
    taught(teach(client, fresh, *FOUR))
    taught(teach_json(client, fresh, {"digest": digest_of(photo(3)), "label": "rust"}))
    taught(forget(client, fresh, photo(1)))
    entries = client.get(f"/tasks/{fresh}/history").json()["entries"]
    assert [entry["note"] for entry in entries] == [
        "1 example removed",
        "1 example corrected",
        "4 examples added",
    ]
    assert {entry["actor"] for entry in entries} == {"local"}
    assert client.post(f"/tasks/{fresh}/rollback").json()["aliases"] == {"default": 2}
    assert listed(client, fresh).version == 2


def test_a_rolled_back_task_is_taught_on_from_what_it_serves(client, fresh):
    taught(teach(client, fresh, *FOUR))
    taught(teach(client, fresh, ("rust", photo(5))))
    client.post(f"/tasks/{fresh}/rollback")
    assert taught(teach(client, fresh, ("clean", photo(6)))).examples == 5


# --- taking away ----------------------------------------------------------------------------------


def test_a_class_without_examples_is_gone(client, fresh):
    taught(teach(client, fresh, *FOUR[:3], ("moss", photo(5))))
    result = taught(forget(client, fresh, photo(5)))
    assert [each.label for each in result.classes] == ["clean", "rust"]
    assert client.get(f"/tasks/{fresh}").json()["class_labels"] == ["clean", "rust"]


@pytest.mark.parametrize(
    ("kept", "says"),
    [(FOUR[:2], "all images are of class 'rust'"), ([], "no examples left")],
)
def test_a_task_keeps_two_classes(client, fresh, kept, says):
    before = teach(client, fresh, *FOUR).json()["version"]
    gone = [data for _, data in FOUR if data not in [kept_data for _, kept_data in kept]]
    problem = assert_problem(forget(client, fresh, *gone), 422, "unteachable-examples")
    assert says in problem["detail"].lower()
    after = listed(client, fresh)
    assert (after.version, after.total) == (before, 4)


def test_only_examples_of_the_task_can_be_removed(client, fresh):
    taught(teach(client, fresh, *FOUR))
    problem = assert_problem(forget(client, fresh, photo(1), photo(77)), 404, "unknown-example")
    assert problem["names"] == [digest_of(photo(77))]
    assert listed(client, fresh).total == 4
    assert_problem(forget(client, "missing", photo(1)), 404, "unknown-task")
    assert_problem(client.delete(f"/tasks/{fresh}/examples"), 422, "invalid-request")
    wrong = client.delete(f"/tasks/{fresh}/examples?digest=sha256:12")
    assert_problem(wrong, 422, "invalid-request")


# --- listing --------------------------------------------------------------------------------------


def test_examples_are_listed_by_version_and_in_pieces(client, fresh):
    taught(teach(client, fresh, *FOUR))
    taught(teach(client, fresh, ("rust", photo(5))))
    newest = listed(client, fresh)
    assert (newest.task, newest.version, newest.total) == (fresh, 2, 5)
    digests = [each.digest for each in newest.examples]
    assert digests == sorted(digest_of(photo(seed)) for seed in (1, 2, 3, 4, 5))
    assert all(0 <= each.probability <= 1 for each in newest.examples)
    assert listed(client, fresh, "?version=1").total == 4
    piece = listed(client, fresh, "?limit=2&offset=3")
    assert [each.digest for each in piece.examples] == digests[3:]
    assert_problem(client.get(f"/tasks/{fresh}/examples?version=9"), 404, "unknown-version")


def test_suspected_label_errors_come_with_suggestions(client, fresh):
    # One picture of each class in several files, and once under the other label.
    right = [
        (label, photo(n, image_format=f)) for label, n in (("a", 1), ("b", 2)) for f in FORMATS
    ]
    taught(teach(client, fresh, *right[:3], right[4]))
    result = taught(teach(client, fresh, *right[5:], ("b", right[3][1])))
    wrong = digest_of(right[3][1])
    issue = next(each for each in result.label_issues if each.digest == wrong)
    assert (issue.labels, issue.suggested) == (("b",), ("a",))
    assert issue.probability < 0.1
    assert listed(client, fresh).label_issues == result.label_issues


def test_a_trained_task_has_no_examples(client):
    for response in (
        client.get("/tasks/pets/examples"),
        teach(client, "pets", *FOUR),
        forget(client, "pets", photo(1)),
    ):
        assert "corrections" in assert_problem(response, 409, "not-taught")["detail"]
    assert_problem(client.get("/tasks/missing/examples"), 404, "unknown-task")


# --- refusals -------------------------------------------------------------------------------------


def nothing_is_there(client, name):
    assert client.get(f"/tasks/{name}").status_code == 404


@pytest.mark.parametrize("photos", [FOUR[:2], FOUR[:1]], ids=["one class", "one photo"])
def test_one_class_is_rejected_with_what_to_do(client, fresh, photos):
    problem = assert_problem(teach(client, fresh, *photos), 422, "unteachable-examples")
    assert "'rust'" in problem["detail"]
    assert "other" in problem["detail"]
    nothing_is_there(client, fresh)


def test_no_photo_is_rejected(client, fresh):
    assert_problem(teach_json(client, fresh), 422, "invalid-request")
    empty = client.post(
        f"/tasks/{fresh}/examples",
        content=b"--x--\r\n",
        headers={"Content-Type": "multipart/form-data; boundary=x"},
    )
    assert "no file" in assert_problem(empty, 422, "invalid-request")["detail"]
    nothing_is_there(client, fresh)


def test_a_photo_in_two_classes_is_rejected_with_both_names(client, fresh):
    twice = teach(client, fresh, *FOUR[:3], ("clean", photo(1)))
    detail = assert_problem(twice, 422, "unteachable-examples")["detail"]
    assert "'clean'" in detail
    assert "'rust'" in detail
    assert digest_of(photo(1)) in detail
    nothing_is_there(client, fresh)


def test_a_file_that_is_not_an_image_is_named(client, fresh):
    files = [("rust", ("a.png", photo(1))), ("clean", ("notes.txt", b"not a picture"))]
    response = client.post(f"/tasks/{fresh}/examples", files=files)
    assert "'notes.txt'" in assert_problem(response, 422, "unreadable-image")["detail"]
    wrong = {"b64": base64.b64encode(b"not a picture").decode(), "label": "clean"}
    response = teach_json(client, fresh, wrong)
    assert "examples.0" in assert_problem(response, 422, "unreadable-image")["detail"].lower()
    nothing_is_there(client, fresh)


@pytest.mark.parametrize(
    "example",
    [
        {"b64": "QQ=="},
        {"label": "a"},
        {"b64": "QQ==", "label": ""},
        {"b64": "QQ==", "label": "x" * 257},
        {"b64": "QQ==", "label": "a", "labels": ["b"]},
        {"b64": "QQ==", "digest": "sha256:" + "0" * 64, "label": "a"},
        {"b64": "!", "label": "a"},
        {"b64": "QQ==", "label": "a", "colour": "red"},
    ],
)
def test_examples_that_say_too_little_or_too_much_are_rejected(client, fresh, example):
    assert_problem(teach_json(client, fresh, example), 422, "invalid-request")
    nothing_is_there(client, fresh)


def test_requests_have_the_limits_of_predictions(client, world, fresh):
    five = [("a", photo(seed)) for seed in range(5)]
    assert_problem(teach(client, fresh, *five), 422, "too-many-images")
    large = ("a", b"x" * (world.settings.body_bytes + 1))
    assert_problem(teach(client, fresh, large), 413, "body-too-large")
    raw = client.post(f"/tasks/{fresh}/examples", content=photo(1))
    assert_problem(raw, 415, "unsupported-media")
    text = client.post(f"/tasks/{fresh}/examples", files={"rust": (None, "text")})
    assert "not a file" in assert_problem(text, 422, "invalid-request")["detail"]


def test_a_digest_that_is_not_cached_is_rejected(client, fresh):
    unknown = {"digest": f"sha256:{'12' * 32}", "label": "a"}
    problem = assert_problem(teach_json(client, fresh, unknown), 404, "context-not-cached")
    assert unknown["digest"] in problem["detail"]


def test_the_type_of_a_task_cannot_change(client, fresh):
    taught(teach(client, fresh, *FOUR))
    other = teach(client, fresh, ("rust", photo(5)), query="?task_type=multi_label")
    assert "single_label" in assert_problem(other, 422, "unteachable-examples")["detail"]


def test_invalid_names_are_rejected_before_photos_are_read(client):
    assert_problem(teach(client, "No%20Name", *FOUR), 422, "invalid-name")
    assert_problem(teach(client, "team/examples", *FOUR), 422, "invalid-name")


def test_teaching_needs_the_admin_key(world, fresh):
    with TestClient(
        world.app(api_key=SecretStr("reading"), admin_key=SecretStr("changing"))
    ) as client:
        assert_problem(teach(client, fresh, *FOUR), 401, "key-required")
        reader = teach(client, fresh, *FOUR, **{"X-API-Key": "reading"})
        assert_problem(reader, 403, "not-permitted")
        taught(teach(client, fresh, *FOUR, **{"X-API-Key": "changing"}))
        assert_problem(client.get(f"/tasks/{fresh}/examples"), 401, "key-required")
        assert_problem(forget(client, fresh, photo(1)), 401, "key-required")


# --- conditions -----------------------------------------------------------------------------------


def test_if_match_rejects_a_task_that_has_changed(client, fresh):
    first = teach(client, fresh, *FOUR)
    tag = first.headers["etag"]
    second = teach(client, fresh, ("rust", photo(5)), **{"If-Match": tag})
    assert taught(second).version == 2
    late = teach(client, fresh, ("rust", photo(6)), **{"If-Match": tag})
    assert_problem(late, 412, "precondition-failed")
    assert_problem(forget(client, fresh, photo(5), **{"If-Match": tag}), 412, "precondition-failed")
    assert listed(client, fresh).total == 5
    now = second.headers["etag"]
    assert taught(forget(client, fresh, photo(5), **{"If-Match": now}), created=False).version == 1


def test_only_if_absent_makes_a_new_task_or_none(client, fresh):
    taught(teach(client, fresh, *FOUR, **{"If-None-Match": "*"}))
    again = teach(client, fresh, ("rust", photo(5)), **{"If-None-Match": "*"})
    assert_problem(again, 412, "already-exists")


def test_all_that_many_teach_at_once_is_kept(client, fresh):
    taught(teach(client, fresh, *FOUR))
    with ThreadPoolExecutor(6) as pool:
        seeds = range(20, 26)
        answers = list(pool.map(lambda seed: teach(client, fresh, ("rust", photo(seed))), seeds))
    assert [answer.status_code for answer in answers] == [201] * 6
    kept = {each.digest for each in listed(client, fresh).examples}
    assert kept == {digest_of(photo(seed)) for seed in [1, 2, 3, 4, *range(20, 26)]}


def test_wait_all_lists_the_replicas_that_serve_it(client, fresh):
    response = teach(client, fresh, *FOUR, query="?wait=all&timeout=1")
    assert response.status_code in (201, 202), response.text
    assert "replicas" in response.json()
