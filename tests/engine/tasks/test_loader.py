"""Loading bundles: what they extend, what fails, and when it is tried again."""

import numpy as np
import pytest
from engram_bundle import BackboneRef
from engram_server.errors import BatchFailed, TaskUnavailable
from engram_store import MoveAlias, Retire, StoreUnavailable, open_store

from tests.bundles import OTHER_FINGERPRINT
from tests.engine.bundles import expected_logits, make_bundle, random_pixels, with_golden
from tests.engine.tasks.lab import CPU


def test_published_task_answers_after_a_sync_as_its_bundle_does(lab, backbone):
    it = lab()
    bundle = it.publish("cifar", 1, golden=2)
    assert it.sync().generation == 1
    task = it.resident("cifar")["cifar"]
    pixels = random_pixels(backbone, 3)
    expected = expected_logits(backbone, bundle, pixels)
    np.testing.assert_allclose(it.runner.run(task, pixels), expected, atol=1e-4)
    assert task.name == "cifar"
    assert (task.version, task.digest) == (1, bundle.digest)
    assert task.task_type == "single_label"
    assert task.labels == ("class-0", "class-1", "class-2")
    assert it.listener.counts["loaded"] == 1
    assert (it.listener.seen, it.listener.served) == (1, 1)


def test_child_and_parent_share_the_parents_task(lab, backbone):
    it = lab()
    root = it.publish("root", 1)
    parent = it.publish("parent", 2, parents=[root], golden=0)
    child = make_bundle(backbone, 3, extends=(parent.digest,))
    child = with_golden(backbone, child, [root, parent])
    it.store.publish("child", child)
    it.sync()
    tasks = it.resident("child", "parent", "root")
    bound = {name: task.on[CPU] for name, task in tasks.items()}
    assert set(bound["child"].ancestors) == {bound["parent"], bound["root"]}
    assert bound["parent"].ancestors == (bound["root"],)
    assert tasks["child"].rows == 3
    assert it.runner.replayed["child"] == 1


def test_parent_that_lost_its_label_is_loaded_with_its_child(lab, backbone):
    first = lab()
    parent = first.publish("parent", 1)
    first.publish("parent", 2)
    child = first.publish("child", 3, parents=[parent])
    it = lab()
    it.sync()
    assert it.residents() == {"parent@1", "parent@2", "child@1"}
    pixels = random_pixels(backbone, 2)
    expected = expected_logits(backbone, child, pixels, [parent])
    got = it.runner.run(it.resident("child")["child"], pixels)
    np.testing.assert_allclose(got, expected, atol=1e-4)


def test_child_of_a_failed_parent_fails_with_its_reason_and_recovers_with_it(lab, backbone):
    broken = True

    def replay(task, pixels):
        if broken and task.name == "parent":
            raise BatchFailed("the device is on fire")
        return it.runner.replay(task, pixels)

    it = lab(replay=replay)
    parent = it.publish("parent", 1, golden=1)
    it.publish("child", 2, parents=[parent])
    it.publish("fine", 3)
    assert it.sync().ready_names == ("base", "fine")
    assert it.state("parent@1").reason == "the device is on fire"
    reason = it.state("child@1").reason
    assert reason == "it extends parent@1, which cannot be served: the device is on fire"
    broken = False
    assert it.follower.sync(retry=[parent.digest]).ready_names == (
        "base",
        "child",
        "fine",
        "parent",
    )


def test_damaged_bundle_fails_alone_and_recovers_when_repaired(lab, tmp_path, backbone):
    store = open_store(tmp_path / "store")
    it = lab(store=store)
    it.publish("fine", 1)
    bundle = it.publish("damaged", 2)
    path = tmp_path / "store" / "blobs" / "sha256" / bundle.digest.removeprefix("sha256:")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert it.sync().ready_names == ("base", "fine")
    state = it.state("damaged@1")
    assert (state.status, state.resident) == ("failed", False)
    assert "damaged or replaced" in state.reason
    with pytest.raises(TaskUnavailable, match=r"'damaged' cannot be served: .*damaged or replaced"):
        it.resident("fine", "damaged")
    with pytest.raises(TaskUnavailable, match="damaged or replaced"):
        it.load("damaged", "fine")
    assert it.listener.counts["failed"] == 1, "no retry before it is due"
    path.write_bytes(data)
    it.sync()
    assert it.state("damaged@1").status == "failed"
    it.clock.now += 1.0
    assert it.versions_failed() == 1
    assert it.sync().ready_names == ("base", "damaged", "fine")
    assert it.versions_failed() == 0
    assert it.state("damaged@1").reason is None


