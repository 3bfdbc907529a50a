"""Pages of other sites: which may read responses, and which may change tasks."""

import pytest
from engram_server.edge.cors import REQUEST_HEADERS, RESPONSE_HEADERS
from engram_server.errors import SettingsError
from engram_server.settings import load_settings
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.api.keys import make_key, sends, write_keys

APP, OTHER = "https://app.example", "https://other.example"
ALLOWED = "access-control-allow-origin"


@pytest.fixture(scope="module")
def client(world, tmp_path_factory):
    scopes = {scope: ["*"] for scope in ("predict", "read", "publish")}
    keys = write_keys(tmp_path_factory.mktemp("keys") / "keys.json", make_key("a", scopes=scopes))
    app = world.app(cors_origins=(APP, "http://localhost:5173"), keys_file=str(keys))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


def preflight(client, path, method="POST", origin=APP, headers="x-api-key,content-type"):
    asks = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": headers}
    return client.options(path, headers={"Origin": origin, **asks})


def test_a_page_of_a_listed_site_reads_an_answer(client, cat):
    response = client.post(
        "/predict?tasks=pets", content=cat, headers={"Origin": APP, **sends("a")}
    )
    assert response.status_code == 200
    assert response.headers[ALLOWED] == APP
    assert response.headers["vary"] == "Origin"
    exposed = response.headers["access-control-expose-headers"].split(", ")
    assert tuple(exposed) == RESPONSE_HEADERS
    assert {"Retry-After", "RateLimit", "ETag", "X-Request-Id"} <= set(exposed)
    assert "access-control-allow-credentials" not in response.headers


def test_it_reads_problems_too(client, monkeypatch):
    origin = {"Origin": APP}
    for response in (
        client.get("/tasks", headers=origin),
        client.get("/nothing", headers=origin),
        client.post("/predict?tasks=none", content=b"x", headers={**origin, **sends("a")}),
    ):
        assert response.status_code in (401, 404)
        assert response.headers["content-type"] == "application/problem+json"
        assert response.headers[ALLOWED] == APP
    runtime = client.app.state.runtime
    monkeypatch.setattr(type(runtime), "engine", property(lambda self: 1 / 0))
    response = client.get("/tasks", headers={**origin, **sends("a")})
    assert_problem(response, 500, "internal")
    assert response.headers[ALLOWED] == APP


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
def test_a_preflight_needs_no_key_and_allows_our_headers(client, method):
    response = preflight(client, "/tasks/pets", method, headers=",".join(REQUEST_HEADERS).lower())
    assert response.status_code == 200
    assert response.headers[ALLOWED] == APP
    assert method in response.headers["access-control-allow-methods"]
    allowed = response.headers["access-control-allow-headers"].split(", ")
    assert set(REQUEST_HEADERS) <= set(allowed)


def test_other_sites_get_nothing(client, cat):
    assert preflight(client, "/predict", origin=OTHER).status_code == 400
    assert ALLOWED not in preflight(client, "/predict", origin=OTHER).headers
    answered = client.get("/tasks", headers={"Origin": OTHER, **sends("a")})
    assert ALLOWED not in answered.headers


def test_only_sites_that_are_listed_by_name_change_tasks(world, client, fresh):
    world.store.publish(fresh, world.bundle(71))
    url = f"/tasks/{fresh}"
    refused = client.delete(url, headers={"Origin": OTHER, **sends("a")})
    assert_problem(refused, 403, "cross-origin")
    with TestClient(world.app(cors_origins=("*",))) as everybody:
        refused = everybody.delete(url, headers={"Origin": OTHER})
        assert_problem(refused, 403, "cross-origin")
        assert refused.headers[ALLOWED] == "*"
        assert everybody.delete(url, headers={"Origin": "*"}).status_code == 403
    assert client.delete(url, headers={"Origin": APP, **sends("a")}).status_code == 200


def test_without_the_setting_there_is_no_header(world):
    with TestClient(world.app()) as client:
        assert ALLOWED not in client.get("/tasks", headers={"Origin": APP}).headers
        assert preflight(client, "/tasks").status_code == 405


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://App.example", "https://a b", "null"]
)
def test_what_no_browser_sends_is_not_an_origin(origin):
    with pytest.raises(SettingsError, match=r"ENGRAM_CORS_ORIGINS: .* is not an origin"):
        load_settings(cors_origins=origin)


def test_every_origin_requires_keys():
    with pytest.raises(SettingsError, match="ors_origins is '\\*' and no key is set"):
        load_settings(cors_origins="*")
    assert load_settings(cors_origins="*", api_key="secret-key").cors_origins == ("*",)
    several = load_settings(cors_origins="http://localhost:5173, https://[::1]:8443")
    assert several.cors_origins == ("http://localhost:5173", "https://[::1]:8443")
