"""The task bank: follows the store under traffic, within its budget, whatever fails."""

import gc
import itertools
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from server.engine.task_bank import TaskBank
from server.engine.task_loader import HALF_PRECISION_TOLERANCE, check_golden

from server.engine import task_bank
from server.errors import BatchFailed, TaskMismatch, TaskUnavailable, UnknownTask
from server.model import Backbone
from task_store import (
    GOLDEN_TOLERANCE,
    BackboneRef,
    IncompatibleBundle,
    InvalidName,
    MissingParent,
    StoreUnavailable,
    TaskStore,
    open_store,
)
from task_store import UnknownTask as StoreUnknownTask
from tests.engine.bundles import (
    WAIT_SECONDS,
    Listener,
    Runner,
    expected_logits,
    make_bundle,
    random_pixels,
    with_golden,
)

CPU = torch.device("cpu")
SECOND = torch.device("cpu", 0)
OTHER_FINGERPRINT = "sha256:" + "cd" * 32


@pytest.fixture(scope="module")
def backbone(backbone_of) -> Backbone:
    return backbone_of("vit")


@pytest.fixture
def store() -> TaskStore:
    return open_store("memory://")


class Clock:
    """Stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Lab:
    """A bank on tiny backbones, with everything a test looks at."""

    def __init__(
        self,
        backbone: Backbone,
        store: TaskStore,
        devices: tuple[torch.device, ...] = (CPU,),
        poll_seconds: float = 3600.0,
        resident_bytes: int | None = None,
        pinned: frozenset[str] = frozenset(),
        replay: Callable | None = None,
    ) -> None:
        self.backbone = backbone
        self.store = store
        self.listener = Listener()
        self.clock = Clock()
        self.runner = Runner(dict.fromkeys(devices, backbone))
        self.bank = TaskBank(
            store,
            self.runner.backbones,
            replay=replay or self.runner.replay,
            observer=self.listener,
            poll_seconds=poll_seconds,
            resident_bytes=resident_bytes,
            pinned=pinned,
            clock=self.clock,
        )

    def publish(self, name: str, seed: int, **options):
        labels = options.pop("to", ("default",))
        bundle = make_bundle(self.backbone, seed, **options)
        self.store.publish(name, bundle, labels=labels)
        return bundle

    def sync(self):
        return self.bank.sync()

    def resident(self, *refs: str) -> dict:
        """What is resident for these references right now; the bank must not need to load."""
        found = self.bank.resolve(self.bank.snapshot, refs)
        assert found is not None
        return dict(found)

    def load(self, *refs: str) -> dict:
        return dict(self.bank.load(self.bank.snapshot, refs))

    def version(self, ref: str) -> int:
        return self.resident(ref)[ref].served.version

    def state(self, ref: str):
        name, _, version = ref.partition("@")
        states = self.bank.snapshot.states()
        return next(s for s in states if (s.name, s.version) == (name, int(version)))

    def residents(self) -> set[str]:
        states = self.bank.snapshot.states()
        return {f"{s.name}@{s.version}" for s in states if s.resident and s.name != "base"}

    def size_of_one(self) -> int:
        """Bytes on a device of one bundle of `make_bundle`'s default shape."""
        other = Lab(self.backbone, open_store("memory://"))
        other.publish("one", 0)
        other.sync()
        return other.bank.resident_bytes


@pytest.fixture
def lab(backbone, store) -> Iterator[Callable[..., Lab]]:
    built: list[Lab] = []

    def build(**options) -> Lab:
        built.append(Lab(backbone, options.pop("store", store), **options))
        return built[-1]

    yield build
    for one in built:
        one.bank.stop()


@pytest.fixture
def outage(store, monkeypatch):
    """`with outage: …`: the store can neither be read nor written."""

    class Outage:
        def __enter__(self):
            def unreachable(path: str) -> bytes:
                raise StoreUnavailable("The store is away.")

            monkeypatch.setattr(store._objects, "get", unreachable)

        def __exit__(self, *_):
            monkeypatch.undo()

    return Outage()


# --- what is served ------------------------------------------------------------------------------


