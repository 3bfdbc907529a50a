"""`GET /tasks` with many tasks: pages, search, teams, order and retired tasks."""

from dataclasses import replace

import pytest
from engram_server.access.identity import LOCAL, Identity
from engram_server.api.routes.task_list import TaskQuery, list_page
from engram_server.engine.tasks.snapshot import Snapshot
from engram_store import Catalog, Publish, Retire, open_store
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.api.keys import make_key, sends, write_keys
from tests.bundles import bundle

NAMES = ("cats", "dogs", "birds/owls", "birds/ducks", "fish/koi")


@pytest.fixture(scope="module")
def store():
    """A store whose tasks were created in the order of NAMES."""
    store = open_store("memory://")
    for seed, name in enumerate(NAMES):
        store.publish(name, bundle(seed, description=f"Which of the {name.upper()}?"))
    return store


def listing(catalog: Catalog, identity: Identity = LOCAL, **query):
    class NothingLoaded(dict):
        def __missing__(self, digest):
            return type("Slot", (), {"ready": True, "loaded": None})

    snapshot = Snapshot(catalog, NothingLoaded(), None, ready_names=(), eager={})
    return list_page(snapshot, "tiny", identity, TaskQuery(**query))


def names(page):
    return [task.task for task in page.tasks]


def walk(catalog, **query):
    """The names on all pages, and the number of pages."""
    found, pages, cursor = [], 0, None
    while True:
        page = listing(catalog, cursor=cursor, **query)
        found, pages, cursor = found + names(page), pages + 1, page.next
        if cursor is None:
            return found, pages


@pytest.mark.parametrize(("limit", "pages"), [(1, 5), (2, 3), (5, 1), (1000, 1)])
def test_pages_have_every_task_once(store, limit, pages):
    assert walk(store.catalog(), limit=limit) == (sorted(NAMES), pages)
    assert walk(store.catalog(), limit=limit, sort="newest") == (list(NAMES[::-1]), pages)


@pytest.mark.parametrize("sort", ["name", "newest"])
def test_tasks_that_come_and_go_between_pages_shift_nothing(sort):
    store = open_store("memory://")
    for seed, name in enumerate("bdfhj"):
        store.publish(name, bundle(seed))
    first = listing(store.catalog(), limit=2, sort=sort)
    store.commit(Retire(first.tasks[-1].task))
    for seed, name in enumerate("aceg"):
        store.publish(name, bundle(seed + 10))
    rest, _ = walk_from(store.catalog(), first.next, limit=2, sort=sort)
    assert set("bdfhj") <= {*names(first), *rest}
    assert len(rest) == len(set(rest))
    assert not set(names(first)) & set(rest)


def walk_from(catalog, cursor, **query):
    found = []
    while cursor is not None:
        page = listing(catalog, cursor=cursor, **query)
        found, cursor = found + names(page), page.next
    return found, cursor


def test_search_looks_at_names_and_descriptions_in_any_case(store):
    assert names(listing(store.catalog(), q="OWL")) == ["birds/owls"]
    assert names(listing(store.catalog(), q="which of the cat")) == ["cats"]
    page = listing(store.catalog(), q="s?", limit=1)
    assert (names(page), page.total) == (["birds/ducks"], 4)
    assert listing(store.catalog(), q="nothing").total == 0


def test_team_is_the_part_before_the_slash(store):
    page = listing(store.catalog(), team="birds")
    assert (names(page), page.total) == (["birds/ducks", "birds/owls"], 2)
    assert page.teams == ["birds", "fish"]
    assert names(listing(store.catalog(), team="bird")) == []


def test_a_page_has_only_tasks_and_teams_that_the_caller_may_read(store):
    some = Identity("key:1", "some", {"read": ("fish/*", "dogs")})
    page = listing(store.catalog(), some, limit=1)
    assert (names(page), page.total, page.teams) == (["dogs"], 2, ["fish"])


