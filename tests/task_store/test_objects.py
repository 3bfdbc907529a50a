"""The few operations that the store is built on, on every backend."""

from tests.task_store.conftest import listing


def test_listing_begins_after_the_name_given(store):
    for path in ("log/1", "log/2", "log/3", "other/4"):
        store._objects.put(path, b"x")
    names = {
        after: [info.path for info in store._objects.listing("log", after=after)]
        for after in (None, "log/0", "log/2", "log/25", "log/3")
    }
    assert names == {
        None: ["log/1", "log/2", "log/3"],
        "log/0": ["log/1", "log/2", "log/3"],
        "log/2": ["log/3"],
        "log/25": ["log/3"],
        "log/3": [],
    }


def test_deleting_what_is_not_there_is_fine(store):
    store._objects.put("a", b"x")
    store._objects.delete("a")
    store._objects.delete("a")
    assert listing(store) == {}