def test_published_task_answers_after_a_sync_as_its_bundle_does(lab, backbone):
    it = lab()
    bundle = it.publish("cifar", 1, golden=2)
    assert it.sync().generation == 1
    task = it.resident("cifar")["cifar"]
    pixels = random_pixels(backbone, 3)
    expected = expected_logits(backbone, bundle, pixels)
    np.testing.assert_allclose(it.runner.run(task, pixels), expected, atol=1e-4)
    assert task.served.name == "cifar"
    assert (task.served.version, task.served.digest) == (1, bundle.digest)
    assert task.served.problem == "single_label"
    assert task.served.labels == ("class-0", "class-1", "class-2")
    assert it.listener.counts["loaded"] == 1
    assert (it.listener.seen, it.listener.served) == (1, 1)


def test_base_is_always_there(lab, backbone):
    it = lab()
    assert it.bank.snapshot.ready_names == ("base",)
    task = it.resident("base")["base"]
    assert (task.served.version, task.served.digest) == (None, None)
    assert task.served.labels == backbone.base.labels
    assert it.bank.resident_bytes == 0
    state = it.bank.snapshot.states()[0]
    assert (state.name, state.version, state.status, state.resident) == (
        "base",
        None,
        "ready",
        True,
    )


def test_backbone_without_head_has_no_base(backbone_of, store):
    it = Lab(backbone_of("vit-headless"), store)
    assert it.bank.snapshot.ready_names == ()
    assert it.bank.resolve(it.bank.snapshot, None) == []
    with pytest.raises(UnknownTask, match="no head of its own"):
        it.resident("base")


def test_no_references_ask_every_ready_task(lab):
    it = lab()
    it.publish("zoo", 1)
    it.publish("ants", 2)
    it.publish("broken", 3, backbone=BackboneRef(name="x", fingerprint=OTHER_FINGERPRINT))
    snapshot = it.sync()
    assert snapshot.ready_names == ("ants", "base", "zoo")
    assert [ref for ref, _ in it.bank.resolve(snapshot, None)] == ["ants", "base", "zoo"]


def test_answers_are_keyed_by_the_reference_asked_and_duplicates_collapse(lab):
    it = lab()
    it.publish("cifar", 1, to=("default", "canary"))
    it.sync()
    refs = ["cifar", "cifar@1", "cifar", "cifar:canary", "base", "cifar@1"]
    found = it.bank.resolve(it.bank.snapshot, refs)
    assert [ref for ref, _ in found] == ["cifar", "cifar@1", "cifar:canary", "base"]
    assert len({id(task) for _, task in found[:3]}) == 1
    assert it.bank.resolve(it.bank.snapshot, []) == []


def test_label_move_and_rollback_are_served_after_a_sync(lab):
    it = lab()
    it.publish("cifar", 1)
    it.publish("cifar", 2)
    it.sync()
    assert it.version("cifar") == 2
    it.store.label("cifar", "default", 1)
    it.sync()
    assert it.version("cifar") == 1
    it.store.rollback("cifar")
    it.sync()
    assert it.version("cifar") == 2
    assert it.listener.served == 4


def test_moving_a_label_loads_nothing_again(lab):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    first = it.resident("cifar")["cifar"]
    it.publish("cifar", 2)
    it.sync()
    it.store.label("cifar", "default", 1)
    it.sync()
    assert it.resident("cifar")["cifar"] is first
    assert it.listener.counts["loaded"] == 2


def test_a_poll_without_news_costs_nothing_per_task(lab, monkeypatch):
    it = lab()
    it.publish("birds", 1)
    it.sync()
    served = it.bank.snapshot
    monkeypatch.setattr(it.bank, "_load_all", None)  # whoever goes through all tasks fails
    assert it.bank.sync() is served


def test_snapshot_resolves_by_its_own_catalog_for_ever(lab):
    it = lab()
    it.publish("cifar", 1)
    it.publish("cifar", 2, to=("canary",))
    pinned = it.sync()
    it.publish("cifar", 3)
    it.store.remove_label("cifar", "canary")
    it.store.retire("cifar", 1)
    now = it.sync()
    assert (pinned.generation, now.generation) == (2, 5)
    old = dict(it.bank.resolve(pinned, ["cifar", "cifar:canary"]))
    assert [task.served.version for task in old.values()] == [1, 2]
    assert it.version("cifar") == 3
    with pytest.raises(UnknownTask):
        it.resident("cifar:canary")


