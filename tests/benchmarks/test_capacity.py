"""Costs are fitted right, sizes are those of the tensors, and a fleet is sized by arithmetic."""

import json
import re
from collections import OrderedDict
from dataclasses import asdict

import numpy as np
import pytest
import torch
from engram_server.api.routes.replicas import PAUSE_SECONDS
from engram_server.engine.observer import EngineObserver
from engram_server.engine.replicas import Replicas
from engram_server.engine.tasks.slots import Residency, Slot
from engram_server.engine.types import LoadedBundle
from engram_server.model import MultiTaskViT
from engram_server.model.tasks import Task, prepare
from engram_server.settings import PREFIX, Settings
from engram_store import Heartbeat, TaskStore, open_store
from engram_store.objects import LocalObjects

import benchmarks.measure
from benchmarks.capacity import __main__ as program
from benchmarks.capacity.costs import (
    CatalogCosts,
    Costs,
    Load,
    PassCost,
    Shape,
    Size,
    fit,
    read_costs,
    write_costs,
)
from benchmarks.capacity.many_tasks import task_name, write_log
from benchmarks.capacity.measuring import shape_of
from benchmarks.capacity.passes import random_weights
from benchmarks.capacity.sizing import PLANNED_LOAD, request_cost, store_load
from tests.documents import read_page

# About what a small backbone costs on two cores.
COSTS = Costs(
    backbone="made-up",
    device="cpu",
    processor="made-up",
    cores=2,
    threads=2,
    memory=2**34,
    gpu_memory=0,
    shape=Shape(6, 65, 64, 192, 192, 192, 4, 10**7),
    passes=PassCost(0.001, 0.001, 6e-5, 5e-5, 5e-4, 5e-5),
    decode={"640x480": 0.003, "1280x960": 0.01, "4032x3024": 0.1},
    look_up=1e-4,
    request=1e-3,
    engine_request=5e-4,
    task=Size("task", 10**5, 10**5),
    host_task_bytes=10**5,
    context=Size("context", 3 * 10**5, 3 * 10**5),
    sizes=(),
    bundle_bytes=10**6,
    load=0.01,
    reload=0.001,
    catalog=CatalogCosts(30, 0.1, 1.0, 1000.0, 0.02, 0.1, 1e-4, 1e-3, 0.01),
)


# --- costs ----------------------------------------------------------------------------------------


def test_the_fit_finds_the_costs_that_made_the_times():
    truth = PassCost(0.01, 0.02, 1e-4, 2e-4, 3e-3, 5e-5)
    random = np.random.default_rng(0)
    loads = [Load(*random.integers(0, 200, 4).tolist()) for _ in range(30)]
    loads += [Load(0, tasks, 3, tasks) for tasks in (1, 5, 20)]
    found = fit(loads, [truth.seconds(load) for load in loads])
    for name, value in asdict(truth).items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-9)


def test_the_fit_tells_its_error_and_nothing_costs_less_than_nothing():
    loads = [Load(rows, 0, warm, 0) for rows in (10, 20, 40) for warm in (0, 5, 10)]
    found = fit(loads, [0.1 * load.base_rows * (1 - 0.01 * load.warm_images) for load in loads])
    assert found.warm_image == 0.0
    assert 0 < found.typical_error <= found.worst_error < 0.2


@pytest.mark.parametrize("family", ["vit", "deit", "dinov2"])
def test_formulas_of_sizes_are_those_of_the_tensors(backbone_of, family):
    backbone = backbone_of(family)
    shape = shape_of(backbone)
    for memory, classes in ((0, 3), (4, 7)):
        weights = random_weights(backbone, 0, memory=memory, classes=classes)
        assert prepare(backbone, weights).nbytes == shape.task_bytes(memory, classes)
    blank = torch.zeros(1, *backbone.image_size, 3, dtype=torch.uint8)
    assert MultiTaskViT(backbone).encode(blank)[0].nbytes == shape.context_bytes(4)


# --- the device -----------------------------------------------------------------------------------


