"""Changes to tasks: checked before they are committed, served when the call returns."""

from collections import Counter

import numpy as np
import pytest
from engram_bundle import BackboneRef, IncompatibleBundle, TaskBundle
from engram_server.engine.tasks import loader
from engram_server.errors import TaskMismatch, UnknownTask
from engram_store import (
    MissingParent,
    MoveAlias,
    PreconditionFailed,
    Publish,
    RemoveAlias,
    Restore,
    Retire,
    RollBack,
    StoreUnavailable,
    TaskStore,
)

from tests.bundles import OTHER_FINGERPRINT, with_tensors
from tests.engine.bundles import expected_logits, make_bundle, random_pixels, with_golden
from tests.engine.tasks.lab import CPU


def test_verify_accepts_a_good_bundle_and_leaves_nothing_loaded(lab, backbone):
    it = lab(resident_bytes=10**9)
    parent = it.publish("parent", 1)
    it.publish("parent", 2)
    other = lab(resident_bytes=10**9)
    other.sync()
    assert other.residents() == {"parent@2"}
    before = other.residency.nbytes
    child = with_golden(
        backbone, make_bundle(backbone, 3, extends=(parent.digest,)), parents=[parent]
    )
    other.tasks.verify(child)
    assert other.runner.replayed["candidate"] == 1
    assert other.residency.nbytes == before
    assert other.residents() == {"parent@2"}
    assert other.state("parent@1").status == "on_demand"
    assert other.follower.snapshot.catalog.names == ("parent",)


def test_verified_bundle_is_not_replayed_again_when_it_is_published(lab, backbone):
    it = lab()
    bundle = make_bundle(backbone, 1, golden=1)
    it.tasks.verify(bundle)
    it.store.publish("cifar", bundle)
    it.sync()
    assert it.version("cifar") == 1
    assert sum(it.runner.replayed.values()) == 1


def test_verify_finds_a_parent_published_since_the_last_poll(lab, backbone):
    it = lab()
    it.sync()
    parent = it.publish("parent", 1)
    it.tasks.verify(make_bundle(backbone, 2, parents=[parent]))


def test_verify_rejects_what_could_not_be_served(lab, backbone):
    it = lab()
    foreign = BackboneRef(name="other", fingerprint=OTHER_FINGERPRINT)
    with pytest.raises(IncompatibleBundle):
        it.tasks.verify(make_bundle(backbone, 1, trained_on=foreign))
    with pytest.raises(MissingParent):
        it.tasks.verify(make_bundle(backbone, 1, parents=[make_bundle(backbone, 2)]))
    golden = make_bundle(backbone, 3, golden=1)
    with pytest.raises(TaskMismatch, match="golden answers differ"):
        it.tasks.verify(
            with_tensors(golden, {"golden.logits": golden.tensors["golden.logits"] + 0.5})
        )


# --- publishing ----------------------------------------------------------------------------------


@pytest.fixture
def counts(monkeypatch):
    """Counts how often a bundle's file is parsed, and how often one is prepared."""
    counts: Counter[str] = Counter()
    parse, prepare = TaskBundle.from_bytes.__func__, loader.prepare

    def parsing(cls, *args):
        counts["parsed"] += 1
        return parse(cls, *args)

    def preparing(*args):
        counts["prepared"] += 1
        return prepare(*args)

    monkeypatch.setattr(TaskBundle, "from_bytes", classmethod(parsing))
    monkeypatch.setattr(loader, "prepare", preparing)
    return counts


@pytest.mark.parametrize("resident_bytes", [None, 10**9], ids=["unlimited", "budget"])
def test_published_bundle_is_parsed_prepared_and_replayed_once(
    lab, backbone, tmp_path, counts, resident_bytes
):
    it = lab(resident_bytes=resident_bytes)
    file = tmp_path / "bundle.safetensors"
    make_bundle(backbone, 1, golden=2).save(file)
    counts.clear()
    outcome = it.tasks.publish(Publish("cifar", TaskBundle.load(file)), actor="tests")
    assert (outcome.version, outcome.created) == (1, True)
    assert outcome.snapshot.ready_names == ("base", "cifar")
    assert it.version("cifar") == 1
    assert counts == {"parsed": 1, "prepared": 1}
    assert it.runner.replayed == {"candidate": 1}
    assert it.listener.counts["loaded"] == 1


def test_published_child_of_a_resident_parent_is_prepared_once(lab, backbone, counts):
    it = lab()
    parent = it.publish("parent", 1)
    it.sync()
    child = make_bundle(backbone, 2, parents=[parent], golden=1)
    counts.clear()
    it.tasks.commit(Publish("child", child))
    assert counts == {"prepared": 1}
    tasks = it.resident("parent", "child")
    assert tasks["child"].on[CPU].ancestors == (tasks["parent"].on[CPU],)


