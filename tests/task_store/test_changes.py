"""What each change does to the tasks of a store, and when it is refused."""

import pytest
from engram_bundle import IncompatibleBundle, InvalidName
from engram_store import (
    AlreadyExists,
    MissingParent,
    MoveAlias,
    NothingToRestore,
    NothingToRollBack,
    Publish,
    RemoveAlias,
    Restore,
    Retire,
    RollBack,
    StillAliased,
    StillExtended,
    UnknownAlias,
    UnknownTask,
    UnknownVersion,
    only_if_absent,
)

from tests.bundles import OTHER_FINGERPRINT, TinyBackbone, bundle
from tests.task_store.conftest import listing


def test_versions_count_up_and_default_follows(store):
    for expected in (1, 2, 3):
        assert store.publish("t", bundle(expected)).version == expected
    catalog = store.catalog()
    assert catalog.resolve("t").version == 3
    assert catalog.resolve("t@2").digest == bundle(2).digest
    assert [v.version for v in catalog.task("t").live] == [1, 2, 3]
    assert catalog.names == ("t",)


def test_other_aliases_leave_default_alone_except_on_the_first_version(store):
    store.publish("t", bundle(1), aliases=["canary"])
    assert dict(store.catalog().task("t").aliases) == {"default": 1, "canary": 1}
    store.publish("t", bundle(2), aliases=["canary"])
    assert dict(store.catalog().task("t").aliases) == {"default": 1, "canary": 2}
    store.publish("t", bundle(3), aliases=[])
    assert dict(store.catalog().task("t").aliases) == {"default": 1, "canary": 2}


def test_same_bytes_again_make_no_version_and_no_entry(store):
    first = store.publish("t", bundle(1))
    before = listing(store)
    again = store.publish("t", bundle(1))
    assert (again.version, again.created, again.generation) == (1, False, first.generation)
    assert listing(store) == before


def test_same_bytes_again_move_the_requested_aliases(store):
    store.publish("t", bundle(1))
    store.publish("t", bundle(2))
    again = store.publish("t", bundle(1), aliases=["default", "stable"])
    assert (again.version, again.created, again.generation) == (1, False, 3)
    assert dict(store.catalog().task("t").aliases) == {"default": 1, "stable": 1}


def test_only_if_absent_refuses_a_second_publish(store):
    store.commit(Publish("t", bundle(1)), condition=only_if_absent("t"))
    before = listing(store)
    with pytest.raises(AlreadyExists, match="Task 't' already exists"):
        store.commit(Publish("t", bundle(2)), condition=only_if_absent("t"))
    assert listing(store) == before


def test_aliases_move_and_roll_back_step_by_step(store):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    store.commit(MoveAlias("t", "default", 1))
    assert [store.commit(RollBack("t")).catalog.resolve("t").version for _ in range(3)] == [3, 2, 1]
    with pytest.raises(NothingToRollBack, match="stays at version 1"):
        store.commit(RollBack("t"))
    newest = store.history("t", limit=1)[0].event
    assert (newest.kind, newest.rollback, newest.version) == ("alias", True, 1)


def test_rollback_after_a_new_move_undoes_that_move(store):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    store.commit(RollBack("t"))
    store.commit(MoveAlias("t", "default", 3))
    assert store.commit(RollBack("t")).catalog.resolve("t").version == 2
    assert store.commit(RollBack("t")).catalog.resolve("t").version == 1


def test_rollback_passes_over_retired_versions(store):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed))
    store.commit(Retire("t", 2))
    assert store.commit(RollBack("t")).catalog.resolve("t").version == 1


def test_moving_an_alias_where_it_is_adds_nothing(store):
    store.publish("t", bundle(1))
    assert store.commit(MoveAlias("t", "default", 1)).generation == 1


def test_alias_can_be_removed_but_not_default(store):
    store.publish("t", bundle(1), aliases=["canary"])
    assert "canary" not in store.commit(RemoveAlias("t", "canary")).catalog.task("t").aliases
    with pytest.raises(UnknownAlias, match="no alias 'canary'; it has default"):
        store.commit(RemoveAlias("t", "canary"))
    with pytest.raises(UnknownAlias):
        store.commit(RollBack("t", "canary"))
    with pytest.raises(StillAliased, match="cannot be removed"):
        store.commit(RemoveAlias("t", "default"))


def test_unknown_names_are_named_and_near_ones_suggested(store):
    store.publish("animals", bundle(1))
    catalog = store.catalog()
    with pytest.raises(UnknownTask, match="did you mean 'animals'"):
        catalog.resolve("animal")
    with pytest.raises(UnknownVersion, match="no version 7; the newest is 1"):
        catalog.resolve("animals@7")
    with pytest.raises(UnknownAlias, match="no alias 'canary'"):
        catalog.resolve("animals:canary")
    with pytest.raises(UnknownVersion):
        store.commit(MoveAlias("animals", "default", 2))
    with pytest.raises(UnknownTask):
        store.commit(Retire("nothing"))
    with pytest.raises(UnknownTask):
        store.commit(Restore("nothing"))
    with pytest.raises(UnknownVersion, match="no bundle sha256:00"):
        store.read_bytes("sha256:" + "0" * 64)
    with pytest.raises(InvalidName, match="is not a digest"):
        store.read_bytes("../../log/1")


