"""Teaching in parts: any replica takes any part, and all are published as one version."""

import dataclasses

import pytest
from engram_server.app import build_metrics, engine_config
from engram_server.engine.engine import Engine
from engram_server.model.masked_pass import masked_pass
from engram_store.layout import DRAFTS
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.api.keys import make_key, sends, write_keys
from tests.api.test_examples import FOUR, listed, taught
from tests.serving import photo

ID = "5" * 32
MORE = [("rust", photo(5)), ("clean", photo(6)), ("moss", photo(7))]


@pytest.fixture(autouse=True)
def _no_drafts_left(world):
    yield
    for info in world.store.objects.named(DRAFTS).values():
        world.store.objects.delete(info.path)


def part(client, name, *photos, upload=ID, **headers):
    files = [(label, (f"{n}.png", data)) for n, (label, data) in enumerate(photos)]
    return client.post(f"/tasks/{name}/examples?upload={upload}", files=files, headers=headers)


def publish(client, name, query="", upload=ID, **headers):
    path = f"/tasks/{name}/examples?upload={upload}&publish=true{query}"
    return client.post(path, headers=headers)


def drafts(world):
    return [name for name in world.store.objects.named(DRAFTS) if not name.endswith("published")]


def test_parts_become_one_version_and_leave_nothing_behind(client, world, fresh):
    kept = part(client, fresh, *FOUR)
    assert kept.status_code == 202, kept.text
    assert kept.json() == {
        "task": fresh, "upload": ID, "parts": 1, "examples": 4, "unreadable": [],
    }  # fmt: skip
    assert part(client, fresh, *MORE).json()["parts"] == 2
    assert client.get(f"/tasks/{fresh}").status_code == 404, "not before it is published"
    result = taught(publish(client, fresh, "&description=Rust"))
    assert (result.version, result.examples, result.added) == (1, 7, 7)
    assert len(client.get(f"/tasks/{fresh}/history").json()["entries"]) == 1
    assert all(each.name for each in listed(client, fresh).examples)
    assert drafts(world) == []


def test_the_bytes_are_those_of_one_request(client, fresh):
    part(client, fresh, *FOUR[:3])
    files = [("clean", ("3.png", FOUR[3][1]))]
    last = client.post(f"/tasks/{fresh}/examples?upload={ID}&publish=true", files=files)
    apart = taught(last)
    assert client.delete(f"/tasks/{fresh}?purge=true").status_code == 200
    files = [(label, (f"{n}.png", data)) for n, (label, data) in enumerate(FOUR)]
    together = taught(client.post(f"/tasks/{fresh}/examples", files=files))
    assert apart.digest == together.digest


def test_roll_back_returns_to_what_was_there_before(client, fresh):
    part(client, fresh, *FOUR)
    taught(publish(client, fresh))
    for photos in (MORE[:1], MORE[1:]):
        part(client, fresh, *photos, upload="6" * 32)
    assert taught(publish(client, fresh, upload="6" * 32)).version == 2
    assert client.post(f"/tasks/{fresh}/rollback").json()["aliases"] == {"default": 1}
    assert listed(client, fresh).total == 4


def test_a_repeated_part_and_a_repeated_publish_change_nothing(client, world, fresh):
    for _ in range(2):
        assert part(client, fresh, *FOUR).json()["parts"] == 1
    first = taught(publish(client, fresh))
    again = taught(publish(client, fresh), created=False)
    assert (again.version, again.digest, again.examples) == (1, first.digest, 4)
    assert drafts(world) == []


def test_an_aborted_upload_publishes_nothing(client, world, fresh):
    part(client, fresh, *FOUR)
    assert client.delete(f"/tasks/{fresh}/examples?upload={ID}").status_code == 204
    assert drafts(world) == []
    assert_problem(publish(client, fresh), 404, "unknown-upload")
    assert_problem(client.delete(f"/tasks/{fresh}/examples?upload={ID}"), 404, "unknown-upload")