def test_published_child_shares_the_tasks_of_a_parent_loaded_on_demand(lab, backbone, counts):
    first = lab()
    parent = first.publish("parent", 1)
    first.publish("parent", 2)
    it = lab()
    it.sync()
    assert it.state("parent@1").status == "on_demand"
    child = make_bundle(backbone, 3, parents=[parent], golden=1)
    it.tasks.commit(Publish("child", child))
    tasks = it.resident("parent@1", "child")
    assert tasks["child"].on[CPU].ancestors == (tasks["parent@1"].on[CPU],)
    assert it.runner.replayed["candidate"] == 1
    assert "child" not in it.runner.replayed, "it is served as it was checked"
    pixels = random_pixels(backbone, 2)
    expected = expected_logits(backbone, child, pixels, [parent])
    np.testing.assert_allclose(it.runner.run(tasks["child"], pixels), expected, atol=1e-4)


def test_a_bundle_prepared_for_a_rejected_publish_is_released(lab, backbone):
    it = lab()

    def refuse(catalog):
        raise PreconditionFailed("not now")

    other = TaskStore(it.store.objects)
    other.publish("zoo", make_bundle(backbone, 1))
    with pytest.raises(PreconditionFailed):
        it.tasks.commit(Publish("cifar", make_bundle(backbone, 2)), condition=refuse)
    assert not it.loader._prepared
    assert it.follower.snapshot.catalog.names == ("zoo",), "looking again shows what has changed"
    assert it.store.catalog().names == ("zoo",)


def test_bundle_that_cannot_be_served_is_not_published(lab, backbone):
    it = lab()
    golden = make_bundle(backbone, 3, golden=1)
    wrong = with_tensors(golden, {"golden.logits": golden.tensors["golden.logits"] + 0.5})
    with pytest.raises(TaskMismatch, match="golden answers differ"):
        it.tasks.commit(Publish("cifar", wrong))
    assert it.store.catalog().generation == 0


def test_the_same_bytes_published_again_make_no_version_and_move_the_alias(lab, backbone):
    it = lab()
    first, second = make_bundle(backbone, 1), make_bundle(backbone, 2)
    it.tasks.commit(Publish("cifar", first))
    it.tasks.commit(Publish("cifar", second))
    outcome = it.tasks.publish(Publish("cifar", first))
    assert (outcome.version, outcome.created) == (1, False)
    assert it.version("cifar") == 1


def test_publishing_serves_a_task_that_was_unloaded(lab, backbone):
    it = lab()
    it.tasks.commit(Publish("cifar", make_bundle(backbone, 1)))
    it.follower.unload("cifar")
    outcome = it.tasks.publish(Publish("cifar", make_bundle(backbone, 2)))
    assert outcome.snapshot.ready_names == ("base", "cifar")


def test_every_change_is_served_when_it_returns(lab, backbone):
    it = lab()
    it.tasks.commit(Publish("cifar", make_bundle(backbone, 1)))
    it.tasks.commit(Publish("cifar", make_bundle(backbone, 2), ("canary",)))
    it.tasks.commit(MoveAlias("cifar", "default", 2))
    assert it.version("cifar") == 2
    it.tasks.commit(RollBack("cifar"))
    assert it.version("cifar") == 1
    it.tasks.commit(RemoveAlias("cifar", "canary"))
    with pytest.raises(UnknownTask, match="no alias 'canary'"):
        it.resident("cifar:canary")
    assert it.tasks.commit(Retire("cifar")).ready_names == ("base",)
    assert it.tasks.commit(Restore("cifar")).ready_names == ("base", "cifar")


def test_nothing_is_changed_while_the_store_is_away(lab, backbone, outage):
    it = lab()
    it.tasks.commit(Publish("cifar", make_bundle(backbone, 1)))
    with outage:
        it.sync()
        with pytest.raises(StoreUnavailable):
            it.tasks.commit(Retire("cifar"))
    assert it.sync().ready_names == ("base", "cifar")


def test_validation_returns_the_bundle_and_the_reason_against_it(lab, backbone, tmp_path):
    it = lab()
    file = tmp_path / "bundle.safetensors"
    bundle = make_bundle(backbone, 1, golden=1)
    bundle.save(file)
    found, reason = it.tasks.validate(file)
    assert (found.digest, reason) == (bundle.digest, None)
    foreign = BackboneRef(name="other", fingerprint=OTHER_FINGERPRINT)
    make_bundle(backbone, 1, trained_on=foreign).save(file)
    found, reason = it.tasks.validate(file)
    assert found is not None
    assert "trained on backbone 'other'" in reason
    file.write_bytes(b"nonsense")
    found, reason = it.tasks.validate(file)
    assert found is None
    assert reason
    assert it.store.catalog().generation == 0
