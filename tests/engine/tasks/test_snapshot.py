"""What a request is answered by: names resolved by one catalog, and the state of versions."""

import itertools

import pytest
from engram_bundle import BackboneRef
from engram_server.errors import UnknownTask
from engram_store import RemoveAlias, Retire

from tests.bundles import OTHER_FINGERPRINT
from tests.engine.tasks.lab import Lab


def test_base_is_always_there(lab, backbone):
    it = lab()
    assert it.follower.snapshot.ready_names == ("base",)
    task = it.resident("base")["base"]
    assert (task.version, task.digest) == (None, None)
    assert task.labels == backbone.base.labels
    assert it.residency.nbytes == 0
    state = it.follower.snapshot.states()[0]
    assert (state.name, state.version, state.status, state.resident) == (
        "base",
        None,
        "ready",
        True,
    )


def test_backbone_without_head_has_no_base(backbone_of, store):
    it = Lab(backbone_of("vit-headless"), store)
    assert it.follower.snapshot.ready_names == ()
    assert it.served(None) == {}
    with pytest.raises(UnknownTask, match="has no classifier"):
        it.resident("base")


def test_no_references_mean_every_ready_task(lab):
    it = lab()
    it.publish("zoo", 1)
    it.publish("ants", 2)
    it.publish("broken", 3, trained_on=BackboneRef(name="x", fingerprint=OTHER_FINGERPRINT))
    snapshot = it.sync()
    assert snapshot.ready_names == ("ants", "base", "zoo")
    assert list(it.served(None, snapshot)) == ["ants", "base", "zoo"]


def test_answers_are_keyed_by_reference_and_duplicates_collapse(lab):
    it = lab()
    it.publish("cifar", 1, to=("default", "canary"))
    it.sync()
    refs = ["cifar", "cifar@1", "cifar", "cifar:canary", "base", "cifar@1"]
    found = it.served(refs)
    assert list(found) == ["cifar", "cifar@1", "cifar:canary", "base"]
    assert len({id(found[ref]) for ref in refs if ref != "base"}) == 1
    assert it.served([]) == {}


def test_a_snapshot_always_resolves_by_its_catalog(lab):
    it = lab()
    it.publish("cifar", 1)
    it.publish("cifar", 2, to=("canary",))
    pinned = it.sync()
    it.publish("cifar", 3)
    it.store.commit(RemoveAlias("cifar", "canary"))
    it.store.commit(Retire("cifar", 1))
    now = it.sync()
    assert (pinned.generation, now.generation) == (2, 5)
    old = it.served(["cifar", "cifar:canary"], pinned)
    assert [task.version for task in old.values()] == [1, 2]
    assert it.version("cifar") == 3
    with pytest.raises(UnknownTask):
        it.resident("cifar:canary")


def test_all_unknown_names_are_listed_with_suggestions(lab):
    it = lab()
    it.publish("cifar", 1, to=("default", "canary"))
    it.publish("places", 2)
    it.sync()
    refs = ["cifar", "cifer", "places@9", "cifar:canery", "Places", "qqq", "bass"]
    with pytest.raises(UnknownTask) as caught:
        it.resident(*refs)
    error = caught.value
    assert error.names == ("cifer", "places@9", "cifar:canery", "Places", "qqq", "bass")
    assert error.suggestions == {
        "cifer": "cifar",
        "places@9": "places@1",
        "cifar:canery": "cifar:canary",
        "Places": "places",
        "bass": "base",
    }
    for part in ("'cifer'", "no version 9", "no alias 'canery'", "'Places'", "'qqq'", "'bass'"):
        assert part in str(error)
    with pytest.raises(UnknownTask):
        it.load("cifer")


def test_retired_task_is_unknown(lab):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    it.store.commit(Retire("cifar"))
    it.sync()
    with pytest.raises(UnknownTask, match="retired"):
        it.resident("cifar")


def test_a_repeated_set_of_references_is_resolved_once(lab, monkeypatch):
    it = lab()
    it.publish("cifar", 1)
    snapshot = it.sync()
    first = it.served(["cifar", "base"], snapshot)
    with monkeypatch.context() as patch:
        patch.setattr(type(snapshot.catalog), "resolve", lambda *_: pytest.fail("resolved again"))
        assert it.served(["cifar", "base"], snapshot) == first


def test_sets_remembered_are_bounded(lab):
    it = lab()
    for seed in range(5):
        it.publish("cifar", seed, memory=0)
    snapshot = it.sync()
    refs = ["base", "cifar", "cifar@5", "cifar:default"]
    for length in range(1, 9):
        for some in itertools.product(refs, repeat=min(length, 5)):
            it.served(some, snapshot)
    assert len(snapshot._resolved) <= 512
