"""Versions that are loaded when a request asks for them."""

import gc
import weakref

import pytest
from engram_server.errors import TaskUnavailable
from engram_store import Retire


def test_version_without_label_is_loaded_on_demand_and_stays(lab):
    store_side = lab()
    store_side.publish("cifar", 1)
    store_side.publish("cifar", 2)
    it = lab()  # meets both versions at once: only the second has a label
    snapshot = it.sync()
    assert it.state("cifar@1").status == "on_demand"
    assert it.state("cifar@2").status == "ready"
    assert it.served(["cifar", "cifar@1"], snapshot) is None
    loaded = it.load("cifar@1", "cifar")
    assert [task.version for task in loaded.values()] == [1, 2]
    assert it.resident("cifar@1")["cifar@1"] is loaded["cifar@1"]
    assert it.state("cifar@1").status == "ready"


def test_version_retired_meanwhile_still_loads_for_a_request_that_pinned_it(lab, backbone):
    it = lab()
    it.publish("cifar", 1)
    it.publish("cifar", 2)
    it.publish("cifar", 3)
    other = lab()
    pinned = other.sync()
    it.store.commit(Retire("cifar", 1))
    other.sync()
    resident = other.residency.nbytes
    (task,) = other.loader.load_served_tasks(pinned.resolve(["cifar@1"])).values()
    assert task.version == 1
    assert other.residency.nbytes == resident, "what is retired is not the server's to keep"
    gone = weakref.ref(task)
    del task, pinned
    gc.collect()
    assert gone() is None


def test_failed_version_on_demand_is_tried_again_by_a_request_when_due(lab, outage):
    first = lab()
    first.publish("cifar", 1)
    first.publish("cifar", 2)
    it = lab()
    it.sync()
    with outage, pytest.raises(TaskUnavailable, match="cannot be reached"):
        it.load("cifar@1")
    with pytest.raises(TaskUnavailable, match="cannot be reached"):
        it.resident("cifar@1")
    assert it.version("cifar") == 2
    it.clock.now += 1.0
    assert it.served(["cifar@1"]) is None
    assert it.load("cifar@1")["cifar@1"].version == 1
