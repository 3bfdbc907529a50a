"""Bytes on the devices: what is evicted, what is freed, and what stays."""

import gc
import weakref

import numpy as np
import pytest
import torch
from engram_bundle import InvalidName
from engram_store import Retire

from tests.engine.bundles import expected_logits, random_pixels
from tests.engine.tasks.lab import CPU


@pytest.mark.parametrize("resident_bytes", [None, 10**9], ids=["unlimited", "budget"])
def test_retired_task_is_freed_when_the_last_request_lets_go(lab, resident_bytes):
    it = lab(resident_bytes=resident_bytes)
    it.publish("keep", 1)
    it.publish("gone", 2, golden=1)
    pinned = it.sync()
    before = it.residency.nbytes
    resident = it.resident("gone")["gone"]
    watched = [weakref.ref(resident), weakref.ref(resident.on[CPU])]
    watched += [weakref.ref(resident.on[CPU].head_weight)]
    it.store.commit(Retire("gone"))
    it.sync()
    assert it.residency.nbytes == before / 2
    assert it.listener.resident_bytes == before / 2
    assert it.served(["gone"], pinned)["gone"] is resident
    del pinned, resident
    gc.collect()
    assert [ref() for ref in watched] == [None, None, None]


def test_retired_name_goes_while_its_bundle_lives_on_under_another(lab):
    it = lab()
    bundle = it.publish("one", 1)
    it.store.publish("two", bundle)
    it.sync()
    found = it.resident("one", "two")
    assert found["one"].on[CPU] is found["two"].on[CPU], "one bundle, one row"
    gone = weakref.ref(found.pop("one"))
    it.store.commit(Retire("one"))
    it.sync()
    gc.collect()
    assert gone() is None
    assert it.resident("two")["two"] is found["two"]


def test_publish_and_retire_cycles_leave_nothing_behind(lab):
    it = lab()
    it.publish("keep", 0)
    it.sync()
    size = it.residency.nbytes

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    tensors = alive()
    for seed in range(30):
        it.publish("cycle", 1 + seed, memory=1 + seed % 3)
        it.sync()
        it.resident("cycle")
        it.store.commit(Retire("cycle"))
        it.sync()
    assert alive() == tensors
    assert it.residency.nbytes == size
    assert it.listener.resident == 1


def test_least_recently_used_goes_to_host_memory_and_returns_without_the_store(lab, outage):
    it = lab(resident_bytes=2 * lab().size_of_one())
    bundles = {name: it.publish(name, seed) for seed, name in enumerate("abc")}
    it.sync()
    assert len(it.residents()) == 2
    it.load("a")
    it.load("b")
    it.resident("a")
    assert it.residents() == {"a@1", "b@1"}
    it.load("c")
    assert it.residents() == {"a@1", "c@1"}, "b is the least recently used"
    assert it.listener.counts["evicted"] >= 1
    assert it.served(["b"]) is None
    assert it.state("b@1").status == "ready"
    with outage:
        task = it.load("b")["b"]
    pixels = random_pixels(it.backbone, 2)
    expected = expected_logits(it.backbone, bundles["b"], pixels)
    np.testing.assert_allclose(it.runner.run(task, pixels), expected, atol=1e-4)
    assert it.residents() == {"b@1", "c@1"}
    assert it.residency.nbytes <= 2 * it.size_of_one()


def test_uploads_do_not_push_out_what_is_in_use(lab):
    it = lab(resident_bytes=3 * lab().size_of_one())
    for seed, name in enumerate(["hot", "warm", *"abcdef"]):
        it.publish(name, seed)
        it.sync()
        it.resident("hot")
        it.resident(name if name == "warm" else "hot")
    assert it.residents() >= {"hot@1", "warm@1"}


def test_evicted_tensors_are_freed(lab):
    it = lab(resident_bytes=lab().size_of_one())
    it.publish("a", 1)
    it.sync()
    watched = weakref.ref(it.resident("a")["a"].on[CPU])
    it.publish("b", 2)
    it.sync()
    gc.collect()
    assert watched() is None


def test_evicted_task_that_a_request_holds_comes_back_as_the_same_object(lab):
    it = lab(resident_bytes=lab().size_of_one())
    it.publish("a", 1)
    it.sync()
    held = it.resident("a")["a"]
    it.publish("b", 2)
    it.sync()
    assert it.residents() == {"b@1"}
    assert it.load("a")["a"].on[CPU] is held.on[CPU]


def test_more_tasks_than_the_budget_holds_are_still_answered_together(lab):
    it = lab(resident_bytes=lab().size_of_one())
    for seed, name in enumerate("abcd"):
        it.publish(name, seed)
    it.sync()
    assert list(it.load("a", "b", "c", "d")) == ["a", "b", "c", "d"]
    assert len(it.residents()) == 1


def test_pinned_tasks_are_never_evicted(lab):
    one = lab().size_of_one()
    it = lab(resident_bytes=one, pinned=frozenset({"pinned", "base", "later", "old@1"}))
    it.publish("pinned", 1)
    it.publish("old", 5)
    it.publish("old", 6)
    it.sync()
    for seed, name in enumerate("abc", start=10):
        it.publish(name, seed)
        it.sync()
        assert it.residents() >= {"pinned@1", "old@1"}
    it.publish("pinned", 2)
    it.sync()
    it.load("a")
    assert "pinned@2" in it.residents(), "the name is pinned, whatever version it stands for"
    assert "pinned@1" not in it.residents()


def test_pinned_nonsense_is_rejected_at_once(lab):
    with pytest.raises(InvalidName):
        lab(pinned=frozenset({"No such name!"}))


def test_resident_child_keeps_what_it_extends_resident(lab):
    one = lab().size_of_one()
    it = lab(resident_bytes=2 * one)
    parent = it.publish("parent", 1)
    it.publish("child", 2, parents=[parent])
    it.publish("a", 3)
    it.sync()
    for _ in range(3):
        it.load("child")
        it.load("a")
        resident = it.residents()
        assert "a@1" in resident
        assert "child@1" not in resident or "parent@1" in resident
    it.load("child")
    assert it.residents() == {"child@1", "parent@1"}
    assert it.residency.nbytes == 2 * one
