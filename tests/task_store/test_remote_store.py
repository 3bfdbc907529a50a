"""Buckets: settings, outages, and answers that get lost."""

import base64
import json
from pathlib import Path

import obstore
import pytest
from engram_bundle import UnreadableBundle
from engram_store import StoreUnavailable, TaskStore, open_store
from engram_store.objects import Objects
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import from_url

from tests.bundles import bundle
from tests.task_store.conftest import NO_RETRIES, listing

DOCS = Path(__file__).resolve().parents[2] / "docs"
CLOSED = "http://127.0.0.1:9"  # a closed port


def test_settings_can_be_passed_in_code(remote, monkeypatch):
    config = {}
    for name, value in remote.environment.items():
        monkeypatch.delenv(name)
        if not name.endswith("ALLOW_HTTP"):
            config[name.lower()] = value
    options = {"config": config, "client_options": {"allow_http": True}, **NO_RETRIES}
    open_store(f"{remote.bucket}/in-code", **options).publish("t", bundle(1))
    assert open_store(f"{remote.bucket}/in-code", **options).catalog().names == ("t",)


@pytest.mark.parametrize("page", ["store-backends.md", "configuration.md"])
def test_every_variable_is_documented(remote, page):
    text = (DOCS / "reference" / page).read_text(encoding="utf-8")
    assert [name for name in remote.environment if f"`{name}" not in text] == []


def error_when_opening(location, **options) -> str:
    with pytest.raises(StoreUnavailable) as error:
        open_store(location, **(NO_RETRIES | options))
    message = str(error.value)
    assert message.startswith(f"The task store {location} ")
    assert message.endswith(".")
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_missing_bucket_is_reported_when_opening(remote):
    scheme = remote.bucket.partition("://")[0]
    message = error_when_opening(f"{scheme}://nowhere/x")
    assert "could not list 'checkpoints': The specified " in message
    assert " does not exist (404 Not Found, " in message


def test_missing_bucket_is_reported_when_writing(remote):
    """It may go while the store is open."""
    scheme = remote.bucket.partition("://")[0]
    objects = Objects(from_url(f"{scheme}://nowhere"), f"{scheme}://nowhere")
    for write in (objects.create, objects.put):
        with pytest.raises(StoreUnavailable, match=r"could not write 'a': .* does not exist \(404"):
            write("a", b"1")


def test_wrong_key_is_reported(azure, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"wrong").decode())
    message = error_when_opening(f"{azure.bucket}/x")
    assert "403 Forbidden, " in message
    assert message.endswith(": check the credentials and their permissions.")


def test_plain_http_has_to_be_allowed(remote, monkeypatch):
    (allow,) = (name for name in remote.environment if name.endswith("ALLOW_HTTP"))
    monkeypatch.delenv(allow)
    message = error_when_opening(f"{remote.bucket}/x")
    assert "plain http is not allowed" in message
    assert allow in message


@pytest.mark.parametrize(
    ("location", "config"),
    [
        ("s3://tasks/x", {"endpoint": CLOSED, "access_key_id": "a", "secret_access_key": "b"}),
        ("az://tasks/x", {"endpoint": CLOSED, "account_name": "a", "account_key": "YQ=="}),
        (
            "gs://tasks/x",
            {
                "service_account_key": json.dumps(
                    {
                        "gcs_base_url": CLOSED,
                        "disable_oauth": True,
                        "client_email": "",
                        "private_key": "",
                        "private_key_id": "",
                    }
                )
            },
        ),
    ],
)
def test_outage_is_one_sentence_and_never_a_raw_error(location, config):
    message = error_when_opening(location, config=config, client_options={"allow_http": True})
    assert "could not list 'checkpoints'" in message
    assert CLOSED in message