def test_labelled_version_cannot_be_retired(store):
    store.publish("t", bundle(1))
    with pytest.raises(StillAliased, match="still has the alias default: move the alias first"):
        store.commit(Retire("t", 1))


def test_retired_version_is_gone_kept_and_restored(store):
    store.publish("t", bundle(1))
    store.publish("t", bundle(2))
    store.commit(Retire("t", 1))
    with pytest.raises(UnknownVersion, match="is retired: restore it"):
        store.catalog().resolve("t@1")
    with pytest.raises(UnknownVersion):
        store.commit(Retire("t", 1))
    assert store.read_bundle(bundle(1).digest) == bundle(1)
    assert store.commit(Restore("t", 1)).catalog.resolve("t@1").digest == bundle(1).digest
    with pytest.raises(NothingToRestore):
        store.commit(Restore("t", 1))
    with pytest.raises(UnknownVersion, match="never had a version 9"):
        store.commit(Restore("t", 9))


def test_retired_task_comes_back_with_its_aliases(store):
    for seed in (1, 2, 3):
        store.publish("t", bundle(seed), aliases=["default"] if seed < 3 else ["canary"])
    store.commit(Retire("t", 1))
    store.commit(Retire("t"))
    assert store.catalog().names == ()
    with pytest.raises(UnknownTask, match="Task 't' is retired"):
        store.catalog().resolve("t")
    task = store.commit(Restore("t")).catalog.task("t")
    assert [v.version for v in task.live] == [2, 3], "1 was retired before, on its own"
    assert dict(task.aliases) == {"default": 2, "canary": 3}
    with pytest.raises(NothingToRestore):
        store.commit(Restore("t"))


def test_version_numbers_are_never_reused(store):
    store.publish("t", bundle(1), aliases=["canary"])
    store.publish("t", bundle(2))
    store.commit(Retire("t"))
    published = store.publish("t", bundle(2))
    assert (published.version, published.created) == (3, True)
    assert dict(store.catalog().task("t").aliases) == {"default": 3}


def test_one_version_of_a_retired_task_comes_back_as_default(store):
    store.publish("t", bundle(1))
    store.publish("t", bundle(2))
    store.commit(Retire("t"))
    assert dict(store.commit(Restore("t", 1)).catalog.task("t").aliases) == {"default": 1}


def test_child_needs_its_parents_published_and_live(store):
    parent = bundle(1)
    child = bundle(2, extends=(parent.digest,))
    with pytest.raises(MissingParent, match=f"extends {parent.digest}, which is not published"):
        store.publish("child", child)
    assert listing(store) == {}, "an unknown parent leaves no trace"
    store.publish("parent", parent)
    store.publish("parent", bundle(3))
    store.commit(Retire("parent", 1))
    before = listing(store)
    with pytest.raises(MissingParent, match="extends parent@1, which is retired"):
        store.publish("child", child)
    assert listing(store) == before
    store.commit(Restore("parent", 1))
    assert store.publish("child", child).created


def test_bundles_that_name_each_other_can_never_both_be_published(store):
    # A bundle's digest covers its parents' digests, so a true cycle needs a sha256 fixed point.
    # The nearest anyone can come is to name a digest that does not exist yet.
    first = bundle(1, extends=("sha256:" + "1" * 64,))
    second = bundle(2, extends=(first.digest,))
    for name, hostile in (("a", first), ("b", second), ("a", first)):
        with pytest.raises(MissingParent):
            store.publish(name, hostile)
    assert listing(store) == {}


def test_parent_of_another_backbone_is_refused(store):
    parent = bundle(1, backbone=TinyBackbone("other", OTHER_FINGERPRINT))
    store.publish("parent", parent)
    with pytest.raises(IncompatibleBundle, match=OTHER_FINGERPRINT):
        store.publish("child", bundle(2, extends=(parent.digest,)))


def test_extended_version_cannot_be_retired_before_its_children(store):
    parent = bundle(1)
    store.publish("parent", parent)
    store.publish("child", bundle(2, extends=(parent.digest,)))
    with pytest.raises(StillExtended, match="parent@1 is still extended by child@1") as error:
        store.commit(Retire("parent"))
    assert error.value.names == ("child@1",)
    store.publish("copy", parent)
    store.commit(Retire("parent"))
    with pytest.raises(StillExtended):
        store.commit(Retire("copy"))
    store.commit(Retire("child"))
    store.commit(Retire("copy"))
    with pytest.raises(MissingParent, match="retired: restore it first"):
        store.commit(Restore("child"))
