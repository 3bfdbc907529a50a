"""The few operations that the store is built on, on every backend."""

from tests.task_store.conftest import listing


def test_listing_begins_after_a_name(store):
    for path in ("log/1", "log/2", "log/3", "other/4"):
        store.objects.put(path, b"x")
    names = {
        after: [info.path for info in store.objects.listing("log", after=after)]
        for after in (None, "log/0", "log/2", "log/25", "log/3")
    }
    assert names == {
        None: ["log/1", "log/2", "log/3"],
        "log/0": ["log/1", "log/2", "log/3"],
        "log/2": ["log/3"],
        "log/25": ["log/3"],
        "log/3": [],
    }


def test_deleting_a_missing_object_succeeds(store):
    store.objects.put("a", b"x")
    store.objects.delete("a")
    store.objects.delete("a")
    assert listing(store) == {}
