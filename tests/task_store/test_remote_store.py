"""Buckets: settings, outages, and answers that get lost."""

import pytest

from task_store import StoreUnavailable, TaskStore, UnreadableBundle, open_store
from task_store.objects import Objects
from tests.task_store.bundles import bundle
from tests.task_store.conftest import listing


def test_settings_may_come_from_the_environment(s3_endpoint, monkeypatch):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    store = open_store("s3://tasks/from-environment")
    store.publish("t", bundle(1))
    assert open_store("s3://tasks/from-environment").catalog().names == ("t",)


def test_missing_bucket_is_said_when_opening(s3_options):
    with pytest.raises(StoreUnavailable, match="s3://nowhere/x could not list") as error:
        open_store("s3://nowhere/x", **s3_options)
    assert "\n" not in str(error.value)


def test_outage_is_one_sentence_and_never_a_raw_error(s3_options):
    gone = {**s3_options, "config": {**s3_options["config"], "endpoint": "http://127.0.0.1:9"}}
    with pytest.raises(StoreUnavailable) as error:
        open_store("s3://tasks/x", **gone)
    message = str(error.value)
    assert message.startswith("The task store s3://tasks/x could not list 'checkpoints'")
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("location", "options", "says"),
    [
        ("ftp://host/x", {}, "'ftp://' is no kind of task store"),
        ("file://relative/x", {}, "no absolute file URL"),
        ("s3://tasks", {"config": {"bogus": "1"}}, "cannot be opened.*bogus"),
        ("az://container/x", {}, "cannot be opened.*[Aa]ccount"),
    ],
)
def test_unusable_locations_are_said(location, options, says, monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
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
        super().__init__(objects._store, objects.url, remote=objects.remote)
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
    return Flaky(reopen()._objects)


def test_own_entry_found_in_the_way_counts_as_written(flaky):
    store = TaskStore(flaky)
    store.publish("t", bundle(1))
    flaky.fault = "answer lost, tried again"
    assert store.publish("t", bundle(2), expected_generation=1).generation == 2
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


def test_bucket_that_ignores_conditions_is_refused(open_s3):
    objects = Flaky(open_s3()._objects)
    TaskStore(objects).publish("t", bundle(1))
    objects.fault = "condition ignored"
    before = {path for path in listing(open_s3()) if path.startswith("log/")}
    with pytest.raises(StoreUnavailable, match="ignores 'If-None-Match"):
        TaskStore(objects).publish("t", bundle(2))
    assert {path for path in listing(open_s3()) if path.startswith("log/")} == before
    assert open_s3().catalog().resolve("t").version == 1


def test_conditions_are_checked_once(open_s3):
    objects = Flaky(open_s3()._objects)
    store = TaskStore(objects)
    for seed in range(3):
        store.publish("t", bundle(seed))
    assert objects.creations == 4


def test_failed_checkpoint_does_not_fail_the_publish(reopen, monkeypatch):
    store = reopen(checkpoint_every=1)
    put = store._objects.put

    def no_checkpoints(path, data):
        if path.startswith("checkpoints/"):
            raise StoreUnavailable("The bucket is full.")
        put(path, data)

    monkeypatch.setattr(store._objects, "put", no_checkpoints)
    assert store.publish("t", bundle(1)).version == 1
    assert "not written" in store.problems()[0].reason


def test_missing_bundle_file_is_said_before_anything_is_written(store, tmp_path):
    with pytest.raises(UnreadableBundle):
        store.publish("t", tmp_path / "missing.safetensors")
    assert listing(store) == {}
