"""The simulated fleet does what queues, caches and servers are known to do."""

import itertools
import json
import math
import re
from collections import OrderedDict
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

import benchmarks.measure
from benchmarks.capacity import __main__ as program
from benchmarks.capacity import sizing
from benchmarks.capacity.costs import (
    NOTHING,
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
from benchmarks.capacity.fleet import Clock, Lru, Model, Processor, simulate
from benchmarks.capacity.many_tasks import task_name, write_log
from benchmarks.capacity.measuring import shape_of
from benchmarks.capacity.passes import random_weights
from benchmarks.capacity.sizing import (
    best_rate,
    lru_hits,
    model_of,
    saturation,
    store_load,
    traffic_for,
)
from benchmarks.capacity.traffic import Mix, Traffic, Zipf, draw
from server.api.waiting import _PAUSE_SECONDS
from server.engine.observer import NullObserver
from server.engine.replicas import Replicas
from server.engine.residency import Loaded, Residency, Slot
from server.model import MultiTaskViT
from server.model.tasks import Task, prepare
from server.settings import PREFIX, Settings
from task_store import Heartbeat, TaskStore, open_store
from task_store.objects import LocalObjects
from tests.documents import read_page

# One job a batch, nothing else takes time, nobody is refused.
QUEUE = Model(
    passes=replace(NOTHING, batch=1.0),
    base_rows=10,
    cores=8,
    pass_cores=1,
    decode=0.0,
    look_up=0.0,
    request=0.0,
    poll=0.0,
    poll_every=1e9,
    reload=0.0,
    context_bytes=100,
    task_bytes=10,
    budget_rows=1,
    queue_images=10**9,
    decode_threads=4,
    cache_bytes=0,
)
# About what a small backbone costs on two cores.
SERVER = replace(
    QUEUE,
    passes=PassCost(0.001, 0.001, 6e-5, 5e-5, 5e-4, 5e-5),
    base_rows=65,
    cores=2,
    pass_cores=2,
    decode=0.003,
    look_up=1e-4,
    request=1e-3,
    poll=0.02,
    poll_every=1.0,
    budget_rows=4096,
    queue_images=64,
    cache_bytes=100 * 100,
)
COLD = Mix(tasks=100, hit_rate=0.0)
COSTS = Costs(
    backbone="made-up",
    device="cpu",
    processor="made-up",
    cores=2,
    threads=2,
    memory=2**34,
    gpu_memory=0,
    shape=Shape(6, 65, 192, 192, 192, 4, 10**7),
    passes=SERVER.passes,
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


def requests(mix=COLD, count=4000, seed=0, **more):
    return draw(mix, count, seed, **more)


def conserved(outcome):
    parts = (outcome.answered, outcome.refused, outcome.lost, outcome.in_flight)
    return outcome.arrived == sum(parts)


# --- queues ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_worker_waits_as_an_m_d_1_queue(load):
    """Poisson arrivals, a fixed service time: the mean wait is ρ / (2 (1 - ρ)) services."""
    outcome = simulate(QUEUE, requests(count=20_000).at(load), 1)
    assert outcome.seconds.mean() - 1 == pytest.approx(load / (2 * (1 - load)), rel=0.08)
    assert outcome.busy == pytest.approx(load, rel=0.03)
    assert outcome.rate == pytest.approx(load, rel=0.03)


def test_overload_is_refused_and_the_wait_of_the_admitted_is_bounded():
    model = replace(QUEUE, queue_images=20)
    outcome = simulate(model, requests().at(3.0), 1)
    assert conserved(outcome)
    assert outcome.rate == pytest.approx(1.0, rel=0.01)
    assert outcome.refused_share == pytest.approx(2 / 3, rel=0.05)
    # Twenty before it, one second each, the one that runs included.
    assert outcome.seconds.max() <= 20 + 1e-6
    assert outcome.percentile(50) > 18


def test_a_server_in_overload_answers_as_much_as_it_can_and_no_more():
    traffic = requests()
    most = saturation(SERVER, traffic)
    twice = simulate(SERVER, traffic.at(2 * most), 1)
    assert twice.rate == pytest.approx(most, rel=0.1)
    assert twice.refused_share == pytest.approx(0.5, abs=0.05)
    assert twice.busy > 0.95
    # Sixty-four admitted at a time, and the batch that runs while one waits.
    assert twice.percentile(99) < 2.5 * SERVER.queue_images / most


@pytest.mark.parametrize("until", [0.5, 3.0, math.inf])
def test_no_request_disappears(until):
    traffic = requests(count=600).at(400.0)
    outcome = simulate(SERVER, traffic, 2, deaths=[0.4], until=until)
    assert conserved(outcome)
    assert outcome.arrived == np.sum(traffic.times <= until)
    assert until < math.inf or outcome.in_flight == 0


def test_what_wants_more_cores_than_there_are_slows_down_alike():
    clock, ended = Clock(), {}
    processor = Processor(clock, 2)

    def begin(name, seconds, cores):
        processor.run(seconds, cores, lambda: ended.update({name: clock.now}))

    begin("pass", 1.0, 2)
    clock.at(0.5, lambda: begin("decode", 0.2, 1))  # three wanted of two: two thirds of the speed
    clock.run()
    assert processor.used == pytest.approx(2 * 1.1)
    assert ended == {"decode": pytest.approx(0.8), "pass": pytest.approx(1.1)}


def test_batches_are_the_servers_own():
    """They grow with the load, keep to the budget, and share what is the same image."""
    budget = 5 * (SERVER.base_rows + 4)
    model = replace(SERVER, budget_rows=budget)
    mix = replace(COLD, tasks_per_request=1.0)
    most = saturation(model, requests(mix))
    idle, busy = (simulate(model, requests(mix).at(share * most), 1) for share in (0.1, 1.5))
    assert idle.batch_images == pytest.approx(1.0, abs=0.1)
    assert busy.batch_images == pytest.approx(budget // (SERVER.base_rows + 1), abs=0.1)
    assert busy.batch_rows <= budget

    same = replace(requests(mix), images=np.zeros(4000, np.int64))
    assert simulate(model, same.at(1.5 * most), 1).batch_images == 1.0
    assert simulate(model, same.at(1.5 * most), 1).rate > 1.1 * busy.rate


# --- fleets ---------------------------------------------------------------------------------------


def test_more_replicas_are_never_worse():
    model = replace(SERVER, poll=0.0)  # whom a poll delays is chance
    traffic = requests().at(300.0)
    found = [simulate(model, traffic, replicas) for replicas in (1, 2, 3, 4, 6, 8)]
    for fewer, more in itertools.pairwise(found):
        assert more.percentile(99) <= 1.02 * fewer.percentile(99)
        assert more.refused <= fewer.refused
    assert found[0].refused > 0
    assert found[-1].refused == 0


def test_the_same_seed_gives_the_same_outcome_and_another_does_not():
    def play(seed):
        mix = Mix(tasks=100, images=500)
        return simulate(SERVER, requests(mix, seed=seed, earlier=100).at(100.0), 2)

    one, again, other = play(1), play(1), play(2)
    assert one.seconds.tolist() == again.seconds.tolist()
    assert one.seconds.tolist() != other.seconds.tolist()


def test_a_dead_replica_loses_what_it_had_and_the_others_go_on():
    traffic = requests().at(200.0)
    died = float(traffic.times[-1]) / 2
    calm = simulate(SERVER, traffic, 4)
    outcome = simulate(SERVER, traffic, 4, deaths=[died])
    assert conserved(outcome)
    assert calm.lost == 0
    assert 0 < outcome.lost <= SERVER.queue_images + 1
    assert outcome.answered + outcome.lost == calm.answered
    assert outcome.percentile(99, died) > calm.percentile(99, died)


def test_with_the_last_replica_dead_all_is_lost():
    outcome = simulate(SERVER, requests(count=500).at(100.0), 1, deaths=[1.0])
    assert conserved(outcome)
    assert outcome.lost > 300


def test_the_best_rate_keeps_the_promise_and_no_higher_one_would():
    traffic = requests()
    most = saturation(SERVER, traffic)
    each = best_rate(SERVER, traffic, 0.1, most, 2, "least")
    assert simulate(SERVER, traffic.at(2 * each), 2).percentile(99) <= 0.1
    assert simulate(SERVER, traffic.at(2 * 1.05 * each), 2).percentile(99) > 0.1
    assert best_rate(SERVER, traffic, 0.001, most, 2, "least") is None


# --- caches ---------------------------------------------------------------------------------------


def plain_lru(stream, capacity):
    """Hits of each access, the slow and obvious way."""
    held, hits = OrderedDict(), []
    for key in stream:
        hits.append(key in held)
        held[key] = None
        held.move_to_end(key)
        if len(held) > capacity:
            held.popitem(last=False)
    return hits


def test_the_cache_hits_as_an_lru_does():
    stream = Zipf(50, 1.0).draw(np.random.default_rng(0), 2000).tolist()
    cache = Lru(10 * 8, 8)
    expected = plain_lru(stream, 10)
    assert [cache.touch(str(number)) for number in stream] == expected
    hits = lru_hits(10 * 8, 8, stream[:1000], stream[1000:])
    assert hits == pytest.approx(np.mean(expected[1000:]))


def test_tasks_leave_the_device_in_the_order_of_the_cache():
    task = Task(torch.zeros(1, 1), None)
    residency = Residency(10 * task.nbytes, NullObserver())
    slots = [Slot(str(number)) for number in range(50)]
    hits = []
    stream = Zipf(50, 1.0).draw(np.random.default_rng(0), 2000).tolist()
    for tick, number in enumerate(stream, start=1):
        slot = slots[number]
        slot.used = tick
        hits.append(slot.loaded is not None)
        if slot.loaded is None:
            on = {torch.device("cpu"): task}
            residency.keep(slot, Loaded(slot.digest, "single_label", (), on))
    assert hits == plain_lru(stream, 10)


def test_a_fleets_hit_rate_is_that_of_its_caches():
    """One request at a time, so that order is all that counts."""
    mix = Mix(tasks=10, images=300)
    traffic = requests(mix).at(1.0)
    hits = plain_lru(traffic.images.tolist(), SERVER.cache_bytes // SERVER.context_bytes)
    outcome = simulate(SERVER, traffic, 1)
    assert outcome.hit_rate == pytest.approx(np.mean(hits[800:]), abs=0.01)


def test_images_that_always_go_to_the_same_replica_are_cached_once():
    traffic = requests(Mix(tasks=10, images=300), earlier=20_000).at(8.0)
    by_image = simulate(SERVER, traffic, 4, routing="image")
    anywhere = simulate(SERVER, traffic, 4, routing="least")
    assert by_image.hit_rate > 0.98  # 4 caches of 100 for 300 images
    assert anywhere.hit_rate < 0.8


def test_a_given_hit_rate_is_what_comes_out_and_makes_requests_cheaper():
    low, high = (
        simulate(SERVER, requests(replace(COLD, hit_rate=rate)).at(50.0), 1) for rate in (0.2, 0.9)
    )
    assert low.hit_rate == pytest.approx(0.2, abs=0.03)
    assert high.hit_rate == pytest.approx(0.9, abs=0.03)
    assert high.percentile(50) < low.percentile(50)
    assert high.busy < low.busy


def test_tasks_that_do_not_fit_are_loaded_by_those_who_ask():
    mix = Mix(tasks=1000, hit_rate=0.0)
    slow = replace(SERVER, reload=0.01)
    every, half = (
        simulate(replace(slow, resident_bytes=kept * slow.task_bytes), requests(mix).at(40.0), 1)
        for kept in (1000, 300)
    )
    assert every.percentile(99) < half.percentile(99)
    assert simulate(slow, requests(mix).at(40.0), 1).seconds.tolist() == every.seconds.tolist()


# --- traffic --------------------------------------------------------------------------------------


def test_traffic_is_what_was_asked_for():
    traffic = requests(Mix(tasks=1000, tasks_per_request=3.0, images=50), count=5000).at(20.0)
    assert isinstance(traffic, Traffic)
    assert len(traffic) / traffic.times[-1] == pytest.approx(20.0)
    assert np.mean([len(tasks) for tasks in traffic.tasks]) == pytest.approx(3.0, rel=0.05)
    assert all(len(set(tasks)) == len(tasks) >= 1 for tasks in traffic.tasks)
    assert traffic.images.max() < 50
    asked = np.bincount([task for tasks in traffic.tasks for task in tasks])
    assert asked[0] / asked[9] == pytest.approx(10, rel=0.4)


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


# --- the store ------------------------------------------------------------------------------------


class CountingObjects(LocalObjects):
    def __init__(self, folder):
        super().__init__(folder, create=False)
        self.asked = []

    def get(self, path):
        self.asked.append(f"GET {path.split('/')[0]}")
        return super().get(path)

    def put(self, path, data):
        self.asked.append(f"PUT {path.split('/')[0]}")
        super().put(path, data)

    def listing(self, prefix, *, after=None):
        self.asked.append(f"LIST {prefix}")
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


def test_what_replicas_ask_of_the_store_is_what_is_counted(store):
    """A poll is one GET, a heartbeat one PUT, a look for all of them a LIST and the others' GET."""
    objects = CountingObjects(store)
    task_store = TaskStore(objects)
    objects.asked.clear()
    task_store.refresh()
    assert objects.asked == ["GET log"]

    objects.asked.clear()
    replicas = [
        Replicas(task_store.heartbeats, lambda n=n: beat(n), NullObserver()) for n in (0, 1, 2)
    ]
    for replica in replicas:
        replica.beat()
    assert objects.asked == ["PUT replicas"] * 3
    objects.asked.clear()
    assert len(replicas[0].live()) == 3
    assert sorted(objects.asked) == ["GET replicas"] * 2 + ["LIST replicas"]

    settings = Settings(poll_seconds=2.0, heartbeat_seconds=4.0)
    polls, beats, publish, waiting = store_load(COSTS, settings, 3)
    assert (polls.requests, beats.requests, publish.requests) == (1.5, 0.75, 9)
    assert waiting.requests == pytest.approx(3 / _PAUSE_SECONDS)


# --- the program ----------------------------------------------------------------------------------


SMALL = ["--tasks", "30", "--images", "500", "--requests", "1500", "--rate", "500"]


@pytest.fixture
def results(monkeypatch, tmp_path):
    """`results(*arguments)`: the program's rows."""
    monkeypatch.setattr(benchmarks.measure, "RESULTS", tmp_path)
    monkeypatch.setenv("ENGRAM_QUEUE_IMAGES", "64")  # so few requests would not fill a larger one
    monkeypatch.setattr(sizing, "_HALVINGS", 4)  # near enough here, and twice as quick

    def run(*arguments):
        program.main([*SMALL, *arguments])
        name = "capacity_costs" if "--costs" in arguments else "capacity"
        return json.loads((tmp_path / f"{name}.json").read_text())["rows"]

    return run


@pytest.mark.long
def test_the_program_measures_validates_and_answers(results, folder_of, tmp_path, capsys):
    costs = str(tmp_path / "costs.json")
    backbone = str(folder_of("vit"))
    (row,) = results("--backbone", backbone, "--seconds", "0.5", "--write-costs", costs)
    assert {each["figure"] for each in row["validation"]} >= {"answers a second", "p50, ms"}
    for size in (row["costs"]["task"], row["costs"]["context"], *row["costs"]["sizes"]):
        assert size["measured"] == size["computed"], size
    for cost in ("load", "reload", "request", "engine_request", "look_up"):
        assert row["costs"][cost] > 0, cost
    assert row["costs"]["catalog"]["tasks"] == 30
    printed = capsys.readouterr().out
    assert "measured" in printed
    assert "computed" in printed

    # The same costs from the file give the same answers, and nothing is measured.
    (again,) = results("--costs", costs)
    assert again["validation"] == []
    assert {**again, "validation": row["validation"]} == row


@pytest.mark.long
def test_a_fleet_is_sized_on_the_costs_of_another_machine(results, tmp_path):
    path = tmp_path / "costs.json"
    write_costs(path, [COSTS])
    assert read_costs(path) == [COSTS]

    def size(*more):
        (row,) = results("--costs", str(path), *more)
        return row

    row = size()
    assert row["plan"]["p99"] <= 0.25
    assert row["plan"]["refused_share"] <= 0.001
    assert row["death"]["lost"] > 0
    rates = [each for _, _, each in row["rates"][:3]]  # with 0, 50 and 90 % of contexts there
    assert rates == sorted(rates)
    hits = [each["hits"] for each in row["tasks"]]
    assert hits == sorted(hits)
    assert hits[-1] == 1.0
    limits = [each["used"] for each in row["limits"]]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] <= 1.0
    held = {each["what"]: each["nbytes"] for each in row["memory"]}
    assert held["tasks"] == 30 * COSTS.task.measured

    twice = size("--rate", "2000")
    assert twice["plan"]["replicas"] > row["plan"]["replicas"]
    assert "plan" not in size("--p99-ms", "1")


def test_what_makes_requests_dearer_lowers_what_a_replica_can_do():
    def most(*given):
        question = program.question_of(program.options().parse_args(given))
        question = replace(question, requests=1500)
        model = model_of(COSTS, Settings(queue_images=64), question.photo)
        return saturation(model, traffic_for(model, question, 1))

    usual = most()
    assert most("--photo", "4032x3024") < 0.5 * usual
    assert most("--hit-rate", "0.9") > 1.5 * usual
    assert most("--images", "1000") > 1.5 * usual
    assert most("--image-skew", "2") > 1.5 * usual
    assert most("--tasks-per-request", "16") < 0.95 * usual
    assert most("--task-skew", "3") > usual  # fewer distinct tasks in a batch


@pytest.mark.slow
def test_settings_of_the_server_are_those_of_the_simulated_ones(results, tmp_path, monkeypatch):
    path = tmp_path / "costs.json"
    write_costs(path, [COSTS])
    monkeypatch.setenv("ENGRAM_POLL_SECONDS", "10")
    monkeypatch.setenv("ENGRAM_RESIDENT_BYTES", "1MB")
    monkeypatch.setenv("ENGRAM_CACHE_BYTES", "0")
    (row,) = results("--costs", str(path))
    polls = next(each for each in row["store"] if each["what"].startswith("polls"))
    assert polls["requests"] == pytest.approx(row["plan"]["replicas"] / 10)
    held = {each["what"]: each["nbytes"] for each in row["memory"]}
    assert (held["tasks"], held["contexts"]) == (10**6, 0)
    assert row["plan"]["hit_rate"] < 0.1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{}", "is no file of costs"),
        ('[{"backbone": "b"}]', "is no file of costs"),
        ("[]", "holds no costs"),
    ],
)
def test_a_file_that_holds_no_costs_is_told(tmp_path, content, said):
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=said):
        program.main(["--costs", str(path)])


# --- the page -------------------------------------------------------------------------------------


def test_the_page_names_only_settings_metrics_and_options_that_exist():
    page = read_page("explanation/scaling.md")
    settings = {PREFIX + field.upper() for field in Settings.model_fields}
    assert set(re.findall(r"ENGRAM_[A-Z_]+", page)) <= settings
    metrics = read_page("reference/metrics.md")
    named = set(re.findall(r"`((?:engram|process)_\w+)`", page))
    assert {name for name in named if f"`{name}`" not in metrics} == set()
    options = set(program.options()._option_string_actions)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", page)) <= options