def test_version_without_label_is_loaded_on_demand_and_stays(lab):
    store_side = lab()
    store_side.publish("cifar", 1)
    store_side.publish("cifar", 2)
    it = lab()  # meets both versions at once: only the second has a label
    snapshot = it.sync()
    assert it.state("cifar@1").status == "on_demand"
    assert it.state("cifar@2").status == "ready"
    assert it.bank.resolve(snapshot, ["cifar", "cifar@1"]) is None
    loaded = it.load("cifar@1", "cifar")
    assert [task.served.version for task in loaded.values()] == [1, 2]
    assert it.resident("cifar@1")["cifar@1"] is loaded["cifar@1"]
    assert it.state("cifar@1").status == "ready"


def test_version_retired_meanwhile_still_loads_for_a_request_that_pinned_it(lab, backbone):
    it = lab()
    it.publish("cifar", 1)
    it.publish("cifar", 2)
    it.publish("cifar", 3)
    other = lab()
    pinned = other.sync()
    it.store.retire("cifar", 1)
    other.sync()
    resident = other.bank.resident_bytes
    (_, task), *_ = other.bank.load(pinned, ["cifar@1"])
    assert task.served.version == 1
    assert other.bank.resident_bytes == resident, "what is retired is not the bank's to keep"
    gone = weakref.ref(task)
    del task, pinned
    gc.collect()
    assert gone() is None


# --- freeing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident_bytes", [None, 10**9], ids=["unlimited", "budget"])
def test_retired_task_is_freed_when_the_last_request_lets_go(lab, resident_bytes):
    it = lab(resident_bytes=resident_bytes)
    it.publish("keep", 1)
    it.publish("gone", 2, golden=1)
    pinned = it.sync()
    before = it.bank.resident_bytes
    resident = it.resident("gone")["gone"]
    watched = [weakref.ref(resident), weakref.ref(resident.on[CPU])]
    watched += [weakref.ref(resident.on[CPU].head_weight)]
    it.store.retire("gone")
    it.sync()
    assert it.bank.resident_bytes == before / 2
    assert it.listener.resident_bytes == before / 2
    assert dict(it.bank.resolve(pinned, ["gone"]))["gone"] is resident
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
    it.store.retire("one")
    it.sync()
    gc.collect()
    assert gone() is None
    assert it.resident("two")["two"] is found["two"]


def test_publish_and_retire_cycles_leave_nothing_behind(lab):
    it = lab()
    it.publish("keep", 0)
    it.sync()
    size = it.bank.resident_bytes

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    tensors = alive()
    for seed in range(30):
        it.publish("cycle", 1 + seed, memory=1 + seed % 3)
        it.sync()
        it.resident("cycle")
        it.store.retire("cycle")
        it.sync()
    assert alive() == tensors
    assert it.bank.resident_bytes == size
    assert it.listener.resident == 1


# --- residency -----------------------------------------------------------------------------------


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
    assert it.residents() == {"a@1", "c@1"}, "b was asked for longest ago"
    assert it.listener.evicted[-1] == ("b", 1)
    assert it.bank.resolve(it.bank.snapshot, ["b"]) is None
    assert it.state("b@1").status == "ready"
    with outage:
        task = it.load("b")["b"]
    pixels = random_pixels(it.backbone, 2)
    expected = expected_logits(it.backbone, bundles["b"], pixels)
    np.testing.assert_allclose(it.runner.run(task, pixels), expected, atol=1e-4)
    assert it.residents() == {"b@1", "c@1"}
    assert it.bank.resident_bytes <= 2 * it.size_of_one()


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


def test_pinned_nonsense_is_refused_at_once(lab):
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
    assert it.bank.resident_bytes == 2 * one


