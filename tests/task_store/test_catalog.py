"""The catalog is the replay of the log: checked by random histories, without any store."""

from engram_bundle import TaskBundle
from engram_store import (
    Conflict,
    MoveAlias,
    NotFound,
    Publish,
    RemoveAlias,
    Restore,
    Retire,
    RollBack,
    only_if_absent,
)
from engram_store.catalog import MAX_CHANGES, MAX_UNDO, Catalog
from engram_store.events import AliasMoved, Collected, Entry, Published, Restored, Retired
from engram_store.replay import dump_checkpoint, load_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.bundles import bundle
from tests.task_store.entries import digest, entry, published

TASKS = st.sampled_from(["a", "team/b"])
LABELS = st.sampled_from(["default", "canary", "stable"])
VERSIONS = st.integers(1, 4)


class Histories(RuleBasedStateMachine):
    """Random requests, each decided by a plan and folded in, as the store does it."""

    def __init__(self):
        super().__init__()
        self.catalog = Catalog()
        self.log: list[Entry] = []
        self.numbers: dict[str, list[int]] = {}
        self.bundles: list[TaskBundle] = []

    def ask(self, change, condition=None):
        before = self.catalog
        try:
            if condition is not None:
                condition(self.catalog)
            event = change.plan(self.catalog)
        except (Conflict, NotFound):
            return None
        if event is None:
            return None
        made = entry(self.catalog.generation + 1, event)
        self.catalog, damages = self.catalog.apply([made])
        assert damages == [], "a plan never makes an entry that replay passes over"
        assert before.generation == made.generation - 1, "the old snapshot did not move"
        self.log.append(made)
        if isinstance(event, Published):
            self.numbers.setdefault(event.task, []).append(event.version)
        return event

    @rule(
        task=TASKS,
        again=st.none() | st.integers(0, 8),
        aliases=st.lists(LABELS, unique=True),
        parents=st.lists(st.integers(0, 8), max_size=2, unique=True) | st.just([]),
        absent=st.sampled_from([False, False, False, True]),
    )
    def publish(self, task, again, aliases, parents, absent):
        # New bytes, or some seen before; and a bundle can only name bundles made before it.
        if again is None or again >= len(self.bundles):
            known = list(self.catalog.by_digest)
            extends = tuple(dict.fromkeys(known[p % len(known)] for p in parents if known))
            self.bundles.append(bundle(len(self.bundles), extends=extends))
            again = -1
        change = Publish(task, self.bundles[again], tuple(aliases))
        self.ask(change, only_if_absent(task) if absent else None)

    @rule(task=TASKS, alias=LABELS, version=VERSIONS)
    def alias(self, task, alias, version):
        before = self.catalog
        event = self.ask(MoveAlias(task, alias, version))
        if event is not None and alias in before.task(task).aliases:
            undone = RollBack(task, alias).plan(self.catalog)
            assert undone.version == before.task(task).aliases[alias], "rollback undoes alias"
            after, _ = self.catalog.apply([entry(self.catalog.generation + 1, undone)])
            assert after.task(task).aliases == before.task(task).aliases
            expected = before.task(task).undo.get(alias, ())
            assert after.task(task).undo.get(alias, ()) == expected[-(MAX_UNDO - 1) :]

    @rule(task=TASKS, alias=LABELS)
    def remove_alias(self, task, alias):
        self.ask(RemoveAlias(task, alias))

    @rule(task=TASKS, alias=LABELS)
    def rollback(self, task, alias):
        self.ask(RollBack(task, alias))

    @rule(task=TASKS, version=st.none() | VERSIONS)
    def retire(self, task, version):
        self.ask(Retire(task, version))

    @rule(task=TASKS, version=st.none() | VERSIONS)
    def restore(self, task, version):
        self.ask(Restore(task, version))

    @rule(task=TASKS, alias=LABELS)
    def rollback_walks_back_through_the_moves(self, task, alias):
        """Move an alias through all live versions, then undo every move."""
        if task not in self.catalog.tasks or alias not in self.catalog.task(task).aliases:
            return
        start = self.catalog.task(task)
        passed = [start.aliases[alias]]
        passed += [
            version.version
            for version in start.live
            if self.ask(MoveAlias(task, alias, version.version)) is not None
        ]
        for expected in reversed(passed[:-1]):
            assert self.ask(RollBack(task, alias)).version == expected
        assert self.catalog.task(task).aliases == start.aliases
        assert self.catalog.task(task).undo == start.undo

    @invariant()
    def versions_are_never_reused(self):
        for numbers in self.numbers.values():
            assert numbers == list(range(1, len(numbers) + 1))

    @invariant()
    def labels_point_to_live_versions_and_default_exists(self):
        for task in self.catalog.tasks.values():
            assert "default" in task.aliases
            assert all(not task.versions[v].retired for v in task.aliases.values())

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


ANY_EVENT = st.one_of(
    st.builds(published, TASKS, VERSIONS),
    st.builds(AliasMoved, task=TASKS, aliases=st.lists(LABELS, min_size=1, max_size=2),
              version=st.none() | VERSIONS, rollback=st.booleans()),
    st.builds(Retired, task=TASKS, versions=st.lists(VERSIONS, min_size=1, max_size=3),
              whole=st.booleans()),
    st.builds(Restored, task=TASKS, versions=st.lists(VERSIONS, min_size=1, max_size=3)),
    st.builds(Collected, digests=st.lists(VERSIONS.map(digest), min_size=1, max_size=2)),
)  # fmt: skip


@settings(max_examples=200)
@given(st.lists(ANY_EVENT, max_size=20), st.integers(0, 20))
def test_any_log_however_foolish_replays_the_same_in_one_go_or_in_two(events, middle):
    log = [entry(number, event) for number, event in enumerate(events, start=1)]
    whole, damages = Catalog().apply(log)
    first, early = Catalog().apply(log[:middle])
    second, late = first.apply(log[middle:])
    assert (second, early + late) == (whole, damages)
    assert whole.generation == len(log)
    assert load_checkpoint(dump_checkpoint(whole), whole.generation) == whole


def test_undo_is_bounded():
    log = [entry(n, published("t", n)) for n in range(1, MAX_UNDO + 52)]
    catalog, _ = Catalog().apply(log)
    assert len(catalog.task("t").undo["default"]) == MAX_UNDO


def test_changes_of_a_task_are_bounded():
    log = [entry(n, published("t", n)) for n in range(1, MAX_CHANGES + 52)]
    catalog, _ = Catalog().apply(log)
    assert catalog.task("t").changes == tuple(range(52, MAX_CHANGES + 52))


def test_collection_of_a_published_bundle_is_skipped():
    log = [entry(1, published("t", 1)), entry(2, Collected(digests=(digest(1), digest(2))))]
    catalog, (damage,) = Catalog().apply(log)
    assert "is published" in damage.reason
    assert catalog.collected == {}
