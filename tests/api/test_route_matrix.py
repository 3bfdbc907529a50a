"""Every route requires the scopes that the documentation lists."""

import re

import pytest
from engram_server.access.identity import SCOPES
from engram_server.api.auth import check_routes, required_by
from engram_server.errors import EngramError
from fastapi import APIRouter
from starlette.testclient import TestClient

from tests.api.keys import FUTURE, PAST, make_key, sends, write_keys
from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "reference" / "http-api-access.md"
TASK, EVERY = "team-a/none-such", {scope: ["*"] for scope in SCOPES}
FILLED = {
    "{task}": TASK,
    "{name}": TASK,
    "{version}": "1",
    "{label}": "canary",
    "{file}": "swagger-ui.css",
    "{path}": "app.js",
}
TEAM_A, TEAM_B = ({scope: [f"{team}/*"] for scope in SCOPES} for team in ("team-a", "team-b"))
KEYS = (
    make_key("all", scopes=EVERY, expires=FUTURE),
    make_key("expired", scopes=EVERY, expires=PAST),
    make_key("revoked", scopes=EVERY, revoked=PAST),
    make_key("team-a", scopes=TEAM_A),
    make_key("team-b", scopes=TEAM_B),
    *(make_key(scope, scopes={scope: ["*"]}) for scope in SCOPES),
    *(make_key(f"{scope}-b", scopes={scope: ["team-b/*"]}) for scope in SCOPES),
)


def documented() -> dict[tuple[str, str], str]:
    """What each method of each path requires, as the page says it."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Who may do what\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+`) \| (.+?) \|$", section, re.M)
    return {
        (method, path): scopes.replace("`", "")
        for requests, scopes in rows
        for methods, path in re.findall(r"`([A-Z, ]+) (/\S*)`", requests)
        for method in methods.split(", ")
    }


@pytest.fixture(scope="module")
def app(world, tmp_path_factory):
    file = write_keys(tmp_path_factory.mktemp("keys") / "keys.json", *KEYS)
    return world.app(keys_file=str(file))


@pytest.fixture(scope="module")
def client(app):
    with TestClient(app) as client:
        yield client


def test_the_page_lists_every_route_with_what_it_requires(app):
    declared = {
        (method, route.path_format): required_by(route)[0].text
        for route in app.state.routes
        for method in route.methods
    }
    assert documented() == declared


def request_status(client, method, path, key):
    for pattern, value in FILLED.items():
        path = path.replace(pattern, value)
    if path == "/predict":
        path += f"?tasks={TASK}"
    headers = {} if key is None else {"X-API-Key": "wrong"} if key == "wrong" else sends(key)
    content = None if method in ("GET", "DELETE") else b"x"
    return client.request(method, path, headers=headers, content=content).status_code


@pytest.mark.parametrize(("method", "path"), documented())
def test_each_route_accepts_the_scopes_it_requires(client, method, path):
    requires = documented()[method, path]
    about_a_task = "{task}" in path or "{name}" in path or path == "/predict"
    expected = dict.fromkeys((None, "wrong", "expired", "revoked"), 401)
    for scope in SCOPES:
        suffices = requires == "any" or scope in requires.split(" or ")
        expected[scope] = None if suffices else 403
        expected[f"{scope}-b"] = None if suffices and not about_a_task else 403
    expected |= {"all": None, "team-a": None, "team-b": 403 if about_a_task else None}
    if requires == "public":
        expected = dict.fromkeys(expected)
    for key, status in expected.items():
        answered = request_status(client, method, path, key)
        if status is None:
            assert answered < 500, (key, answered)
            assert answered not in (401, 403, 421), (key, answered)
        else:
            assert answered == status, key


def test_a_route_that_declares_nothing_stops_the_application():
    router = APIRouter()

    @router.get("/secrets")
    async def secrets() -> None: ...

    with pytest.raises(EngramError, match="/secrets does not declare"):
        check_routes(router.routes)