def test_every_device_gets_its_own_tensors(lab, backbone):
    it = lab(devices=(CPU, SECOND))
    parent = it.publish("parent", 1, golden=1)
    child = it.publish("child", 2, parents=[parent])
    it.sync()
    tasks = it.resident("parent", "child", "base")
    for task in tasks.values():
        assert list(task.on) == [CPU, SECOND]
        assert task.on[CPU] is not task.on[SECOND]
    assert tasks["child"].on[SECOND].ancestors == (tasks["parent"].on[SECOND],)
    pixels = random_pixels(backbone, 2)
    expected = expected_logits(backbone, child, pixels, [parent])
    for device in (CPU, SECOND):
        got = it.runner.run(tasks["child"], pixels, device)
        np.testing.assert_allclose(got, expected, atol=1e-4)
    assert it.bank.resident_bytes == 2 * it.size_of_one(), "the budget counts one device"


# --- extension -----------------------------------------------------------------------------------


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
        if broken:
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
    assert it.bank.sync(retry=[parent.digest]).ready_names == ("base", "child", "fine", "parent")


# --- failures ------------------------------------------------------------------------------------


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
    assert it.listener.counts["failed"] == 1, "nobody tries again before it is due"
    path.write_bytes(data)
    it.sync()
    assert it.state("damaged@1").status == "failed"
    it.clock.now += 1.0
    assert it.sync().ready_names == ("base", "damaged", "fine")
    assert it.state("damaged@1").reason is None


def test_bundle_of_another_backbone_fails_with_its_reason(lab):
    it = lab()
    it.publish("alien", 1, backbone=BackboneRef(name="other", fingerprint=OTHER_FINGERPRINT))
    it.sync()
    assert "trained on backbone 'other'" in it.state("alien@1").reason


def test_golden_mismatch_fails_and_says_by_how_much(lab, backbone):
    it = lab()
    good = make_bundle(backbone, 1, golden=2)
    swapped = good.manifest.model_copy(update={"placement": "post_norm"})
    it.store.publish("wrong", replace(good, manifest=swapped))
    it.store.publish("right", good)
    assert it.sync().ready_names == ("base", "right")
    reason = it.state("wrong@1").reason
    assert "golden answers differ by" in reason
    assert "preprocessing" in reason


def test_failed_bundle_is_tried_again_after_longer_and_longer_pauses(lab):
    it = lab()
    it.publish("alien", 1, backbone=BackboneRef(name="other", fingerprint=OTHER_FINGERPRINT))
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
    assert it.bank.snapshot.ready_names == ("base",)
    path.write_bytes(data)
    it.store.label("task", "canary", 1)
    assert it.sync().ready_names == ("base", "task")


def test_failed_version_on_demand_is_tried_again_by_a_request_when_due(lab, outage):
    first = lab()
    first.publish("cifar", 1)
    first.publish("cifar", 2)
    it = lab()
    it.sync()
    with outage, pytest.raises(TaskUnavailable, match="The store is away"):
        it.load("cifar@1")
    with pytest.raises(TaskUnavailable, match="The store is away"):
        it.resident("cifar@1")
    assert it.version("cifar") == 2
    it.clock.now += 1.0
    assert it.bank.resolve(it.bank.snapshot, ["cifar@1"]) is None
    assert it.load("cifar@1")["cifar@1"].served.version == 1


def test_unexpected_error_while_loading_fails_that_bundle_only(lab):
    def replay(task, pixels):
        raise RuntimeError("nobody expected this")

    it = lab(replay=replay)
    it.publish("odd", 1, golden=1)
    it.publish("fine", 2)
    assert it.sync().ready_names == ("base", "fine")
    assert it.state("odd@1").reason == "nobody expected this"


@pytest.mark.parametrize(
    ("error", "scale", "tolerance", "fits"),
    [
        (0.9e-3, 1.0, GOLDEN_TOLERANCE, True),
        (1.1e-3, 1.0, GOLDEN_TOLERANCE, False),
        (0.9e-3, 0.01, GOLDEN_TOLERANCE, True),
        (9e-3, 10.0, GOLDEN_TOLERANCE, True),
        (4e-2, 1.0, HALF_PRECISION_TOLERANCE, True),
        (6e-2, 1.0, HALF_PRECISION_TOLERANCE, False),
        (float("nan"), 1.0, HALF_PRECISION_TOLERANCE, False),
    ],
)
def test_golden_tolerance_is_relative_to_the_largest_logit(error, scale, tolerance, fits):
    expected = np.array([[scale, -scale / 2]], dtype=np.float32)
    got = expected + np.array([[0, error]], dtype=np.float32)
    if fits:
        check_golden(got, expected, tolerance)
        return
    with pytest.raises(TaskMismatch):
        check_golden(got, expected, tolerance)