@pytest.mark.parametrize(
    ("location", "options", "says"),
    [
        ("ftp://host/x", {}, "Unknown scheme 'ftp://'"),
        ("file://relative/x", {}, "not an absolute file URL"),
        ("s3://tasks", {"config": {"bogus": "1"}}, "cannot be opened.*bogus"),
        ("az://container/x", {}, "cannot be opened.*[Aa]ccount"),
        (
            "az://container/x",
            {"config": {"account_name": "a", "account_key": "no base64"}},
            "cannot be opened.*Invalid Access Key",
        ),
        (
            "gs://bucket/x",
            {"config": {"service_account": "missing/key.json"}},
            "cannot be opened.*missing/key.json",
        ),
    ],
)
def test_unusable_locations_are_reported(location, options, says, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreUnavailable, match=says):
        open_store(location, **options)


def test_memory_stores_opened_twice_are_distinct():
    one, two = open_store("memory://"), open_store("memory://")
    one.publish("t", bundle(1))
    assert two.catalog().names == ()
    assert one.url == "memory://"


class Flaky(Objects):
    """Another store's objects with a fault put in."""

    def __init__(self, objects: Objects):
        super().__init__(objects.backend, objects.url, remote=objects.remote)
        self.fault = ""
        self.creations = 0

    def create(self, path, data):
        self.creations += 1
        if self.fault == "answer lost, tried again":
            super().create(path, data)
        if self.fault == "condition ignored":
            self.put(path, data)
            return True
        if self.fault == "down":
            raise StoreUnavailable("The bucket is down.")
        return super().create(path, data)


@pytest.fixture
def flaky(reopen) -> Flaky:
    return Flaky(reopen().objects)


def test_own_entry_found_in_the_way_counts_as_written(flaky):
    store = TaskStore(flaky)
    store.publish("t", bundle(1))
    flaky.fault = "answer lost, tried again"
    assert store.publish("t", bundle(2)).generation == 2
    assert store.catalog().generation == 2
    assert [v.version for v in store.catalog().task("t").live] == [1, 2]


def test_failed_append_leaves_the_catalog_and_may_be_repeated(flaky):
    store = TaskStore(flaky)
    flaky.fault = "down"
    with pytest.raises(StoreUnavailable):
        store.publish("t", bundle(1))
    assert store.catalog().names == ()
    flaky.fault = ""
    assert store.publish("t", bundle(1)).version == 1


def test_bucket_that_ignores_conditions_is_refused(open_remote):
    objects = Flaky(open_remote().objects)
    TaskStore(objects).publish("t", bundle(1))
    objects.fault = "condition ignored"
    before = {path for path in listing(open_remote()) if path.startswith("log/")}
    with pytest.raises(StoreUnavailable, match="replaces objects that should only be created"):
        TaskStore(objects).publish("t", bundle(2))
    assert {path for path in listing(open_remote()) if path.startswith("log/")} == before
    assert open_remote().catalog().resolve("t").version == 1


def test_conditions_are_checked_once(open_remote):
    objects = Flaky(open_remote().objects)
    store = TaskStore(objects)
    for seed in range(3):
        store.publish("t", bundle(seed))
    assert objects.creations == 4


@pytest.mark.parametrize("error", [AlreadyExistsError, PreconditionError])
def test_either_refusal_of_a_creation_means_that_something_is_there(error, monkeypatch):
    def refused(*args, **options):
        raise error("no")

    objects = open_store("memory://").objects
    monkeypatch.setattr(obstore, "put", refused)
    assert objects.create("a", b"1") is False


def test_failed_checkpoint_does_not_fail_the_publish(reopen, monkeypatch):
    store = reopen(checkpoint_every=1)
    put = store.objects.put

    def no_checkpoints(path, data):
        if path.startswith("checkpoints/"):
            raise StoreUnavailable("The bucket is full.")
        put(path, data)

    monkeypatch.setattr(store.objects, "put", no_checkpoints)
    assert store.publish("t", bundle(1)).version == 1
    assert "not written" in store.find_damage()[0].reason


def test_missing_bundle_file_is_reported_before_anything_is_written(store, tmp_path):
    with pytest.raises(UnreadableBundle):
        store.publish("t", tmp_path / "missing.safetensors")
    assert listing(store) == {}