def test_bundle_of_another_backbone_fails_with_its_reason(lab):
    it = lab()
    it.publish("alien", 1, trained_on=BackboneRef(name="other", fingerprint=OTHER_FINGERPRINT))
    it.sync()
    assert "trained on backbone 'other'" in it.state("alien@1").reason


def test_failed_bundle_is_tried_again_after_longer_and_longer_pauses(lab):
    it = lab()
    it.publish("alien", 1, trained_on=BackboneRef(name="other", fingerprint=OTHER_FINGERPRINT))
    it.sync()
    tries = []
    for _ in range(200):
        it.clock.now += 1.0
        it.sync()
        tries.append(it.listener.counts["failed"])
    # After 1, 2, 4, 8, 16, 32 seconds, then every 60.
    assert [second for second in range(1, 200) if tries[second] > tries[second - 1]] == [
        2,
        6,
        14,
        30,
        62,
        122,
        182,
    ]


def test_failed_bundle_is_tried_again_when_a_label_moves_to_it(lab, tmp_path):
    store = open_store(tmp_path / "store")
    it = lab(store=store)
    bundle = it.publish("task", 1)
    path = tmp_path / "store" / "blobs" / "sha256" / bundle.digest.removeprefix("sha256:")
    data = path.read_bytes()
    path.write_bytes(b"nonsense")
    it.sync()
    assert it.follower.snapshot.ready_names == ("base",)
    path.write_bytes(data)
    it.store.commit(MoveAlias("task", "canary", 1))
    assert it.sync().ready_names == ("base", "task")


def test_unexpected_error_while_loading_fails_that_bundle_only(lab):
    def replay(task, pixels):
        if task.name == "odd":
            raise RuntimeError("an unexpected error")
        return it.runner.replay(task, pixels)

    it = lab(replay=replay)
    it.publish("odd", 1, golden=1)
    it.publish("fine", 2)
    assert it.sync().ready_names == ("base", "fine")
    assert it.state("odd@1").reason == "an unexpected error"


def test_outage_between_catalog_and_bundle_blames_no_bundle(lab, monkeypatch):
    it = lab()
    it.publish("cifar", 1)
    served = it.sync()
    it.publish("cifar", 2)
    with monkeypatch.context() as patch:
        real, calls = it.store.refresh, []

        def refresh_once():
            calls.append(1)
            if len(calls) > 1:
                raise StoreUnavailable("The store is away.")
            return real()

        def away(digest):
            raise StoreUnavailable("The store is away.")

        patch.setattr(it.store, "refresh", refresh_once)
        patch.setattr(it.store, "read_bundle", away)
        assert it.sync() is served
        assert it.version("cifar") == 1
        assert (it.follower.generation_seen, it.follower.snapshot.generation) == (2, 1)
    it.sync()
    assert it.version("cifar") == 2


def test_one_unreadable_bundle_does_not_hold_back_the_others(lab, monkeypatch):
    it = lab()
    bad = it.publish("bad", 1)
    it.publish("fine", 2)
    real = it.store.read_bundle

    def read(digest):
        if digest == bad.digest:
            raise StoreUnavailable("Access denied.")
        return real(digest)

    monkeypatch.setattr(it.store, "read_bundle", read)
    assert it.sync().ready_names == ("base", "fine")
    assert it.follower.store_error is None
    assert it.state("bad@1").reason == StoreUnavailable.public


def test_failed_versions_are_counted_until_they_are_unloaded_or_retired(lab, backbone):
    it = lab()
    foreign = BackboneRef(name="other", fingerprint=OTHER_FINGERPRINT)
    alien = make_bundle(backbone, 1, trained_on=foreign)
    for name in ("one", "two", "three"):
        it.store.publish(name, alien)
    it.publish("fine", 2)
    it.sync()
    assert it.versions_failed() == 3
    it.follower.unload("two")
    assert it.versions_failed() == 2
    it.store.commit(Retire("one"))
    it.sync()
    assert it.versions_failed() == 1
    it.store.commit(Retire("three"))
    it.store.commit(Retire("two"))
    it.sync()
    assert it.versions_failed() == 0
    assert it.loader.failed == ()
