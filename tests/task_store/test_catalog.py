"""The catalog is the replay of the log: checked by random histories, without any store."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from task_store import (
    Conflict,
    NotFound,
    StoreError,
    UnsupportedFormat,
    open_store,
)
from task_store.catalog import (
    MAX_UNDO,
    Catalog,
    NewVersion,
    dump_checkpoint,
    load_checkpoint,
    plan_label,
    plan_publish,
    plan_remove_label,
    plan_restore,
    plan_retire,
    plan_rollback,
)
from task_store.events import Change, Entry, Label, Publish, Restore, Retire, Stamp
from tests.bundles import FINGERPRINT, bundle

TASKS = st.sampled_from(["a", "team/b"])
LABELS = st.sampled_from(["default", "canary", "stable"])
VERSIONS = st.integers(1, 4)


def digest(number: int) -> str:
    return f"sha256:{number:064x}"


def entry(generation: int, change: Change) -> Entry:
    stamp = Stamp(
        generation=generation,
        id=f"{generation:032x}",
        time="2025-01-31T12:00:00.000Z",
        actor="ada@lab",
    )
    return Entry(stamp=stamp, change=change)


def new_version(number: int, extends: tuple[str, ...] = ()) -> NewVersion:
    return NewVersion(
        digest=digest(number),
        size=100,
        extends=extends,
        problem="single_label",
        classes=3,
        memory_tokens=2,
        description="",
        backbone="tiny",
        fingerprint=FINGERPRINT,
    )


def publish(task: str, version: int, **changes) -> Publish:
    values = {
        "task": task,
        "version": version,
        "digest": digest(version),
        "size": 100,
        "labels": ("default",),
        "problem": "single_label",
        "classes": 3,
        "backbone": "tiny",
        "fingerprint": FINGERPRINT,
    }
    return Publish(**(values | changes))


class Histories(RuleBasedStateMachine):
    """Random requests, each decided by a plan and folded in, as the store does it."""

    def __init__(self):
        super().__init__()
        self.catalog = Catalog()
        self.log: list[Entry] = []
        self.numbers: dict[str, list[int]] = {}

    def ask(self, plan, *arguments, **options):
        before = self.catalog
        try:
            change = plan(self.catalog, *arguments, **options)
        except (Conflict, NotFound):
            return None
        if change is None:
            return None
        made = entry(self.catalog.generation + 1, change)
        self.catalog, problems = self.catalog.apply([made])
        assert problems == [], "a plan never makes an entry that replay passes over"
        assert before.generation == made.generation - 1, "the old snapshot did not move"
        self.log.append(made)
        if isinstance(change, Publish):
            self.numbers.setdefault(change.task, []).append(change.version)
        return change

    @rule(
        task=TASKS,
        again=st.none() | st.integers(0, 8),
        labels=st.lists(LABELS, unique=True),
        parents=st.lists(st.integers(0, 8), max_size=2, unique=True) | st.just([]),
        absent=st.sampled_from([False, False, False, True]),
    )
    def publish(self, task, again, labels, parents, absent):
        # New bytes, or some seen before; and a bundle can only name bundles made before it.
        number = len(self.log) if again is None else again
        known = list(self.catalog.by_digest)
        extends = tuple(dict.fromkeys(known[p % len(known)] for p in parents if known))
        new = new_version(number, tuple(d for d in extends if d < digest(number)))
        self.ask(plan_publish, task, new, tuple(labels), only_if_absent=absent)

    @rule(task=TASKS, label=LABELS, version=VERSIONS)
    def label(self, task, label, version):
        before = self.catalog
        change = self.ask(plan_label, task, label, version)
        if change is not None and label in before.task(task).labels:
            undone = plan_rollback(self.catalog, task, label)
            assert undone.version == before.task(task).labels[label], "rollback undoes label"
            after, _ = self.catalog.apply([entry(self.catalog.generation + 1, undone)])
            assert after.task(task).labels == before.task(task).labels
            expected = before.task(task).undo.get(label, ())
            assert after.task(task).undo.get(label, ()) == expected[-(MAX_UNDO - 1) :]

    @rule(task=TASKS, label=LABELS)
    def remove_label(self, task, label):
        self.ask(plan_remove_label, task, label)

    @rule(task=TASKS, label=LABELS)
    def rollback(self, task, label):
        self.ask(plan_rollback, task, label)

    @rule(task=TASKS, version=st.none() | VERSIONS)
    def retire(self, task, version):
        self.ask(plan_retire, task, version)

    @rule(task=TASKS, version=st.none() | VERSIONS)
    def restore(self, task, version):
        self.ask(plan_restore, task, version)

    @rule(task=TASKS, label=LABELS)
    def rollback_walks_back_through_the_moves(self, task, label):
        """Move a label through all live versions, then undo every move."""
        if task not in self.catalog.tasks or label not in self.catalog.task(task).labels:
            return
        start = self.catalog.task(task)
        passed = [start.labels[label]]
        passed += [
            version.version
            for version in start.live
            if self.ask(plan_label, task, label, version.version) is not None
        ]
        for expected in reversed(passed[:-1]):
            assert self.ask(plan_rollback, task, label).version == expected
        assert self.catalog.task(task).labels == start.labels
        assert self.catalog.task(task).undo == start.undo

    @invariant()
    def versions_are_never_reused(self):
        for numbers in self.numbers.values():
            assert numbers == list(range(1, len(numbers) + 1))

    @invariant()
    def labels_point_to_live_versions_and_default_exists(self):
        for task in self.catalog.tasks.values():
            assert "default" in task.labels
            assert all(not task.versions[v].retired for v in task.labels.values())

    @invariant()
    def live_versions_have_live_parents(self):
        for task in self.catalog.tasks.values():
            for version in task.live:
                for parent in version.extends:
                    assert any(not v.retired for v in self.catalog.by_digest[parent])

    @invariant()
    def replay_of_any_prefix_and_checkpoint_is_the_replay_of_all(self):
        assert Catalog().apply(self.log) == (self.catalog, [])
        middle = len(self.log) // 2
        prefix, _ = Catalog().apply(self.log[:middle])
        reread = load_checkpoint(dump_checkpoint(prefix), prefix.generation)
        assert reread == prefix
        assert reread.apply(self.log[middle:]) == (self.catalog, [])

    @invariant()
    def entries_survive_their_json(self):
        if self.log:
            last = self.log[-1]
            assert Entry.from_json(last.to_json(), last.generation) == last


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


ANY_CHANGE = st.one_of(
    st.builds(publish, TASKS, VERSIONS),
    st.builds(Label, task=TASKS, labels=st.lists(LABELS, min_size=1, max_size=2),
              version=st.none() | VERSIONS, rollback=st.booleans()),
    st.builds(Retire, task=TASKS, versions=st.lists(VERSIONS, min_size=1, max_size=3),
              whole=st.booleans()),
    st.builds(Restore, task=TASKS, versions=st.lists(VERSIONS, min_size=1, max_size=3)),
)  # fmt: skip


@settings(max_examples=200)
@given(st.lists(ANY_CHANGE, max_size=20), st.integers(0, 20))
def test_any_log_however_foolish_replays_the_same_in_one_go_or_in_two(changes, middle):
    log = [entry(number, change) for number, change in enumerate(changes, start=1)]
    whole, problems = Catalog().apply(log)
    first, early = Catalog().apply(log[:middle])
    second, late = first.apply(log[middle:])
    assert (second, early + late) == (whole, problems)
    assert whole.generation == len(log)
    assert load_checkpoint(dump_checkpoint(whole), whole.generation) == whole


def test_undo_is_bounded():
    log = [entry(n, publish("t", n)) for n in range(1, MAX_UNDO + 52)]
    catalog, _ = Catalog().apply(log)
    assert len(catalog.task("t").undo["default"]) == MAX_UNDO


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b"null", b'{"format":1}', b"\xff\xfe", b'{"format":1,"kind":"publish"}',
     entry(8, publish("t", 1)).to_json(),
     entry(7, publish("t", 1)).to_json().replace(b'"size":100', b'"size":-1'),
     entry(7, publish("t", 1)).to_json().replace(b"sha256:0", b"md5:0")],
)  # fmt: skip
def test_damaged_entry_is_a_value_error(data):
    with pytest.raises(ValueError):
        Entry.from_json(data, 7)


def test_unknown_keys_of_a_later_engram_are_ignored():
    made = entry(7, publish("t", 1))
    data = made.to_json().replace(b'"kind"', b'"colour":"blue","kind"')
    assert Entry.from_json(data, 7) == made


@pytest.mark.parametrize("old_new", [(b'"format":1', b'"format":2'), (b'"publish"', b'"merge"')])
def test_newer_log_is_refused_not_misread(old_new, open_memory):
    store = open_memory()
    store.publish("t", bundle(1))
    path = "log/00000000000000000001.json"
    store._objects.put(path, store._objects.get(path).replace(*old_new))
    with pytest.raises(UnsupportedFormat, match="newer Engram: upgrade"):
        open_memory()
    assert issubclass(UnsupportedFormat, StoreError)


def test_newer_checkpoint_is_left_to_newer_readers(open_memory):
    store = open_memory(checkpoint_every=1)
    store.publish("t", bundle(1))
    path = "checkpoints/00000000000000000001.json"
    store._objects.put(path, store._objects.get(path).replace(b'"format":1', b'"format":2', 1))
    assert open_memory().catalog() == store.catalog()


@pytest.mark.parametrize("tasks", [1, 100, 10_000])
def test_store_of_ten_thousand_versions_opens_within_a_second_of_cpu(tmp_path, tasks):
    per_task = 10_000 // tasks
    log = [
        entry(n + 1, publish(f"task-{n // per_task}", n % per_task + 1, digest=digest(n)))
        for n in range(10_000)
    ]
    checkpointed, _ = Catalog().apply(log[:9_801])
    # As a real store looks: all entries in the log, and 199 of them after the checkpoint.
    folder = tmp_path / "log"
    folder.mkdir()
    for made in log:
        (folder / f"{made.generation:020d}.json").write_bytes(made.to_json())
    (tmp_path / "checkpoints").mkdir()
    path = tmp_path / "checkpoints" / f"{9801:020d}.json"
    path.write_bytes(dump_checkpoint(checkpointed))

    started = time.process_time()
    catalog = open_store(tmp_path).catalog()
    spent = time.process_time() - started
    assert catalog.generation == 10_000
    assert sum(len(task.live) for task in catalog.tasks.values()) == 10_000
    assert spent < 1.0