def test_tasks_leave_the_device_least_recently_used_first():
    task = Task(torch.zeros(1, 1), None)
    residency = Residency(10 * task.nbytes, EngineObserver())
    slots = [Slot(str(number)) for number in range(50)]
    held = OrderedDict()  # the slow and obvious way
    stream = (np.random.default_rng(0).zipf(1.3, 2000) % 50).tolist()
    for tick, number in enumerate(stream, start=1):
        slot = slots[number]
        slot.used = tick
        assert (slot.loaded is not None) == (number in held), tick
        held[number] = None
        held.move_to_end(number)
        if len(held) > 10:
            held.popitem(last=False)
        if slot.loaded is None:
            on = {torch.device("cpu"): task}
            residency.keep(slot, LoadedBundle(slot.digest, "single_label", (), on))


# --- the store ------------------------------------------------------------------------------------


class CountingObjects(LocalObjects):
    def __init__(self, folder):
        super().__init__(folder, create=False)
        self.requests = []

    def get(self, path):
        self.requests.append(f"GET {path.split('/')[0]}")
        return super().get(path)

    def put(self, path, data):
        self.requests.append(f"PUT {path.split('/')[0]}")
        super().put(path, data)

    def listing(self, prefix, *, after=None):
        self.requests.append(f"LIST {prefix}")
        return super().listing(prefix, after=after)


def beat(number):
    return Heartbeat(
        id=f"replica-{number}",
        generation=1,
        interval=5.0,
        hostname="h",
        address=None,
        started="",
        version="",
        backbone="b",
        fingerprint="f",
    )


@pytest.fixture
def store(tmp_path, backbone_of):
    write_log(tmp_path / "store", 12, backbone_of("vit"))
    return tmp_path / "store"


def test_a_written_log_is_a_store_of_so_many_tasks(store):
    catalog = open_store(store).catalog()
    assert catalog.names == tuple(task_name(number) for number in range(12))
    assert catalog.resolve(task_name(3)).version == 1


def test_the_store_load_is_the_requests_that_replicas_make(store):
    """One GET per poll, one PUT per heartbeat; reading all heartbeats: a LIST, a GET per peer."""
    objects = CountingObjects(store)
    task_store = TaskStore(objects)
    objects.requests.clear()
    task_store.refresh()
    assert objects.requests == ["GET log"]

    objects.requests.clear()
    replicas = [
        Replicas(task_store.heartbeats, lambda n=n: beat(n), EngineObserver()) for n in (0, 1, 2)
    ]
    for replica in replicas:
        replica.beat()
    assert objects.requests == ["PUT replicas"] * 3
    objects.requests.clear()
    assert len(replicas[0].live()) == 3
    assert sorted(objects.requests) == ["GET replicas"] * 2 + ["LIST replicas"]

    settings = Settings(poll_seconds=2.0, heartbeat_seconds=4.0)
    polls, beats, publish, waiting = store_load(COSTS, settings, 3)
    assert (polls.requests, beats.requests, publish.requests) == (1.5, 0.75, 9)
    assert waiting.requests == pytest.approx(3 / PAUSE_SECONDS)


# --- the program ----------------------------------------------------------------------------------


@pytest.fixture
def results(monkeypatch, tmp_path):
    """`results(*arguments)`: the program's rows."""
    monkeypatch.setattr(benchmarks.measure, "RESULTS", tmp_path)

    def run(*arguments):
        program.main(["--tasks", "30", "--rate", "500", *arguments])
        name = "capacity_costs" if "--costs" in arguments else "capacity"
        return json.loads((tmp_path / f"{name}.json").read_text())["rows"]

    return run


@pytest.fixture
def sized(results, tmp_path):
    """`sized(*arguments)`: the answer for a machine of these costs."""
    path = tmp_path / "costs.json"
    write_costs(path, [COSTS])
    assert read_costs(path) == [COSTS]

    def size(*arguments):
        (row,) = results("--costs", str(path), *arguments)
        return row

    return size