def test_unreadable_photos_of_parts_are_listed_and_left_out(client, fresh):
    bad = part(client, fresh, *FOUR[:3], ("rust", b"not a picture")).json()
    assert bad["examples"] == 3
    assert [(each["index"], each["name"]) for each in bad["unreadable"]] == [(3, "3.png")]
    assert part(client, fresh, ("rust", b"neither")).json()["examples"] == 0
    assert taught(publish(client, fresh)).examples == 3


def test_other_callers_can_neither_continue_nor_publish_nor_abort_it(world, fresh, tmp_path):
    scopes = {"publish": ["*"], "read": ["*"]}
    keys = [make_key(name, scopes=scopes) for name in ("ada", "bob")]
    path = write_keys(tmp_path / "keys.json", *keys)
    with TestClient(world.app(keys_file=str(path))) as client:
        ada, bob = sends("ada"), sends("bob")
        part(client, fresh, *FOUR, **ada)
        assert_problem(publish(client, fresh, **bob), 404, "unknown-upload")
        assert part(client, fresh, *MORE, **bob).json()["parts"] == 1, "another upload"
        abort = client.delete(f"/tasks/{fresh}/examples?upload={ID}", headers=bob)
        assert abort.status_code == 204
        assert taught(publish(client, fresh, **ada)).examples == 4


def test_a_purge_of_the_task_deletes_open_uploads(client, world, fresh):
    part(client, fresh, *FOUR)
    taught(publish(client, fresh))
    part(client, fresh, *MORE, upload="6" * 32)
    assert client.delete(f"/tasks/{fresh}?purge=true").status_code == 200
    assert list(world.store.objects.named(DRAFTS)) == []
    assert_problem(publish(client, fresh, upload="6" * 32), 404, "unknown-upload")


def test_what_cannot_be_published_is_rejected_with_the_first_part(client, fresh):
    assert_problem(part(client, "pets", *FOUR), 409, "not-taught")
    assert_problem(part(client, fresh, *FOUR, **{"If-Match": '"x"'}), 412, "precondition-failed")
    assert_problem(part(client, "pets", *FOUR, **{"If-None-Match": "*"}), 412, "already-exists")


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("upload=12", "upload"),
        (f"upload={ID.replace('5', 'A')}", "upload"),
        ("publish=true", "needs the id of an upload"),
        (f"upload={ID}&task_type=multi_label", "examples only"),
    ],
)
def test_uploads_that_are_not_valid_are_rejected(client, fresh, query, says):
    files = [("rust", ("a.png", photo(1)))]
    response = client.post(f"/tasks/{fresh}/examples?{query}", files=files)
    assert says in assert_problem(response, 422, "invalid-request")["detail"]


def test_digests_and_an_upload_exclude_each_other(client, fresh):
    digest = "sha256:" + "0" * 64
    path = f"/tasks/{fresh}/examples?upload={ID}&digest={digest}"
    assert_problem(client.delete(path), 422, "invalid-request")


@pytest.fixture
def replicas(world):
    """Two further servers on the same store."""
    engines = []
    for _ in range(2):
        metrics = build_metrics(world.settings)
        config = dataclasses.replace(engine_config(world.settings), heartbeat_seconds=None)
        engine = Engine(world.backbone, world.store, config, metrics, run_pass=masked_pass)
        engine.start()
        engines.append((engine, metrics))
    yield [dataclasses.replace(world, engine=engine, metrics=m) for engine, m in engines]
    for engine, _ in engines:
        engine.stop()


def test_parts_go_to_several_servers_and_a_third_publishes(client, replicas, fresh):
    first, second = (TestClient(each.app()) for each in replicas)
    with first, second:
        assert part(first, fresh, *FOUR[:2]).json()["parts"] == 1
        assert part(second, fresh, *FOUR[2:]).json()["parts"] == 2
        result = taught(publish(client, fresh))
        assert (result.version, result.examples) == (1, 4)
        assert taught(publish(first, fresh), created=False).version == 1