def test_half_precision_devices_get_the_wider_tolerance(backbone, store):
    it = Lab(backbone.to(dtype=torch.bfloat16), store)
    it.store.publish("half", make_bundle(backbone, 1, golden=2))
    assert it.sync().ready_names == ("base", "half")


# --- unknown names -------------------------------------------------------------------------------


def test_unknown_names_are_all_told_with_suggestions(lab):
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
    for part in ("'cifer'", "no version 9", "no label 'canery'", "'Places'", "'qqq'", "'bass'"):
        assert part in str(error)
    with pytest.raises(UnknownTask):
        it.load("cifer")


def test_retired_task_is_unknown(lab):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    it.store.retire("cifar")
    it.sync()
    with pytest.raises(UnknownTask, match="retired"):
        it.resident("cifar")


# --- the store is away ---------------------------------------------------------------------------


def test_store_outage_keeps_serving_and_recovers_by_itself(lab, outage):
    it = lab()
    it.publish("cifar", 1)
    served = it.sync()
    it.publish("cifar", 2)
    with outage:
        assert it.sync() is served
        assert it.bank.store_error == "The store is away."
        assert it.version("cifar") == 1
        assert it.listener.counts["store_failed"] == 1
    it.sync()
    assert it.bank.store_error is None
    assert it.version("cifar") == 2


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
        assert (it.bank.generation_seen, it.bank.snapshot.generation) == (2, 1)
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
    assert it.bank.store_error is None
    assert it.state("bad@1").reason == "Access denied."


def test_start_raises_when_the_store_cannot_be_read(lab, outage):
    it = lab()
    with outage, pytest.raises(StoreUnavailable):
        it.bank.start()


# --- following -----------------------------------------------------------------------------------


def test_started_bank_follows_the_store_by_itself(lab, store):
    it = lab(poll_seconds=0.002)
    it.publish("cifar", 1)
    it.bank.start()
    assert it.version("cifar") == 1
    elsewhere = TaskStore(store._objects)
    elsewhere.publish("cifar", make_bundle(it.backbone, 2))
    it.listener.wait_until(lambda: it.listener.served == 2)
    assert it.version("cifar") == 2
    assert it.bank.seconds_since_poll is not None


def test_follower_outlives_outages_and_unexpected_errors(lab, store, monkeypatch):
    it = lab(poll_seconds=0.002)
    it.bank.start()
    with monkeypatch.context() as patch:
        patch.setattr(store, "refresh", lambda: 1 / 0)
        it.listener.wait_until(lambda: it.listener.counts["store_failed"] >= 3)
    it.publish("cifar", 1)
    it.listener.wait_until(lambda: it.listener.served == 1)
    assert it.version("cifar") == 1


def test_stopped_bank_has_no_thread_left_and_keeps_its_tasks(lab):
    it = lab(poll_seconds=0.002)
    it.publish("cifar", 1)
    others = set(threading.enumerate())  # of tests that keep a server for a whole session
    it.bank.start()
    assert any(thread.name == "engram-bank" for thread in set(threading.enumerate()) - others)
    it.bank.stop()
    assert not any(thread.name == "engram-bank" for thread in set(threading.enumerate()) - others)
    assert it.version("cifar") == 1


def test_sync_at_least_returns_only_when_that_generation_is_served(lab, store):
    it = lab(poll_seconds=0.002)
    it.sync()
    got = []
    waiting = threading.Thread(target=lambda: got.append(it.bank.sync(at_least=2).generation))
    waiting.start()
    it.listener.wait_until(lambda: it.listener.counts["seen"] >= 3)
    it.publish("cifar", 1)
    it.listener.wait_until(lambda: it.listener.served == 1)
    assert not got
    it.publish("cifar", 2)
    waiting.join(WAIT_SECONDS)
    assert got == [2]
    seen = it.listener.counts["seen"]
    it.bank.sync(at_least=1)
    assert it.listener.counts["seen"] == seen, "served already: the store is not asked"