def test_retired_tasks_have_the_version_that_restore_brings_back(store):
    catalog = store.catalog()
    assert listing(catalog, retired=True).tasks == []
    store.publish("old", bundle(50, description="First"))
    store.publish("old", bundle(51, description="Second"))
    store.publish("old", bundle(52, description="Third"), aliases=["canary"])
    store.commit(Retire("old", 1))
    retired = store.commit(Retire("old")).catalog
    (task,) = listing(retired, retired=True).tasks
    assert (task.task, task.status, task.description) == ("old", "retired", "Second")
    assert (task.version, task.versions, task.aliases) == (2, [2, 3], {})
    assert "old" not in names(listing(retired))


def test_ten_thousand_tasks_are_listed_in_pages_of_a_thousand():
    one = open_store("memory://").commit(Publish("t", bundle(1))).catalog.tasks["t"]
    many = {f"team{i % 7}/task{i:05d}": one for i in range(10_000)}
    tasks = {name: replace(one, name=name) for name in many}
    catalog = replace(Catalog(), all_tasks=tasks)
    found, pages = walk(catalog)
    assert (found, pages) == (sorted(tasks), 10)


# --- over HTTP ------------------------------------------------------------------------------------


def test_query_is_read_and_its_limits_hold(client):
    page = client.get("/tasks?limit=2&q=e").json()
    assert len(page["tasks"]) == 2
    assert page["next"] == page["tasks"][-1]["task"]
    rest = client.get(f"/tasks?limit=2&q=e&cursor={page['next']}").json()
    assert rest["tasks"][0]["task"] > page["next"]
    for query in ("limit=0", "limit=1001", "sort=size", "retired=maybe", f"q={'x' * 300}"):
        assert_problem(client.get(f"/tasks?{query}"), 422, "invalid-request")
    wrong = assert_problem(client.get("/tasks?sort=newest&cursor=pets"), 422, "invalid-request")
    assert "'pets' is not a cursor" in wrong["detail"]


def test_base_is_first_by_name_and_last_by_age(client):
    everything = client.get("/tasks").json()["tasks"]
    assert everything[0]["task"] == "base"
    assert client.get("/tasks?sort=newest").json()["tasks"][-1]["task"] == "base"
    assert client.get("/tasks?cursor=base").json()["tasks"] == everything[1:]


def test_rollback_target_is_where_a_rollback_goes(client, world, fresh):
    for seed, target in ((300, None), (301, 1)):
        client.put(f"/tasks/{fresh}", content=world.bundle(seed).to_bytes())
        assert client.get(f"/tasks/{fresh}").json()["rollback_target"] == target
    assert client.post(f"/tasks/{fresh}/rollback").json()["aliases"] == {"default": 1}
    assert client.get(f"/tasks/{fresh}").json()["rollback_target"] is None
    assert client.get("/tasks/base").json()["rollback_target"] is None


def test_a_retired_task_can_be_told_from_an_unknown_one(client, world, fresh, tmp_path):
    client.put(f"/tasks/{fresh}", content=world.bundle(302).to_bytes())
    client.delete(f"/tasks/{fresh}")
    for path in ("", "/versions", "/versions/1", "/versions/1/bundle"):
        document = assert_problem(client.get(f"/tasks/{fresh}{path}"), 404, "retired-task")
        assert document["names"] == [fresh]
    assert_problem(client.get("/tasks/no-such-task"), 404, "unknown-task")
    file = write_keys(tmp_path / "keys.json", make_key("own", scopes={"read": [fresh]}))
    with TestClient(world.app(keys_file=str(file))) as narrow:
        response = narrow.get(f"/tasks/{fresh}", headers=sends("own"))
        assert "suggestions" not in assert_problem(response, 404, "retired-task")
    listed = client.get(f"/tasks?retired=true&q={fresh}").json()["tasks"]
    assert [(task["task"], task["status"], task["version"]) for task in listed] == [
        (fresh, "retired", 1)
    ]
