"""The metrics and their names."""

import re
from pathlib import Path

import pytest
from engram_server.engine import observer
from engram_server.observability.metrics import Metrics
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import REPOSITORY
from tests.documents import read_page
from tests.serving import photo


def value(metrics: Metrics, name: str, **labels) -> float:
    found = metrics.registry.get_sample_value(name, labels)
    assert found is not None, name
    return found


@pytest.fixture
def metrics():
    return Metrics(max_tasks=2, device_memory=lambda: {"cuda:0": 123})


def test_versions_beyond_the_cap_are_counted_together(metrics):
    for number in range(1, 6):
        metrics.record_task(observer.PREDICTIONS, "pets", number)
    metrics.record_task(observer.PREDICTIONS, "pets", 1)
    metrics.record_task(observer.TASK_LOAD_FAILURES, "scene", 1)
    assert value(metrics, "engram_predictions_total", task="pets", version="1") == 2
    assert value(metrics, "engram_predictions_total", task="pets", version="2") == 1
    assert value(metrics, "engram_predictions_total", task="other", version="") == 3
    assert value(metrics, "engram_task_load_failures_total", task="other", version="") == 1


def test_lag_runs_while_a_newer_generation_waits_to_be_served(metrics):
    metrics.record(observer.GENERATION_SEEN, 3)
    assert value(metrics, "engram_catalog_lag_seconds") > 0
    assert value(metrics, "engram_catalog_generation_seen") == 3
    metrics.record(observer.GENERATION_SERVED, 3)
    assert value(metrics, "engram_catalog_lag_seconds") == 0
    assert value(metrics, "engram_catalog_generation_served") == 3


def test_a_store_that_is_not_read_and_a_heart_that_is_silent_are_seen(metrics):
    for name in ("engram_store_staleness_seconds", "engram_heartbeat_age_seconds"):
        assert value(metrics, name) == 0, "nothing happened yet"
    metrics.record(observer.STORE_STALENESS)
    metrics.record(observer.HEARTBEAT_AGE)
    metrics.record(observer.STORE_FAILURES)
    for name in ("engram_store_staleness_seconds", "engram_heartbeat_age_seconds"):
        before = value(metrics, name)
        assert value(metrics, name) > before > 0
    assert value(metrics, "engram_store_failures_total") == 1


def test_device_memory_is_read_when_scraped(metrics):
    assert value(metrics, "engram_device_memory_bytes", device="cuda:0") == 123


def test_scrape_counts_what_happened(client, world):
    before = client.get("/metrics").text
    image = photo(300)
    for _ in range(2):
        assert client.post("/predict?tasks=pets,scene", content=image).status_code == 200
    client.get("/tasks/no-such-task")
    client.get("/no-such-route")
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")

    def total(text, name, **labels):
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def grew(name, **labels):
        return total(response.text, name, **labels) - total(before, name, **labels)

    route = {"route": "/predict", "method": "POST", "status": "200"}
    assert grew("engram_request_seconds_count", **route) == 2
    assert grew("engram_request_seconds_count", route="/tasks/{task}", status="404") == 1
    assert grew("engram_request_seconds_count", route="unmatched", status="404") == 1
    assert grew("engram_images_admitted_total") == 2
    assert grew("engram_predictions_total", task="pets", version="1") == 2
    assert grew("engram_cache_misses_total") == 1
    assert grew("engram_cache_hits_total") == 1
    for stage in ("queue", "decode", "forward"):
        assert grew("engram_stage_seconds_count", stage=stage) == 2
    assert grew("engram_batch_images_sum") == 2
    assert total(response.text, "process_resident_memory_bytes") > 1e6


def test_openmetrics_is_served_on_request(client):
    response = client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


def test_every_documented_reason_to_reject_is_used_and_tested():
    table = read_page("reference/metrics.md").partition("\n| `reason` |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    reasons = {reason for cell in cells for reason in re.findall(r"`(\w+)`", cell)}
    assert len(reasons) > 20
    source = "".join(file.read_text() for file in (REPOSITORY / "server").rglob("*.py"))
    others = [file for file in (REPOSITORY / "tests").rglob("test_*.py") if file != Path(__file__)]
    tests = "".join(file.read_text() for file in others)
    # Named by the limit of a key that was reached.
    source += '"key_requests" "key_rows" "key_images"'
    assert {reason for reason in reasons if f'"{reason}"' not in source} == set()
    assert {reason for reason in reasons if f'"{reason}"' not in tests} == set()