@pytest.mark.long
def test_the_program_measures_and_answers(results, folder_of, tmp_path, capsys):
    costs = str(tmp_path / "costs.json")
    backbone = str(folder_of("vit"))
    (row,) = results("--backbone", backbone, "--seconds", "0.5", "--write-costs", costs)
    for size in (row["costs"]["task"], row["costs"]["context"], *row["costs"]["sizes"]):
        assert size["measured"] == size["computed"], size
    for cost in ("load", "reload", "request", "engine_request", "look_up"):
        assert row["costs"][cost] > 0, cost
    assert row["costs"]["catalog"]["tasks"] == 30
    printed = capsys.readouterr().out
    assert "measured" in printed
    assert "computed" in printed

    # The same costs from the file give the same answers, and nothing is measured.
    assert results("--costs", costs) == [row]


def test_a_fleet_is_sized_on_the_costs_of_another_machine(sized):
    row = sized()
    plan, request = row["plan"], row["request"]
    assert plan["most"] == pytest.approx(1 / max(request.values()))
    assert plan["replicas"] == np.ceil(500 / (PLANNED_LOAD * plan["most"])) + 1
    rates = [each["most"] for each in row["rates"]]  # with 0, 50 and 90 % of contexts cached
    assert rates == sorted(rates)
    limits = [each["used"] for each in row["limits"]]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] <= PLANNED_LOAD
    held = {each["what"]: each["nbytes"] for each in row["memory"]}
    assert held["tasks"] == 30 * COSTS.task.measured
    assert sized("--rate", "2000")["plan"]["replicas"] > plan["replicas"]
    assert sized("--dead", "3")["plan"]["replicas"] == plan["replicas"] + 2


def test_a_request_costs_the_sum_of_what_it_needs():
    """Worked out by hand: batches of 64 cold images, two cores that passes and decoding share."""
    workload = program.workload_of(program.options().parse_args(["--tasks-per-request", "4"]))
    cost = request_cost(COSTS, Settings(budget_rows=10**6, queue_images=64), workload)
    device = (0.001 + 0.001) / 64 + 65 * 6e-5 + 4 * (5e-5 + 5e-5)
    assert cost.device == pytest.approx(device)
    assert cost.loop == pytest.approx(1e-3 + 1e-4)
    assert cost.decoding == pytest.approx((1e-4 + 0.003) / 2)
    assert cost.cores == pytest.approx((2 * device + 3.1e-3 + 1.1e-3) / 2)


def test_what_makes_requests_dearer_lowers_what_a_replica_can_do(sized):
    def most(*arguments):
        return sized(*arguments)["plan"]["most"]

    usual = most()
    assert most("--photo", "4032x3024") < 0.5 * usual
    assert most("--hit-rate", "0.9") > 1.5 * usual
    assert most("--tasks-per-request", "16") < 0.95 * usual


def test_settings_of_the_server_are_those_of_the_replicas(sized, monkeypatch):
    monkeypatch.setenv("ENGRAM_POLL_SECONDS", "10")
    monkeypatch.setenv("ENGRAM_RESIDENT_BYTES", "1MB")
    monkeypatch.setenv("ENGRAM_CACHE_BYTES", "0")
    row = sized()
    polls = next(each for each in row["store"] if each["what"].startswith("polls"))
    assert polls["requests"] == pytest.approx(row["plan"]["replicas"] / 10)
    held = {each["what"]: each["nbytes"] for each in row["memory"]}
    assert (held["tasks"], held["contexts"]) == (10**6, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{}", "is no file of costs"),
        ('[{"backbone": "b"}]', "is no file of costs"),
        ("[]", "holds no costs"),
    ],
)
def test_a_file_that_holds_no_costs_is_refused(tmp_path, content, message):
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=message):
        program.main(["--costs", str(path)])


# --- the page -------------------------------------------------------------------------------------


def test_the_page_names_only_settings_metrics_and_options_that_exist():
    page = read_page("explanation/scaling.md")
    settings = {PREFIX + field.upper() for field in Settings.model_fields}
    assert set(re.findall(r"ENGRAM_[A-Z_]+", page)) <= settings
    metrics = read_page("reference/metrics.md")
    named = set(re.findall(r"`((?:engram|process)_\w+)`", page))
    assert {name for name in named if f"`{name}`" not in metrics} == set()
    options = {*program.options()._option_string_actions, "--processes"}  # of `engram serve`
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page)) <= options
