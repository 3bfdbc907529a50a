"""The metrics of several processes in one scrape."""

import asyncio
import os
import socket

import pytest
from engram_server.engine import observer
from engram_server.observability.metrics import CONNECTIONS, REQUESTS, Metrics
from engram_server.processes import siblings
from engram_server.processes.process import Process
from engram_server.processes.siblings import Siblings
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

OPENMETRICS = "application/openmetrics-text"


class Rig:
    """The metrics of processes, each in its state."""

    def __init__(self, folder: str, count: int) -> None:
        self.metrics = {number: Metrics(max_tasks=10) for number in range(1, count + 1)}
        self.siblings = {
            number: Siblings(self._process(number, count, folder), metrics)
            for number, metrics in self.metrics.items()
        }

    @staticmethod
    def _process(number: int, count: int, folder: str) -> Process:
        return Process(number, count, -1, -1, folder, alone=False, announce=False)

    def scrape(self, number: int, accept: str = "", absent: tuple[int, ...] = ()):
        """The families that one process renders, by name."""

        async def scenario() -> bytes:
            present = [each for n, each in self.siblings.items() if n not in absent]
            for each in present:
                await each.start()
            try:
                body, _ = await self.siblings[number].render(accept)
                return body
            finally:
                for each in present:
                    await each.stop()

        text = asyncio.run(scenario()).decode()
        families = list((parse_openmetrics if accept else parse_text)(text))
        names = [family.name for family in families]
        assert len(names) == len(set(names)), "a family is written once"
        return {family.name: family for family in families}


@pytest.fixture
def rig(tmp_path) -> Rig:
    return Rig(str(tmp_path), 3)


def values(family, name: str) -> dict[str, float]:
    return {s.labels["process"]: s.value for s in family.samples if s.name == name}


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_one_scrape_has_the_metrics_of_all_processes(rig, accept):
    for number, metrics in rig.metrics.items():
        metrics.record(observer.IMAGES_ADMITTED, 10 * number)
        metrics.watch(CONNECTIONS, lambda number=number: number)
        metrics.record(REQUESTS, 0.02, "/predict", "POST", "200")
    found = rig.scrape(2, accept)
    admitted = values(found["engram_images_admitted"], "engram_images_admitted_total")
    assert admitted == {"1": 10, "2": 20, "3": 30}
    connections = values(found["engram_connections"], "engram_connections")
    assert connections == {"1": 1, "2": 2, "3": 3}
    requests = values(found["engram_request_seconds"], "engram_request_seconds_count")
    assert requests == {"1": 1, "2": 1, "3": 1}
    assert values(found["engram_process_up"], "engram_process_up") == {"1": 1, "2": 1, "3": 1}


def test_every_series_names_its_process(rig):
    for family in rig.scrape(1).values():
        assert all("process" in sample.labels for sample in family.samples), family.name


def test_a_process_that_does_not_run_is_reported_and_its_gauges_are_absent(rig):
    found = rig.scrape(1, absent=(3,))
    assert values(found["engram_process_up"], "engram_process_up") == {"1": 1, "2": 1, "3": 0}
    assert values(found["engram_connections"], "engram_connections").keys() == {"1", "2"}


def test_a_process_that_hangs_does_not_hide_the_others(rig, tmp_path, monkeypatch):
    monkeypatch.setattr(siblings, "TIMEOUT_SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as hanging:
        hanging.bind(str(tmp_path / "2.socket"))
        hanging.listen()
        found = rig.scrape(1, absent=(2,))
    assert values(found["engram_process_up"], "engram_process_up") == {"1": 1, "2": 0, "3": 1}


def test_a_socket_that_a_killed_process_left_is_replaced(rig, tmp_path):
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "2.socket"))
    assert os.path.exists(tmp_path / "2.socket")
    up = values(rig.scrape(1)["engram_process_up"], "engram_process_up")
    assert up == {"1": 1, "2": 1, "3": 1}