def test_sync_at_least_gives_up_in_the_end(lab, monkeypatch, outage):
    it = lab(poll_seconds=0.002)
    monkeypatch.setattr(task_bank, "PATIENCE_SECONDS", 0.01)
    with pytest.raises(StoreUnavailable, match="has not reached 7"):
        it.bank.sync(at_least=7)
    with outage, pytest.raises(StoreUnavailable, match="The store is away"):
        it.bank.sync(at_least=7)


# --- before publishing ---------------------------------------------------------------------------


def test_verify_accepts_a_good_bundle_and_leaves_nothing_loaded(lab, backbone):
    it = lab(resident_bytes=10**9)
    parent = it.publish("parent", 1)
    it.publish("parent", 2)
    other = lab(resident_bytes=10**9)
    other.sync()
    assert other.residents() == {"parent@2"}
    before = other.bank.resident_bytes
    child = with_golden(
        backbone, make_bundle(backbone, 3, extends=(parent.digest,)), parents=[parent]
    )
    other.bank.verify(child)
    assert other.runner.replayed["unpublished"] == 1
    assert other.bank.resident_bytes == before
    assert other.residents() == {"parent@2"}
    assert other.state("parent@1").status == "on_demand"
    assert other.bank.snapshot.catalog.names == ("parent",)


def test_verified_bundle_is_not_replayed_again_when_it_is_published(lab, backbone):
    it = lab()
    bundle = make_bundle(backbone, 1, golden=1)
    it.bank.verify(bundle)
    it.store.publish("cifar", bundle)
    it.sync()
    assert it.version("cifar") == 1
    assert sum(it.runner.replayed.values()) == 1


def test_verify_finds_a_parent_published_since_the_last_poll(lab, backbone):
    it = lab()
    it.sync()
    parent = it.publish("parent", 1)
    it.bank.verify(make_bundle(backbone, 2, parents=[parent]))


def test_verify_refuses_what_could_not_be_served(lab, backbone):
    it = lab()
    foreign = BackboneRef(name="other", fingerprint=OTHER_FINGERPRINT)
    with pytest.raises(IncompatibleBundle):
        it.bank.verify(make_bundle(backbone, 1, backbone=foreign))
    with pytest.raises(MissingParent):
        it.bank.verify(make_bundle(backbone, 1, parents=[make_bundle(backbone, 2)]))
    golden = make_bundle(backbone, 3, golden=1)
    with pytest.raises(TaskMismatch, match="golden answers differ"):
        it.bank.verify(replace(golden, golden_logits=golden.golden_logits + 0.5))


# --- many threads --------------------------------------------------------------------------------


def change_something(it: Lab, rng: random.Random, step: int) -> int:
    """One random change of the store; the generation it made."""
    name = rng.choice(["a", "b"])
    live = it.store.catalog().task(name)
    match rng.choice(["publish", "label", "retire"]):
        case "label":
            version = rng.choice([info.version for info in live.live])
            return it.store.label(name, "default", version).generation
        case "retire" if len(live.live) > 1:
            spare = [info for info in live.live if not live.labels_of(info.version)]
            if spare:
                return it.store.retire(name, rng.choice(spare).version).generation
    it.publish(name, 100 + step, golden=step % 2)
    return it.store.catalog().generation


