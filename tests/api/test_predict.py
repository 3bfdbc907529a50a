"""`/predict`: every way to send images, every option, and every mistake."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from engram_server.api.routes.predict import PredictResult
from engram_server.model import MultiTaskViT
from PIL import Image
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.model.image_files import claims_size
from tests.serving import photo, reference_logits


def ask(client, image, query="", **options):
    response = client.post(f"/predict{query}", content=image, **options)
    assert response.status_code == 200, response.text
    PredictResult.model_validate(response.json())
    return response.json()


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["POST", "PUT"])
@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "image/jpeg",
        "image/x-whatever",
        "application/octet-stream",
        "application/x-www-form-urlencoded",  # what curl --data-binary says of everything
        "IMAGE/JPEG; q=1",
    ],
)
def test_raw_image_is_answered_whatever_curl_calls_it(client, cat, method, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = client.request(method, "/predict?tasks=pets", content=cat, headers=headers)
    assert response.status_code == 200
    (image,) = response.json()["images"]
    assert image["tasks"]["pets"]["version"] == 1


def test_answer_is_the_one_the_task_gives_alone(client, world, cat):
    answer = ask(client, cat, "?tasks=pets&return=logits")
    expected = reference_logits(world.backbone, world.bundles["pets"], cat)
    assert answer["images"][0]["tasks"]["pets"]["logits"] == pytest.approx(
        expected.tolist(), abs=2e-3
    )
    assert answer["backbone"] == "vit-tiny-random"
    assert answer["generation"] == world.engine.tasks.snapshot.generation


def test_form_brings_any_number_of_images_in_order(client):
    images = [photo(seed) for seed in range(3)]
    files = [("image", (f"{n}.png", image, "image/png")) for n, image in enumerate(images)]
    together = client.post("/predict?tasks=pets", files=files)
    assert together.status_code == 200
    alone = [ask(client, image, "?tasks=pets")["images"][0] for image in images]
    assert [each["digest"] for each in together.json()["images"]] == [
        each["digest"] for each in alone
    ]


def test_json_brings_images_and_options(client, cat):
    body = {
        "images": [{"b64": b64(cat)}, {"b64": b64(photo(1))}],
        "tasks": ["pets", "base"],
        "top_k": 2,
        "return": "scores",
    }
    response = client.post("/predict?tasks=scene&top_k=1", json=body)
    assert response.status_code == 200, response.text
    for image in response.json()["images"]:
        assert list(image["tasks"]) == ["pets", "base"]
        assert all(len(task["predictions"]) == 2 for task in image["tasks"].values())


def test_large_json_is_read_as_small_is(client):
    image = photo(7, size=(150, 200))  # noise: about 90 kB
    response = client.post("/predict?tasks=pets", json={"images": [{"b64": b64(image)}]})
    assert response.status_code == 200, response.text
    assert response.json()["images"][0]["digest"] == ask(client, image)["images"][0]["digest"]


def test_a_digest_runs_more_tasks_without_sending_the_image_again(client):
    first = ask(client, photo(1101), "?tasks=pets")["images"][0]
    assert first["cache"] == "miss"
    body = {"images": [{"digest": first["digest"]}], "tasks": ["scene"]}
    again = client.post("/predict", json=body).json()["images"][0]
    assert again["cache"] == "hit"
    assert list(again["tasks"]) == ["scene"]


def test_one_pixel_is_an_image(client):
    buffer = io.BytesIO()
    Image.new("RGB", (1, 1), "red").save(buffer, "PNG")
    assert ask(client, buffer.getvalue(), "?tasks=pets")["images"]


# --- options --------------------------------------------------------------------------------------


def test_without_tasks_every_ready_task_answers(client, world, cat):
    tasks = ask(client, cat)["images"][0]["tasks"]
    assert set(tasks) == set(world.engine.tasks.snapshot.ready_names)
    assert tasks["base"]["version"] is None


@pytest.mark.parametrize(
    "query", ["tasks=pets,scene", "tasks=pets&tasks=scene", "tasks=pets, scene"]
)
def test_tasks_are_separated_by_commas_or_repeated(client, cat, query):
    assert list(ask(client, cat, f"?{query}")["images"][0]["tasks"]) == ["pets", "scene"]


def test_answers_are_keyed_by_the_requested_reference(client, cat):
    tasks = ask(client, cat, "?tasks=pets,pets@1,pets:default,pets")["images"][0]["tasks"]
    assert list(tasks) == ["pets", "pets@1", "pets:default"]


def test_scores_of_one_label_add_up_and_come_best_first(client, cat):
    (task,) = ask(client, cat, "?tasks=pets")["images"][0]["tasks"].values()
    scores = [each["score"] for each in task["predictions"]]
    assert scores == sorted(scores, reverse=True)
    assert sum(scores) == pytest.approx(1, abs=1e-5)
    assert {(each["label"], each["index"]) for each in task["predictions"]} == {
        ("cat", 0),
        ("dog", 1),
        ("rabbit", 2),
    }


def test_top_k_is_five_by_default(client, cat):
    assert len(ask(client, cat, "?tasks=base")["images"][0]["tasks"]["base"]["predictions"]) == 5
    assert (
        len(ask(client, cat, "?tasks=base&top_k=100")["images"][0]["tasks"]["base"]["predictions"])
        == 7
    )


def test_threshold_chooses_the_labels_of_a_multi_label_task_alone(client, cat):
    def labels(query):
        task = ask(client, cat, f"?tasks=scene,pets&{query}")["images"][0]["tasks"]
        assert len(task["pets"]["predictions"]) == 3
        return {each["label"]: each["score"] for each in task["scene"]["predictions"]}

    everything = labels("threshold=0")
    assert len(everything) == 3
    assert labels("") == {name: score for name, score in everything.items() if score >= 0.5}
    assert labels("threshold=1") == {}


def test_regression_gives_values_and_embedding_a_vector(client, world, cat):
    tasks = ask(client, cat, "?tasks=age,face")["images"][0]["tasks"]
    assert tasks["age"].keys() == {"version", "values"}
    assert len(tasks["age"]["values"]) == 1
    assert tasks["face"].keys() == {"version", "embedding"}
    assert len(tasks["face"]["embedding"]) == 6


def test_embedding_is_what_the_head_reads(client, world, cat):
    tasks = ask(client, cat, "?tasks=pets&return=embedding")["images"][0]["tasks"]
    features = np.array(tasks["pets"]["embedding"], dtype=np.float32)
    bundle = world.bundles["pets"]
    logits = ask(client, cat, "?tasks=pets&return=logits")["images"][0]["tasks"]["pets"]["logits"]
    assert bundle.tensors["head.weight"] @ features + bundle.tensors["head.bias"] == pytest.approx(
        logits, abs=1e-3
    )


def test_attention_has_a_map_of_each_task(client, world, cat):
    tasks = ["pets", "scene", "age", "face", "base"]
    plain = ask(client, cat, f"?tasks={','.join(tasks)}")
    answer = ask(client, cat, f"?tasks={','.join(tasks)}&explain=attention")
    pixels = torch.from_numpy(world.backbone.preprocessing(cat, max_pixels=10**8))
    model = MultiTaskViT(world.backbone)
    for name, bundle in world.bundles.items():
        model.add(name, bundle)
    normalised = world.backbone.preprocessing.normalise(pixels[None])[0]
    (expected,) = model.attention_pairs([normalised], [tasks])
    for name, task in answer["images"][0]["tasks"].items():
        attention = task.pop("attention")
        grid = np.array(attention["grid"])
        assert grid == pytest.approx(expected[name].numpy(), abs=2e-3)  # contexts are cached halved
        assert attention["on_patches"] == pytest.approx(grid.sum(), abs=1e-3)
        assert task == plain["images"][0]["tasks"][name]
    size = list(world.backbone.image_size)
    assert answer["view"] == {"resize": size, "crop": None, "patch": [8, 8]}
    assert "view" not in plain


def test_attention_works_in_json_and_for_a_digest(client):
    first = ask(client, photo(12), "?tasks=pets")["images"][0]
    assert "attention" not in first["tasks"]["pets"]
    body = {"images": [{"digest": first["digest"]}], "tasks": ["pets", "base"]}
    answer = client.post("/predict", json={**body, "explain": "attention"}).json()
    PredictResult.model_validate(answer)
    for task in answer["images"][0]["tasks"].values():
        assert len(task["attention"]["grid"]) == len(task["attention"]["grid"][0]) == 4
    by_query = client.post("/predict?explain=attention", json=body).json()
    assert by_query["images"] == answer["images"]


@pytest.mark.parametrize("returned", ["logits", "embedding"])
def test_attention_goes_with_whatever_is_returned(client, cat, returned):
    task = ask(client, cat, f"?tasks=pets&explain=attention&return={returned}")
    assert task["images"][0]["tasks"]["pets"].keys() == {"version", returned, "attention"}


def test_timings_are_in_the_answer_and_in_server_timing(client, cat):
    response = client.post("/predict?tasks=pets", content=cat)
    timings = response.json()["timings_ms"]
    assert list(timings) == ["queue", "decode", "forward", "total"]
    assert timings["total"] >= timings["forward"] > 0
    header = re.findall(r"(\w+);dur=([\d.e-]+)", response.headers["server-timing"])
    assert {name: float(value) for name, value in header} == timings


# --- request ids and deadlines --------------------------------------------------------------------


def test_request_id_of_the_caller_comes_back(client, cat):
    response = client.post("/predict", content=cat, headers={"X-Request-Id": "trace-1.a_B:c"})
    assert response.headers["x-request-id"] == "trace-1.a_B:c"


@pytest.mark.parametrize("request_id", ["", "with space", "x" * 129, 'quote"'])
def test_request_id_is_made_when_the_callers_is_missing_or_odd(client, request_id):
    made = client.get("/livez", headers={"X-Request-Id": request_id}).headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{32}", made)


def test_deadline_that_cannot_be_met_is_a_504(client):
    response = client.post("/predict", content=photo(21), headers={"X-Deadline-Ms": "0.001"})
    assert_problem(response, 504, "deadline-exceeded")


def test_default_deadline_is_for_requests_that_bring_none(world):
    with TestClient(world.app(default_deadline_ms=0.001)) as client:
        assert_problem(client.post("/predict", content=photo(22)), 504, "deadline-exceeded")
        patient = {"X-Deadline-Ms": "60000"}
        assert client.post("/predict", content=photo(22), headers=patient).status_code == 200


@pytest.mark.parametrize("value", ["soon", "-1", "0", "nan", "inf", "1e99"])
def test_deadline_must_be_a_number_of_milliseconds(client, cat, value):
    response = client.post("/predict", content=cat, headers={"X-Deadline-Ms": value})
    assert "X-Deadline-Ms" in assert_problem(response, 422, "invalid-request")["detail"]


# --- mistakes -------------------------------------------------------------------------------------


def test_empty_body(client):
    document = assert_problem(client.post("/predict"), 422, "invalid-request")
    assert "empty" in document["detail"]


def test_text_instead_of_an_image(client):
    response = client.post("/predict", content=b"just some text\n" * 9)
    assert "text" in assert_problem(response, 422, "unreadable-image")["detail"]


def test_truncated_jpeg(client, cat):
    response = client.post("/predict", content=cat[: len(cat) // 2])
    assert "JPEG" in assert_problem(response, 422, "unreadable-image")["detail"]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "PPM"])
def test_huge_image_is_rejected_by_its_header(client, format):
    response = client.post("/predict", content=claims_size(format, 20_000, 20_000))
    assert "400000000" in assert_problem(response, 413, "image-too-large")["detail"]


def test_one_bad_image_of_many_is_the_problem_of_all(client, cat):
    files = [("image", ("a.jpg", cat)), ("image", ("b.jpg", b"not an image"))]
    assert_problem(client.post("/predict", files=files), 422, "unreadable-image")


@pytest.mark.parametrize("content_type", ["text/plain", "video/mp4", "application/xml"])
def test_wrong_content_type(client, cat, content_type):
    response = client.post("/predict", content=cat, headers={"Content-Type": content_type})
    assert content_type in assert_problem(response, 415, "unsupported-media")["detail"]


def test_compressed_body_is_not_taken_for_an_image(client, cat):
    response = client.post("/predict", content=cat, headers={"Content-Encoding": "gzip"})
    assert_problem(response, 415, "unsupported-media")


def test_json_with_curls_default_content_type_gets_the_right_one_suggested(client):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    response = client.post("/predict", content=b' {"images": []}', headers=headers)
    assert "application/json" in assert_problem(response, 415, "unsupported-media")["detail"]


def test_unknown_task_is_named_and_a_known_one_suggested(client, cat):
    response = client.post("/predict?tasks=pest,scene,zzzzzz", content=cat)
    document = assert_problem(response, 404, "unknown-task")
    assert document["names"] == ["pest", "zzzzzz"]
    assert document["suggestions"] == {"pest": "pets"}


@pytest.mark.parametrize("ref", ["pets@2", "pets@x", "pets:canary", "PETS", "a/b/c", "base@1", "é"])
def test_reference_to_nothing_is_a_404_that_names_it(client, cat, ref):
    response = client.post("/predict", params={"tasks": ref}, content=cat)
    assert assert_problem(response, 404, "unknown-task")["names"] == [ref]


def test_too_many_images(client, cat):
    files = [("image", (f"{n}.jpg", cat)) for n in range(5)]
    assert (
        "5 images"
        in assert_problem(client.post("/predict", files=files), 422, "too-many-images")["detail"]
    )
    body = {"images": [{"digest": "sha256:" + "0" * 64}] * 5}
    assert_problem(client.post("/predict", json=body), 422, "too-many-images")


def test_too_many_tasks(client, world, cat):
    many = ",".join(f"pets@{number}" for number in range(1, 10))
    assert_problem(client.post(f"/predict?tasks={many}", content=cat), 422, "too-many-tasks")


def test_without_tasks_the_oldest_answer_however_many_there_are(world, cat):
    with TestClient(world.app(max_tasks=2)) as strict:
        answer = strict.post("/predict", content=cat)
        every = TestClient(world.app()).post("/predict", content=cat)
        assert strict.post("/predict?tasks=pets,scene", content=cat).status_code == 200
    omitted = len(every.json()["images"][0]["tasks"]) - 2
    assert int(answer.headers["X-Tasks-Omitted"]) == omitted > 0
    assert "X-Tasks-Omitted" not in every.headers
    created = {name: info.first.generation for name, info in world.store.catalog().tasks.items()}
    first = sorted(created, key=created.__getitem__)[0]
    assert sorted(answer.json()["images"][0]["tasks"]) == sorted(["base", first])


def test_body_over_the_limit_is_rejected_by_its_declared_length(client):
    response = client.post("/predict", content=b"x" * 200_001)
    assert "200,000 bytes" in assert_problem(response, 413, "body-too-large")["detail"]


@pytest.mark.parametrize(
    "content_type", ["image/png", "application/json", "multipart/form-data; boundary=b"]
)
def test_body_over_the_limit_is_rejected_while_it_streams(client, content_type):
    start = b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
    sent = []

    def chunks():
        yield start
        for number in range(1000):
            sent.append(number)
            yield b"x" * 10_000

    response = client.post("/predict", content=chunks(), headers={"Content-Type": content_type})
    assert_problem(response, 413, "body-too-large")


def test_broken_json(client):
    headers = {"Content-Type": "application/json"}
    response = client.post("/predict", content=b'{"images": [', headers=headers)
    assert_problem(response, 400, "malformed-request")
    response = client.post("/predict", content=b"[" * 500, headers=headers)
    assert_problem(response, 400, "malformed-request")


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ([], "The body"),
        ({}, "images"),
        ({"images": []}, "images"),
        ({"images": [{}]}, "either b64 or digest"),
        ({"images": [{"b64": "AA==", "digest": "sha256:" + "0" * 64}]}, "either b64 or digest"),
        ({"images": [{"digest": None}]}, "64 hexadecimal digits"),
        ({"images": [{"digest": "sha256:xyz"}]}, "images.0.digest"),
        ({"images": [{"b64": "not base64!"}]}, "base64"),
        ({"images": [{"b64": "ünïcode"}]}, "base64"),
        ({"images": [{"b64": ""}]}, "empty"),
        ({"images": [{"url": "http://169.254.169.254/"}]}, "images.0.url"),
        ({"images": [{"b64": "AA=="}], "tasks": []}, "tasks"),
        ({"images": [{"b64": "AA=="}], "top_k": 0}, "top_k"),
        ({"images": [{"b64": "AA=="}], "threshold": 2}, "threshold"),
        ({"images": [{"b64": "AA=="}], "return": "everything"}, "return"),
        ({"images": [{"b64": "AA=="}], "explain": True}, "explain"),
        ({"images": [{"b64": "AA=="}], "task": "pets"}, "task"),
    ],
)
def test_json_that_says_something_else(client, body, detail):
    document = assert_problem(client.post("/predict", json=body), 422, "invalid-request")
    assert detail in document["detail"]


def test_base64_of_something_else_is_an_unreadable_image(client):
    body = {"images": [{"b64": b64(b"hello there")}]}
    assert_problem(client.post("/predict", json=body), 422, "unreadable-image")


def test_digest_of_an_image_never_sent(client):
    body = {"images": [{"digest": "sha256:" + "0" * 64}]}
    document = assert_problem(client.post("/predict", json=body), 404, "context-not-cached")
    assert "0" * 64 in document["detail"]


def test_a_truncated_form_is_rejected(client, cat):
    """Two images never become one."""
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    part = b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n' + cat
    whole = part + b"\r\n" + part + b"\r\n--b--"
    assert client.post("/predict", content=whole, headers=headers).status_code == 200
    for size in (len(whole) - 1, len(whole) - 4, len(part) + 100, len(part) + 2, 30):
        response = client.post("/predict", content=whole[:size], headers=headers)
        assert "last boundary" in assert_problem(response, 400, "malformed-request")["detail"]


def test_form_without_its_images(client, cat):
    for files in ([("images", ("a.jpg", cat))], [("image", (None, "text"))]):
        assert_problem(client.post("/predict", files=files), 422, "invalid-request")
    empty = {"Content-Type": "multipart/form-data; boundary=b"}
    response = client.post("/predict", content=b"--b--\r\n", headers=empty)
    assert response.status_code in (400, 422)
    for content_type in ("multipart/form-data", "multipart/form-data; boundary=b"):
        headers = {"Content-Type": content_type}
        response = client.post("/predict", content=b"no form at all", headers=headers)
        assert_problem(response, 400, "malformed-request")


@pytest.mark.parametrize(
    ("query", "where"),
    [
        ("top_k=0", "query.top_k"),
        ("top_k=many", "query.top_k"),
        ("top_k=99999999999999999999", "query.top_k"),
        ("threshold=1.5", "query.threshold"),
        ("return=all", "query.return"),
        ("explain=everything", "query.explain"),
        ("tasks=", "query.tasks"),
        ("tasks=,,", "query.tasks"),
        ("tasks=" + "x" * 300, "query.tasks.0"),
        ("task=pets", "query.task"),  # a typo must not mean "every task"
        ("url=http://example.org/cat.jpg", "query.url"),
    ],
)
def test_wrong_option_is_named(client, cat, query, where):
    response = client.post(f"/predict?{query}", content=cat)
    document = assert_problem(response, 422, "invalid-request")
    assert [error["where"] for error in document["errors"]] == [where]
