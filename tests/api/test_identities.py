"""Several keys on one server: each sees and uses its own."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from engram_server.access import keys as server_keys
from engram_server.access.quotas import KeyLimits
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.api.keys import make_key, sends, write_keys
from tests.serving import photo

EVERY_TASK = {scope: ["*"] for scope in ("predict", "read", "publish", "admin", "metrics")}
SOME = {"predict": ["pets", "sc*"], "read": ["pets", "age"], "publish": ["team-a/*"]}
KEYS = (
    make_key("ann", scopes=EVERY_TASK),
    make_key("bob", scopes=EVERY_TASK),
    make_key("some", scopes=SOME),
    make_key("asks", scopes={"predict": ["pets", "sc*"]}),
    make_key("few", KeyLimits(requests_per_second=0.01), scopes=EVERY_TASK),
    make_key("rows", KeyLimits(rows_per_second=1), scopes=EVERY_TASK),
    make_key("images", KeyLimits(concurrent_images=1), scopes=EVERY_TASK),
)


@pytest.fixture
def file(tmp_path):
    return write_keys(tmp_path / "keys.json", *KEYS)


@pytest.fixture
def client(world, file):
    with TestClient(world.app(keys_file=str(file))) as client:
        yield client


def answering(response) -> set[str]:
    assert response.status_code == 200, response.text
    return set(response.json()["images"][0]["tasks"])


# --- tasks ----------------------------------------------------------------------------------------


def test_without_names_only_the_tasks_of_the_key_answer(client):
    assert answering(client.post("/predict", content=photo(1), headers=sends("some"))) == {
        "pets",
        "scene",
    }
    everything = answering(client.post("/predict", content=photo(1), headers=sends("ann")))
    assert everything >= {"pets", "scene", "age", "face"}


@pytest.mark.parametrize("name", ["age", "age@1", "age:default", "nothing", "pets,age", "team-a/x"])
def test_a_task_of_others_is_rejected_whether_it_exists_or_not(client, name):
    before = rejections(client, "permission")
    response = client.post(f"/predict?tasks={name}", content=photo(1), headers=sends("some"))
    document = assert_problem(response, 403, "not-permitted")
    assert document["names"] == [name.rpartition(",")[2]]
    assert rejections(client, "permission") == before + 1


def test_the_protocol_shows_and_runs_only_the_tasks_of_the_key(client):
    headers = sends("asks")
    listed = client.post("/v2/repository/index", headers=headers).json()
    assert {each["name"] for each in listed} == {"multitask", "pets", "scene"}
    outputs = client.get("/v2/models/multitask", headers=headers).json()["outputs"]
    assert {each["name"] for each in outputs} == {"pets", "scene"}
    config = client.get("/v2/models/multitask/config", headers=headers).json()
    assert {each["name"] for each in config["output"]} == {"pets", "scene"}
    for name in ("age", "age@1", "multitask/versions/1"):
        assert client.get(f"/v2/models/{name}", headers=headers).status_code == 403

    pixels = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 3, 32, 32], "data": []}
    size = client.get("/v2/models/multitask", headers=headers).json()["inputs"][1]["shape"]
    pixels["shape"], pixels["data"] = [1, *size[1:]], [0.0] * (size[1] * size[2] * size[3])
    body = {"inputs": [pixels]}
    answer = client.post("/v2/models/multitask/infer", json=body, headers=headers).json()
    assert {each["name"] for each in answer["outputs"]} == {"pets", "scene"}
    body["outputs"] = [{"name": "age"}]
    refused = client.post("/v2/models/multitask/infer", json=body, headers=headers)
    assert refused.status_code == 403


def test_lists_and_suggestions_name_only_the_tasks_of_the_key(client):
    headers = sends("some")
    listed = client.get("/tasks", headers=headers).json()["tasks"]
    assert {each["task"] for each in listed} == {"pets", "age"}
    assert client.get("/tasks/scene", headers=headers).status_code == 403
    narrow = client.post("/predict?tasks=scenes", content=photo(1), headers=headers)
    assert narrow.json()["suggestions"] == {"scenes": "scene"}


def test_a_suggestion_never_names_a_task_of_others(world, tmp_path):
    file = write_keys(tmp_path / "keys.json", make_key("pe", scopes={"read": ["pe", "pett*"]}))
    with TestClient(world.app(keys_file=str(file))) as client:
        for path in ("/tasks/petts", "/v2/models/petts", "/tasks/petts/versions/1"):
            response = client.get(path, headers=sends("pe"))
            assert response.status_code == 404
            assert "'pets'" not in response.text
            assert '"pets"' not in response.text


def test_a_bundle_extends_only_what_its_publisher_may_read(client, world, fresh):
    headers = sends("some")
    try:
        for seed, parent, status in ((60, "pets", 201), (61, "scene", 403)):
            bundle = world.bundle(seed, extends=(world.bundles[parent],)).to_bytes()
            judged = client.post("/tasks/validate", content=bundle, headers=headers)
            assert judged.status_code == (200 if status == 201 else 403)
            made = client.put(f"/tasks/team-a/{parent}", content=bundle, headers=headers)
            assert made.status_code == status
        orphan = world.bundle(62, extends=(world.bundle(64),)).to_bytes()
        unknown = client.put("/tasks/team-a/x", content=orphan, headers=headers)
        assert_problem(unknown, 403, "not-permitted")
        elsewhere = client.put("/tasks/pets", content=bundle, headers=headers)
        assert_problem(elsewhere, 403, "not-permitted")
    finally:
        assert client.delete("/tasks/team-a/pets", headers=headers).status_code == 200


# --- callers --------------------------------------------------------------------------------------


def test_the_actor_of_a_change_is_the_key_whatever_the_headers_say(client, world, fresh):
    headers = {**sends("ann"), "X-Forwarded-For": "10.9.8.7", "Forwarded": "for=10.9.8.7"}
    bundle = world.bundle(63).to_bytes()
    assert client.put(f"/tasks/{fresh}", content=bundle, headers=headers).status_code == 201
    history = client.get(f"/tasks/{fresh}/history", headers=headers).json()
    assert [entry["actor"] for entry in history["entries"]] == ["key:ann"]


def cached(client, key, image) -> str:
    response = client.post("/predict?tasks=pets", content=image, headers=sends(key))
    return response.json()["images"][0]["cache"]


def test_callers_cannot_see_images_of_others(client):
    image = photo(501)
    assert cached(client, "ann", image) == "miss"
    assert cached(client, "ann", image) == "hit"
    assert cached(client, "bob", image) == "miss"
    other = photo(502)
    answer = client.post("/predict?tasks=pets", content=other, headers=sends("ann")).json()
    body = {"images": [{"digest": answer["images"][0]["digest"]}], "tasks": ["pets"]}
    assert client.post("/predict", json=body, headers=sends("ann")).status_code == 200
    refused = client.post("/predict", json=body, headers=sends("bob"))
    assert_problem(refused, 404, "context-not-cached")


def test_contexts_are_shared_where_all_trust_each_other(world, file):
    with TestClient(world.app(keys_file=str(file), share_contexts=True)) as client:
        assert cached(client, "ann", photo(503)) == "miss"
        assert cached(client, "bob", photo(503)) == "hit"


# --- limits ---------------------------------------------------------------------------------------


def rejections(client, reason) -> float:
    text = client.get("/metrics", headers=sends("ann")).text
    prefix = f'engram_rejections_total{{reason="{reason}"}} '
    return sum(float(line.split()[1]) for line in text.splitlines() if line.startswith(prefix))


def test_a_key_over_its_request_rate_gets_retry_after(client):
    before = rejections(client, "key_requests")
    accepted = client.get("/tasks", headers=sends("few"))
    assert accepted.status_code == 200
    assert accepted.headers["ratelimit-policy"] == '"requests";q=1;w=100'
    assert accepted.headers["ratelimit"].startswith('"requests";r=0;t=')
    refused = client.get("/tasks", headers=sends("few"))
    assert_problem(refused, 429, "quota-exceeded")
    assert 95 <= int(refused.headers["retry-after"]) <= 100
    assert 0 < int(refused.headers["ratelimit"].rpartition("=")[2]) <= 100
    assert client.get("/tasks", headers=sends("ann")).status_code == 200
    assert rejections(client, "key_requests") == before + 1


def test_only_keys_with_a_rate_have_its_headers(client):
    for key in ("ann", "images"):
        answered = client.get("/tasks", headers=sends(key))
        assert not {"ratelimit", "ratelimit-policy"} & set(answered.headers)
    assert "ratelimit" not in client.get("/livez").headers


def test_a_key_that_owes_rows_is_rejected_before_its_body_is_read(client):
    before = rejections(client, "key_rows")
    first = client.post("/predict?tasks=pets", content=photo(1), headers=sends("rows"))
    assert first.status_code == 200
    refused = client.post("/predict?tasks=pets", content=b"no image", headers=sends("rows"))
    assert_problem(refused, 429, "quota-exceeded")
    assert int(refused.headers["retry-after"]) > 1
    assert rejections(client, "key_rows") == before + 1


def test_more_images_than_a_key_may_ever_have_is_not_retryable(client):
    files = [("image", (f"{n}.png", photo(n), "image/png")) for n in range(2)]
    refused = client.post("/predict?tasks=pets", files=files, headers=sends("images"))
    assert_problem(refused, 422, "too-many-images")


def test_a_key_with_too_many_images_in_flight_gets_retry_after(client, world, monkeypatch):
    predict, begun, go_on = world.engine.predictions.predict, threading.Event(), threading.Event()

    async def held(*args, **kwargs):
        begun.set()
        await asyncio.to_thread(go_on.wait, 60)
        return await predict(*args, **kwargs)

    monkeypatch.setattr(world.engine.predictions, "predict", held)
    before = rejections(client, "key_images")
    with ThreadPoolExecutor(1) as pool:
        ask = partial(client.post, "/predict?tasks=pets", content=photo(1))
        first = pool.submit(ask, headers=sends("images"))
        try:
            assert begun.wait(60)
            refused = client.post("/predict?tasks=pets", content=photo(2), headers=sends("images"))
        finally:
            go_on.set()
        assert first.result().status_code == 200
    assert_problem(refused, 429, "quota-exceeded")
    assert refused.headers["retry-after"] == "1"
    assert rejections(client, "key_images") == before + 1


# --- changes --------------------------------------------------------------------------------------


def test_a_revoked_key_is_out_without_a_restart(client, file, monkeypatch):
    monkeypatch.setattr(server_keys, "CHECK_SECONDS", 0.0)
    assert client.get("/tasks", headers=sends("bob")).status_code == 200
    write_keys(file, make_key("ann", scopes=EVERY_TASK))
    assert_problem(client.get("/tasks", headers=sends("bob")), 401, "key-required")
    file.write_text("{")
    assert client.get("/tasks", headers=sends("ann")).status_code == 200
    assert client.get("/tasks").status_code == 401
    metrics = client.get("/metrics", headers=sends("ann")).text
    assert "engram_keys_file_broken 1.0" in metrics


# --- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/tasks", "/tasks/pets", "/tasks/pets/history", "/v2/models/pets"]
)
def test_answers_to_a_key_are_not_for_shared_caches(client, path):
    by_header = sends("ann")
    for headers in (by_header, {"Authorization": f"Bearer {by_header['X-API-Key']}"}):
        response = client.get(path, headers=headers)
        assert response.status_code == 200
        assert response.headers["cache-control"] == "private, no-store"


def test_routes_keep_their_own_cache_control(client):
    get = partial(client.get, headers=sends("ann"))
    assert "immutable" in get("/tasks/pets/versions/1/bundle").headers["cache-control"]
    assert get("/tasks/none-such").headers["cache-control"] == "no-store"
    assert client.get("/livez").headers["cache-control"] == "no-store"
