"""Unloading a task on this server alone, and loading it again."""

import gc
import weakref

import numpy as np
import pytest
from engram_server.errors import BatchFailed, TaskUnavailable
from engram_store import Restore, Retire, StoreUnavailable
from engram_store import UnknownTask as StoreUnknownTask

from tests.engine.bundles import expected_logits, make_bundle, random_pixels
from tests.engine.tasks.lab import CPU


def test_unloaded_task_answers_no_more_and_its_tensors_go(lab):
    it = lab()
    it.publish("cifar", 1)
    it.publish("cifar", 2, to=("canary",))
    it.publish("zoo", 3)
    it.sync()
    gone = weakref.ref(it.resident("cifar@1")["cifar@1"].on[CPU])
    it.follower.unload("cifar")
    gc.collect()
    assert gone() is None
    assert it.residents() == {"zoo@1"}
    assert it.listener.resident_bytes == it.residency.nbytes == it.size_of_one()
    assert it.follower.snapshot.ready_names == ("base", "zoo")
    assert it.state("cifar@1").status == it.state("cifar@2").status == "unloaded"
    for ref in ("cifar", "cifar@2", "cifar:canary"):
        with pytest.raises(TaskUnavailable, match=f"{ref}.*unloaded on this server"):
            it.resident(ref)
        with pytest.raises(TaskUnavailable, match="unloaded"):
            it.load(ref)


def test_unloaded_task_stays_so_whatever_the_store_brings(lab):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    it.follower.unload("cifar")
    it.sync()
    it.publish("cifar", 2)
    it.publish("zoo", 3)
    assert it.sync().ready_names == ("base", "zoo")
    assert it.listener.counts["loaded"] == 2


def test_reloaded_task_is_served_at_its_newest_and_on_the_device(lab):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    it.follower.unload("cifar")
    it.publish("cifar", 2)
    snapshot = it.tasks.reload("cifar")
    assert snapshot is it.follower.snapshot
    assert snapshot.ready_names == ("base", "cifar")
    assert it.version("cifar") == 2
    assert it.residents() == {"cifar@2"}


def test_reload_brings_an_evicted_task_back_to_the_device(lab):
    it = lab(resident_bytes=lab().size_of_one())
    it.publish("first", 1)
    it.publish("second", 2)
    it.sync()
    for name in ("first", "second", "first"):
        it.tasks.reload(name)
        assert it.residents() == {f"{name}@1"}


def test_unloaded_task_leaves_host_memory_too(lab):
    it = lab(resident_bytes=10**9)
    it.publish("cifar", 1)
    it.sync()
    (slot,) = it.follower.snapshot.slots.values()
    assert slot.host is not None
    it.follower.unload("cifar")
    assert (slot.host, slot.loaded) == (None, None)


def test_reload_tries_a_failed_task_again_at_once_and_says_why_it_fails(lab):
    broken = True

    def replay(task, pixels):
        if broken:
            raise BatchFailed("the device is away")
        return it.runner.replay(task, pixels)

    it = lab(replay=replay)
    it.publish("cifar", 1, golden=1)
    it.sync()
    assert it.state("cifar@1").status == "failed"
    with pytest.raises(TaskUnavailable, match="the device is away"):
        it.tasks.reload("cifar")
    broken = False
    assert it.tasks.reload("cifar").ready_names == ("base", "cifar")


def test_child_keeps_what_it_needs_of_an_unloaded_parent(lab, backbone):
    it = lab()
    parent = it.publish("parent", 1)
    child = make_bundle(backbone, 2, parents=[parent], golden=1)
    it.store.publish("child", child)
    it.sync()
    pixels = random_pixels(backbone, 2)
    expected = expected_logits(backbone, child, pixels, [parent])
    it.follower.unload("parent")
    assert it.residents() == {"parent@1", "child@1"}
    task = it.resident("child")["child"]
    np.testing.assert_allclose(it.runner.run(task, pixels), expected, atol=1e-4)
    it.follower.unload("child")
    assert it.residents() == set()
    assert it.residency.nbytes == 0


def test_child_of_an_unloaded_parent_can_be_published(lab, backbone):
    it = lab()
    parent = it.publish("parent", 1)
    it.sync()
    it.follower.unload("parent")
    child = make_bundle(backbone, 2, parents=[parent], golden=1)
    it.tasks.verify(child)
    assert it.residents() == set()
    it.store.publish("child", child)
    assert it.sync().ready_names == ("base", "child")


def test_bundle_that_another_task_serves_stays(lab):
    it = lab()
    bundle = it.publish("cifar", 1)
    it.store.publish("same", bundle)
    it.sync()
    it.follower.unload("cifar")
    assert it.residents() == {"cifar@1", "same@1"}
    assert it.resident("same")


def test_request_under_way_keeps_an_unloaded_task_and_leaves_nothing_behind(lab):
    it = lab()
    it.publish("cifar", 1)
    before = it.sync()
    it.follower.unload("cifar")
    (task,) = it.loader.load_served_tasks(before.resolve(["cifar"])).values()
    assert task.version == 1
    assert it.residents() == {"cifar@1"}
    it.sync()
    assert it.residents() == set()
    assert it.residency.nbytes == 0


def test_unloading_needs_no_store_and_loading_says_that_it_is_away(lab, outage):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    with outage:
        it.follower.unload("cifar")
        assert it.follower.snapshot.ready_names == ("base",)
        with pytest.raises(StoreUnavailable):
            it.tasks.reload("cifar")
    it.sync()
    assert it.follower.snapshot.ready_names == ("base",)


def test_unloading_is_forgotten_when_the_task_is_retired(lab):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    it.follower.unload("cifar")
    it.store.commit(Retire("cifar"))
    it.sync()
    it.store.commit(Restore("cifar"))
    assert it.sync().ready_names == ("base", "cifar")


def test_what_is_not_there_can_be_neither_unloaded_nor_loaded(lab):
    it = lab()
    it.sync()
    for change in (it.follower.unload, it.tasks.reload):
        with pytest.raises(StoreUnknownTask):
            change("cifar")


def test_pinned_task_can_be_unloaded(lab):
    it = lab(pinned=frozenset({"cifar"}), resident_bytes=10**9)
    it.publish("cifar", 1)
    it.sync()
    it.follower.unload("cifar")
    it.sync()
    assert it.residents() == set()