@pytest.mark.parametrize("tight", [False, True], ids=["unlimited", "evicting"])
def test_readers_never_see_a_mixed_generation(lab, tight):
    it = lab(resident_bytes=lab().size_of_one() if tight else None)
    it.publish("a", 1)
    it.publish("b", 2)
    it.sync()
    done = threading.Event()
    problems: list[BaseException] = []
    answered = [0] * 4

    def read(number: int) -> None:
        newest = 0
        try:
            # Paced: readers that spin starve the one who changes things.
            while not done.wait(0.001) or not answered[number]:
                snapshot = it.bank.snapshot
                assert snapshot.generation >= newest
                newest = snapshot.generation
                refs = ["a", "b:default", "base"]
                found = it.bank.resolve(snapshot, refs) or it.bank.load(snapshot, refs)
                for ref, task in found[:2]:
                    info = snapshot.catalog.resolve(ref)
                    assert (task.served.name, task.served.version) == (info.task, info.version)
                    assert task.served.digest == info.digest
                answered[number] += 1
        except BaseException as error:  # noqa: BLE001 - told to the test
            problems.append(error)

    readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
    for reader in readers:
        reader.start()
    rng = random.Random(7)
    for step in range(30):
        generation = change_something(it, rng, step)
        assert it.bank.sync(at_least=generation).generation >= generation
    done.set()
    for reader in readers:
        reader.join(WAIT_SECONDS)
    assert not problems, problems[0]
    assert all(answered)
    assert it.listener.counts["failed"] == 0


