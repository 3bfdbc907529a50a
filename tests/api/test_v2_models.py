"""`/v2` without inference: the server, its models, and loading and unloading them."""

import pytest
from engram_server.api.routes.v2.models import MULTITASK
from engram_server.documentation import OPEN_INFERENCE
from engram_server.engine.tasks.snapshot import Snapshot
from engram_store import Retire
from pydantic import SecretStr
from starlette.testclient import TestClient

from tests.bundles import with_tensors
from tests.serving import photo


def load(client, name, **options):
    return client.post(f"/v2/repository/models/{name}/load", **options)


def unload(client, name, **options):
    return client.post(f"/v2/repository/models/{name}/unload", **options)


def assert_error(response, status: int, *words: str) -> str:
    """The protocol's own error, and not a problem document."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    body = response.json()
    assert list(body) == ["error"]
    assert all(word in body["error"] for word in words), body["error"]
    return body["error"]


def states(client, **body) -> dict:
    listed = client.post("/v2/repository/index", json=body).json()
    return {(each["name"], each.get("version")): each for each in listed}


@pytest.fixture
def published(client, world, fresh):
    """A task of its own for a test, one version."""
    bundle = world.bundle(700, classes=3)
    assert client.put(f"/tasks/{fresh}", content=bundle.to_bytes()).status_code == 201
    return fresh


# --- the server -----------------------------------------------------------------------------------


def test_server_names_itself_and_its_extensions(client):
    answer = client.get("/v2").json()
    assert answer["name"] == "engram"
    assert answer["version"]
    assert answer["extensions"] == [
        "binary_tensor_data",
        "classification",
        "model_configuration",
        "model_repository",
    ]


def test_live_and_ready(client):
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}


def test_draining_server_is_live_but_neither_it_nor_its_models_are_ready(world, monkeypatch):
    monkeypatch.setattr(world.engine.predictions, "draining", True)
    with TestClient(world.app()) as client:
        assert client.get("/v2/health/live").status_code == 200
        response = client.get("/v2/health/ready")
        assert_error(response, 503, "shutting down")
        assert int(response.headers["retry-after"]) >= 1
        assert_error(client.get("/v2/models/pets/ready"), 503, "shutting down")


def test_openapi_describes_the_protocol_and_names_its_page(client):
    document = client.get("/openapi.json").json()
    assert len([path for path in document["paths"] if path.startswith("/v2")]) == 14
    assert OPEN_INFERENCE in document["info"]["description"]


# --- metadata -------------------------------------------------------------------------------------


def test_task_is_a_model_with_its_versions_shapes_and_labels(client, world):
    height, width = world.backbone.image_size
    assert client.get("/v2/models/pets").json() == {
        "name": "pets",
        "versions": ["1"],
        "platform": "engram",
        "inputs": [
            {"name": "image", "datatype": "BYTES", "shape": [-1, 1]},
            {"name": "pixel_values", "datatype": "FP32", "shape": [-1, 3, height, width]},
        ],
        "outputs": [
            {
                "name": "scores",
                "datatype": "FP32",
                "shape": [-1, 3],
                "parameters": {
                    "task_type": "single_label",
                    "version": "1",
                    "labels": ["cat", "dog", "rabbit"],
                },
            }
        ],
    }


def test_base_is_a_model_without_versions(client):
    answer = client.get("/v2/models/base").json()
    assert answer["versions"] == []
    (output,) = answer["outputs"]
    assert output["shape"] == [-1, 7]
    assert len(output["parameters"]["labels"]) == 7
    assert_error(client.get("/v2/models/base/versions/1"), 404, "base")


def test_multitask_has_every_ready_task_as_an_output(client, world):
    outputs = client.get("/v2/models/multitask").json()["outputs"]
    assert {each["name"] for each in outputs} == set(world.engine.tasks.snapshot.ready_names)
    scene = next(each for each in outputs if each["name"] == "scene")
    assert scene == {
        "name": "scene",
        "datatype": "FP32",
        "shape": [-1, 3],
        "parameters": {"task_type": "multi_label", "version": "1"},
    }


def test_config_is_what_tritons_tools_expect(client, world):
    answer = client.get("/v2/models/pets/config").json()
    assert answer["name"] == "pets"
    assert answer["max_batch_size"] == world.settings.max_images
    assert answer["input"][0] == {
        "name": "image",
        "data_type": "TYPE_STRING",
        "dims": [1],
        "optional": True,
    }
    assert answer["input"][1]["dims"] == [3, *world.backbone.image_size]
    assert answer["output"] == [{"name": "scores", "data_type": "TYPE_FP32", "dims": [3]}]
    assert client.get("/v2/models/pets/versions/1/config").json() == answer


@pytest.mark.parametrize("name", ["team/birds", "team%2Fbees"])
def test_name_with_a_slash_is_written_as_it_is_or_encoded(client, world, name):
    bundle = world.bundle(701)
    task = name.replace("%2F", "/")
    assert client.put(f"/tasks/{task}", content=bundle.to_bytes()).status_code == 201
    try:
        assert client.get(f"/v2/models/{name}").json()["name"] == task
        assert client.get(f"/v2/models/{name}/ready").status_code == 200
        assert client.get(f"/v2/models/{name}/config").status_code == 200
        assert client.get(f"/v2/models/{name}/versions/1/ready").status_code == 200
        assert unload(client, name).status_code == 200
        assert client.get(f"/v2/models/{name}/ready").status_code == 503
        assert load(client, name).status_code == 200
    finally:
        world.store.commit(Retire(task))
        world.engine.tasks.sync()


def test_versions_and_aliases_are_models_too(client, world, published):
    second = world.bundle(702, classes=4)
    url = f"/tasks/{published}?alias=canary"
    assert client.put(url, content=second.to_bytes()).status_code == 201

    def classes(model):
        return client.get(f"/v2/models/{model}").json()["outputs"][0]["shape"][1]

    assert client.get(f"/v2/models/{published}").json()["versions"] == ["1", "2"]
    assert classes(published) == 3
    assert classes(f"{published}/versions/2") == 4
    assert classes(f"{published}@2") == 4
    assert classes(f"{published}:canary") == 4


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/pest",
        "/v2/models/pest/ready",
        "/v2/models/pest/config",
        "/v2/models/pets/versions/9",
        "/v2/models/pets/versions/9/ready",
        "/v2/models/multitask/versions/1",
        "/v2/models/",
        "/v2/models/%ED%A0%80x",
        "/v2/nowhere",
    ],
)
def test_what_is_not_there_is_a_404_in_the_protocols_words(client, path):
    assert_error(client.get(path), 404)


def test_an_unknown_model_gets_a_suggestion(client):
    assert_error(client.get("/v2/models/pest"), 404, "pest", "pets")


@pytest.mark.parametrize("version", ["0", "x", "-1", "1" * 30])
def test_a_version_that_is_not_a_number_is_rejected(client, version):
    assert_error(client.get(f"/v2/models/pets/versions/{version}/ready"), 422, "version")


def test_an_unsupported_method_is_an_error_of_the_protocol(client):
    response = client.delete("/v2/models/pets/infer")
    assert_error(response, 405, "DELETE", OPEN_INFERENCE)
    assert "POST" in response.headers["allow"]


def test_an_unexpected_error_reveals_only_its_id(world, monkeypatch):
    def broken(snapshot):
        raise ZeroDivisionError("the secret of the universe")

    monkeypatch.setattr(Snapshot, "states", broken)
    with TestClient(world.app()) as client:
        error = assert_error(client.post("/v2/repository/index"), 500, "Unexpected")
    assert "secret" not in error


def test_metrics_have_the_pattern_not_the_model(client):
    client.get("/v2/models/pets/ready")
    text = client.get("/metrics").text
    assert 'route="/v2/models/{name}/ready"' in text
    assert "/v2/models/pets" not in text


# --- keys -----------------------------------------------------------------------------------------


def test_keys_guard_the_protocol_as_they_guard_the_rest(world):
    keys = {"api_key": SecretStr("reader-key"), "admin_key": SecretStr("admin-key")}
    reader = {"Authorization": "Bearer reader-key"}
    admin = {"X-API-Key": "admin-key"}
    with TestClient(world.app(**keys)) as client:
        for path in ("/v2/health/live", "/v2/health/ready"):
            assert client.get(path).status_code == 200
        for path in ("/v2", "/v2/models/pets", "/v2/models/pets/ready", "/v2/models/pets/config"):
            response = client.get(path)
            assert_error(response, 401, "Bearer")
            assert response.headers["www-authenticate"].startswith("Bearer")
            assert client.get(path, headers=reader).status_code == 200
        assert_error(client.post("/v2/models/pets/infer"), 401)
        assert_error(client.post("/v2/repository/index"), 401)
        assert client.post("/v2/repository/index", headers=reader).status_code == 200
        assert_error(load(client, "pets"), 401)
        assert_error(load(client, "pets", headers=reader), 403, "admin key")
        assert_error(unload(client, "pets", headers=reader), 403, "admin key")
        assert load(client, "pets", headers=admin).status_code == 200


def test_page_of_another_site_loads_and_unloads_nothing(client):
    elsewhere = {"Origin": "https://elsewhere.example"}
    assert_error(unload(client, "pets", headers=elsewhere), 403, "other sites")
    assert client.get("/v2/models/pets/ready").status_code == 200


# --- the repository -------------------------------------------------------------------------------


def test_index_lists_every_version_of_every_model(client, world, published):
    found = states(client)
    ready = {"state": "READY", "reason": ""}
    assert found[MULTITASK, None] == {"name": MULTITASK, **ready}
    assert found["base", None] == {"name": "base", **ready}
    assert found[published, "1"] == {"name": published, "version": "1", **ready}
    assert (
        client.post("/v2/repository/index").json()
        == client.post("/v2/repository/index", json={}).json()
    )


def test_unloaded_model_answers_nowhere_until_it_is_loaded_again(client, world, published):
    image = photo(1)
    assert unload(client, published).status_code == 200

    assert_error(client.get(f"/v2/models/{published}/ready"), 503, published, "unloaded")
    assert_error(client.get(f"/v2/models/{published}"), 503, "unloaded")
    assert_error(client.post(f"/v2/models/{published}/infer"), 503, "unloaded")
    refused = client.post(f"/predict?tasks={published}", content=image)
    assert refused.status_code == 503
    assert "unloaded" in refused.json()["detail"]
    entry = states(client)[published, "1"]
    assert entry["state"] == "UNAVAILABLE"
    assert "unloaded" in entry["reason"]
    assert (published, "1") not in states(client, ready=True)
    assert client.get(f"/tasks/{published}").json()["status"] == "unloaded"
    assert client.get("/v2/models/pets/ready").status_code == 200

    everything = client.post("/predict", content=image)
    assert everything.status_code == 200
    assert published not in everything.json()["images"][0]["tasks"]
    outputs = client.get("/v2/models/multitask").json()["outputs"]
    assert published not in {each["name"] for each in outputs}

    assert load(client, published, json={}).status_code == 200
    assert client.get(f"/v2/models/{published}/ready").json() == {"name": published, "ready": True}
    assert client.post(f"/predict?tasks={published}", content=image).status_code == 200
    assert states(client)[published, "1"]["state"] == "READY"


def test_unloading_twice_and_loading_what_is_loaded_do_nothing(client, published):
    assert unload(client, published, json={"parameters": {"unload_dependents": False}}).is_success
    assert unload(client, published).is_success
    assert load(client, published).is_success
    assert load(client, published).is_success
    assert client.get(f"/v2/models/{published}/ready").is_success


def test_load_finds_what_another_server_has_published(client, world, fresh):
    world.store.publish(fresh, world.bundle(703))  # this server polls once an hour
    assert_error(client.get(f"/v2/models/{fresh}/ready"), 404)
    assert load(client, fresh).status_code == 200
    assert client.get(f"/v2/models/{fresh}/ready").status_code == 200


def test_publishing_a_task_here_loads_it_again(client, world, published):
    unload(client, published)
    again = client.put(f"/tasks/{published}", content=world.bundle(704).to_bytes())
    assert again.status_code == 201
    assert client.get(f"/v2/models/{published}/ready").status_code == 200


@pytest.mark.parametrize("name", ["pest", "pets@1", "a/b/c"])
def test_only_tasks_can_be_loaded_and_unloaded(client, name):
    assert_error(load(client, name), 404)
    assert_error(unload(client, name), 404)


@pytest.mark.parametrize("name", ["base", "multitask"])
def test_what_belongs_to_the_backbone_is_always_loaded(client, name):
    assert load(client, name).status_code == 200
    assert_error(unload(client, name), 422, name, "always loaded")
    assert client.get(f"/v2/models/{name}/ready").status_code == 200


@pytest.mark.parametrize("parameters", [{"config": "{}"}, {"file:1/model.pt": "AAAA"}])
def test_load_takes_no_other_model_than_the_published_one(client, parameters):
    response = load(client, "pets", json={"parameters": parameters})
    assert_error(response, 422, "publish")


@pytest.mark.parametrize("body", [b"{", b"[]", b'"x"', b"\xff"])
def test_index_and_load_reject_other_json(client, body):
    assert client.post("/v2/repository/index", content=body).status_code in (400, 422)
    assert load(client, "pets", content=body).status_code in (400, 422)


def test_model_that_cannot_be_loaded_says_why(client, world, fresh):
    bundle = world.bundle(705)
    wrong = with_tensors(bundle, {"golden.logits": bundle.tensors["golden.logits"] + 5})
    world.store.publish(fresh, wrong)
    assert_error(load(client, fresh), 503, "golden")
    assert_error(client.get(f"/v2/models/{fresh}/ready"), 503, "golden")
    assert states(client)[fresh, "1"]["state"] == "UNAVAILABLE"
    assert "golden" in states(client)[fresh, "1"]["reason"]