def test_concurrent_syncs_load_each_bundle_once(lab):
    it = lab()
    for seed in range(12):
        it.publish(f"task-{seed}", seed, golden=1)
    threads = [threading.Thread(target=it.bank.sync, args=(12,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert it.bank.snapshot.generation == 12
    assert it.listener.counts["loaded"] == 12
    assert sum(it.runner.replayed.values()) == 12


def test_a_slow_bundle_does_not_hold_up_requests(lab):
    entered, release = threading.Event(), threading.Event()

    def replay(task, pixels):
        if task.served.name == "slow":
            entered.set()
            assert release.wait(WAIT_SECONDS)
        return it.runner.replay(task, pixels)

    it = lab(replay=replay, resident_bytes=lab().size_of_one())
    it.publish("a", 1)
    it.publish("b", 2)
    served = it.sync()
    it.publish("slow", 3, golden=1)
    syncing = threading.Thread(target=it.bank.sync)
    syncing.start()
    assert entered.wait(WAIT_SECONDS)
    assert it.bank.snapshot is served
    assert list(it.load("a", "b")) == ["a", "b"], "an evicted task comes back meanwhile"
    release.set()
    syncing.join(WAIT_SECONDS)
    assert "slow" in it.bank.snapshot.ready_names


def test_set_asked_before_is_not_looked_up_again(lab, monkeypatch):
    it = lab()
    it.publish("cifar", 1)
    snapshot = it.sync()
    first = it.bank.resolve(snapshot, ["cifar", "base"])
    with monkeypatch.context() as patch:
        patch.setattr(type(snapshot.catalog), "resolve", lambda *_: pytest.fail("looked up"))
        assert it.bank.resolve(snapshot, ["cifar", "base"]) == first


def test_sets_remembered_are_bounded(lab):
    it = lab()
    for seed in range(5):
        it.publish("cifar", seed, memory=0)
    snapshot = it.sync()
    refs = ["base", "cifar", "cifar@5", "cifar:default"]
    for length in range(1, 9):
        for some in itertools.product(refs, repeat=min(length, 5)):
            it.bank.resolve(snapshot, some)
    assert len(snapshot._sets) <= 512


# --- unloading, on this server alone --------------------------------------------------------------


def test_unloaded_task_answers_no_more_and_its_tensors_go(lab):
    it = lab()
    it.publish("cifar", 1)
    it.publish("cifar", 2, to=("canary",))
    it.publish("zoo", 3)
    it.sync()
    gone = weakref.ref(it.resident("cifar@1")["cifar@1"].on[CPU])
    it.bank.unload("cifar")
    gc.collect()
    assert gone() is None
    assert it.residents() == {"zoo@1"}
    assert it.listener.resident_bytes == it.bank.resident_bytes == it.size_of_one()
    assert it.bank.snapshot.ready_names == ("base", "zoo")
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
    it.bank.unload("cifar")
    it.sync()
    it.publish("cifar", 2)
    it.publish("zoo", 3)
    assert it.sync().ready_names == ("base", "zoo")
    assert it.listener.counts["loaded"] == 2


def test_reloaded_task_is_served_at_its_newest_and_on_the_device(lab):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    it.bank.unload("cifar")
    it.publish("cifar", 2)
    snapshot = it.bank.reload("cifar")
    assert snapshot is it.bank.snapshot
    assert snapshot.ready_names == ("base", "cifar")
    assert it.version("cifar") == 2
    assert it.residents() == {"cifar@2"}


def test_reload_brings_an_evicted_task_back_to_the_device(lab):
    it = lab(resident_bytes=lab().size_of_one())
    it.publish("first", 1)
    it.publish("second", 2)
    it.sync()
    for name in ("first", "second", "first"):
        it.bank.reload(name)
        assert it.residents() == {f"{name}@1"}


def test_unloaded_task_leaves_host_memory_too(lab):
    it = lab(resident_bytes=10**9)
    it.publish("cifar", 1)
    it.sync()
    (slot,) = it.bank.snapshot.slots.values()
    assert slot.host is not None
    it.bank.unload("cifar")
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
        it.bank.reload("cifar")
    broken = False
    assert it.bank.reload("cifar").ready_names == ("base", "cifar")


def test_child_keeps_what_it_needs_of_an_unloaded_parent(lab, backbone):
    it = lab()
    parent = it.publish("parent", 1)
    child = make_bundle(backbone, 2, parents=[parent], golden=1)
    it.store.publish("child", child)
    it.sync()
    pixels = random_pixels(backbone, 2)
    expected = expected_logits(backbone, child, pixels, [parent])
    it.bank.unload("parent")
    assert it.residents() == {"parent@1", "child@1"}
    task = it.resident("child")["child"]
    np.testing.assert_allclose(it.runner.run(task, pixels), expected, atol=1e-4)
    it.bank.unload("child")
    assert it.residents() == set()
    assert it.bank.resident_bytes == 0


def test_child_of_an_unloaded_parent_can_be_published(lab, backbone):
    it = lab()
    parent = it.publish("parent", 1)
    it.sync()
    it.bank.unload("parent")
    child = make_bundle(backbone, 2, parents=[parent], golden=1)
    it.bank.verify(child)
    assert it.residents() == set()
    it.store.publish("child", child)
    assert it.sync().ready_names == ("base", "child")


def test_bundle_that_another_task_serves_stays(lab):
    it = lab()
    bundle = it.publish("cifar", 1)
    it.store.publish("same", bundle)
    it.sync()
    it.bank.unload("cifar")
    assert it.residents() == {"cifar@1", "same@1"}
    assert it.resident("same")


def test_request_under_way_keeps_an_unloaded_task_and_leaves_nothing_behind(lab):
    it = lab()
    it.publish("cifar", 1)
    before = it.sync()
    it.bank.unload("cifar")
    ((_, task),) = it.bank.load(before, ["cifar"])
    assert task.served.version == 1
    assert it.residents() == {"cifar@1"}
    it.sync()
    assert it.residents() == set()
    assert it.bank.resident_bytes == 0


def test_unloading_needs_no_store_and_loading_says_that_it_is_away(lab, outage):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    with outage:
        it.bank.unload("cifar")
        assert it.bank.snapshot.ready_names == ("base",)
        with pytest.raises(StoreUnavailable):
            it.bank.reload("cifar")
    it.sync()
    assert it.bank.snapshot.ready_names == ("base",)


def test_unloading_is_forgotten_when_the_task_is_retired(lab):
    it = lab()
    it.publish("cifar", 1)
    it.sync()
    it.bank.unload("cifar")
    it.store.retire("cifar")
    it.sync()
    it.store.restore("cifar")
    assert it.sync().ready_names == ("base", "cifar")


def test_what_is_not_there_can_be_neither_unloaded_nor_loaded(lab):
    it = lab()
    it.sync()
    for change in (it.bank.unload, it.bank.reload):
        with pytest.raises(StoreUnknownTask):
            change("cifar")


def test_pinned_task_can_be_unloaded(lab):
    it = lab(pinned=frozenset({"cifar"}), resident_bytes=10**9)
    it.publish("cifar", 1)
    it.sync()
    it.bank.unload("cifar")
    it.sync()
    assert it.residents() == set()
