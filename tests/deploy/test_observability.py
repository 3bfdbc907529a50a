"""The dashboard and the alerts: metrics that exist, queries that parse, and panels that fill."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from engram_bundle import TaskBundle
from engram_server import embedded
from engram_server.observability.metrics import PROCESS_UP, Metrics

from tests.conftest import PHOTOS, REPOSITORY
from tests.deploy.files import DEPLOY, read_yaml, run
from tests.e2e.server_process import ServerProcess, free_port, serving
from tests.tools import find_tool

DASHBOARD = json.loads((DEPLOY / "grafana" / "engram.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
PROMETHEUS = DEPLOY / "prometheus"
ALERTS = [
    rule for group in read_yaml(PROMETHEUS / "alerts.yml")["groups"] for rule in group["rules"]
]
VARIABLES = {"$job": ".*", "$instance": ".*", "$__rate_interval": "10s", "$__range": "1m"}

# Made by Prometheus itself: the series of every target, and the labels of every series.
OF_PROMETHEUS = {"up"}
# Of a server with several processes.
OF_PROCESSES = {PROCESS_UP.name}
OF_TARGETS = {"job", "instance", "le"}

# Empty without a failed task, without a GPU, and without shadows and many images.
EMPTY_HERE = {
    "engram_task_load_failures_total",
    "engram_device_memory_bytes",
    "engram_answers_not_finite_total",
    *("engram_shadow_images_total", "engram_shadow_agreements_total"),
    *("engram_shadows_dropped_total", "engram_feedback_total", "engram_feedback_right_total"),
    *("engram_drift_distance", "engram_drift_limit", "engram_class_share_divergence"),
    "engram_out_of_distribution_share",
}


def concrete(query: str) -> str:
    """A query with the dashboard's variables filled in."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query
    return query


QUERIES = [
    pytest.param(concrete(target["expr"]), id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
] + [pytest.param(rule["expr"], id=rule["alert"]) for rule in ALERTS]


def exposed() -> set[str]:
    """The names of all series that a server can have."""
    names = set()
    for family in Metrics(max_tasks=1).registry.collect():
        endings = {"histogram": ["_bucket", "_sum", "_count"], "counter": ["_total"]}
        names |= {family.name + ending for ending in endings.get(family.type, [""])}
    return names


def labels() -> set[str]:
    """The labels in docs/reference/metrics.md, which a test of its own compares with the server."""
    text = (REPOSITORY / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    columns = re.findall(r"^\| `engram_\w+` \| \w+ \| (.*?) \|", text, re.M)
    return {name for column in columns for name in re.findall(r"`(\w+)`", column)}


def read_query(query: str) -> tuple[set[str], set[str]]:
    """The metrics and the labels that a query names."""
    query = re.sub(r'"[^"]*"', '""', query)
    matchers = re.findall(r"\{(.*?)\}", query)
    groupings = re.findall(r"\bby \((.*?)\)", query)
    used = {name for part in matchers for name in re.findall(r"(\w+)\s*[=!]", part)}
    used |= {name.strip() for part in groupings for name in part.split(",")}
    rest = re.sub(r"\{.*?\}|\[.*?\]|\bby \(.*?\)|\b\d[\w.]*", "", query)
    words = re.findall(r"[a-z_]\w*(?!\w|\s*\()", rest)
    return {word for word in words if word not in {"or", "offset", "sum"}}, used


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_names_only_metrics_and_labels_that_exist(query):
    metrics, used = read_query(query)
    assert metrics
    assert metrics <= exposed() | OF_PROMETHEUS | OF_PROCESSES
    assert used <= labels() | OF_TARGETS


def test_the_variables_of_the_dashboard_are_labels_of_a_metric_that_exists():
    listed = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "query"]
    assert {f"${each['name']}" for each in listed} <= VARIABLES.keys()
    for variable in listed:
        found = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", variable["query"]["query"])
        assert found is not None
        assert found[1] in exposed()
        assert found[2] in OF_TARGETS


def test_a_metric_that_does_not_exist_would_be_noticed():
    metrics, used = read_query('sum by (colour) (rate(engram_cats{a="b"}[5m])) / scalar(up) > 0.01')
    assert metrics == {"engram_cats", "up"}
    assert used == {"colour", "a"}


def test_every_metric_of_the_server_is_on_the_dashboard_or_named_here():
    def families(names: set[str]) -> set[str]:
        return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}

    queries = [concrete(target["expr"]) for panel in PANELS for target in panel["targets"]]
    shown = set().union(*(read_query(query)[0] for query in queries))
    ours = {name for name in exposed() if name.startswith("engram_")}
    assert families(ours) - families(shown) == {
        "engram_images_admitted_total",  # batches count their images
        "engram_cache_contexts",  # their bytes are shown
        "engram_catalog_generation_seen",  # the lag is shown
        "engram_audit_sequence",  # to compare with what `engram audit verify` says
    }


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    occupied_cells = set()
    for place in (panel["gridPos"] for panel in DASHBOARD["panels"]):
        cells = {
            (place["x"] + column, place["y"] + line)
            for column in range(place["w"])
            for line in range(place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & occupied_cells
        occupied_cells |= cells


def test_grafana_finds_the_dashboard_where_the_compose_file_puts_it():
    volumes = read_yaml(REPOSITORY / "docker-compose.yml")["services"]["grafana"]["volumes"]
    provider = read_yaml(DEPLOY / "grafana" / "provisioning" / "dashboards" / "engram.yml")
    folder = provider["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/engram.json:{folder}/engram.json:ro" in volumes


def test_every_query_of_the_dashboard_parses(tmp_path):
    rules = [
        {"record": f"panel:{number}", "expr": concrete(target["expr"])}
        for number, target in enumerate(t for panel in PANELS for t in panel["targets"])
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    run(find_tool("promtool"), "check", "rules", file)


def test_the_configuration_of_prometheus_is_correct():
    run(find_tool("promtool"), "check", "config", "--syntax-only", PROMETHEUS / "prometheus.yml")
    run(find_tool("promtool"), "check", "rules", PROMETHEUS / "alerts.yml")


def test_alerts_fire_on_what_they_should_and_on_nothing_else():
    run(find_tool("promtool"), "test", "rules", PROMETHEUS / "alerts_test.yml")


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    cases = [
        (case["alertname"], bool(case.get("exp_alerts")))
        for test in read_yaml(PROMETHEUS / "alerts_test.yml")["tests"]
        for case in test["alert_rule_test"]
    ]
    assert set(cases) == {(rule["alert"], fires) for rule in ALERTS for fires in (True, False)}


# --- a real Prometheus and a real server ----------------------------------------------------------

KEY = "key-of-the-scraper"


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[httpx.Client]:
    """Prometheus with our configuration, but for the target, the key's file and the pace."""
    config = read_yaml(PROMETHEUS / "prometheus.yml")
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    (job,) = config["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [target]}]
    (folder / "key").write_text(KEY)
    job["authorization"]["credentials_file"] = str(folder / "key")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                find_tool("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60) as client:
            yield client
    finally:
        process.terminate()
        process.wait(timeout=60)


def make_traffic(server: ServerProcess, number: int) -> None:
    """Increment the metrics that need no failure."""
    headers = {"X-API-Key": KEY}
    photo = (PHOTOS / "rocket.jpg").read_bytes()
    demo = TaskBundle.load(embedded.TASKS / "cifar10.safetensors")
    manifest = demo.manifest.model_copy(update={"description": f"publish {number}"})
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        predicted = client.put("/predict?tasks=base,cifar10", content=photo)
        assert predicted.status_code == 200, predicted.text
        # In some rounds the deadline passes while the image waits.
        client.put("/predict", content=photo, headers={"X-Deadline-Ms": f"{2 ** (number % 6)}"})
        bundle = dataclasses.replace(demo, manifest=manifest).to_bytes()
        published = client.put("/tasks/again", content=bundle)
        assert published.status_code == 201, published.text


def has_value(client: httpx.Client, query: str) -> bool:
    try:
        answer = client.get("/query", params={"query": query})
    except httpx.TransportError:
        return False  # still starting
    if answer.status_code == 503:
        return False
    assert answer.status_code == 200, answer.text
    series = answer.json()["data"]["result"]
    return any(math.isfinite(float(each["value"][1])) for each in series)


@pytest.mark.long
def test_every_panel_shows_what_a_server_does(tmp_path):
    find_tool("prometheus")
    waiting = [
        concrete(target["expr"])
        for panel in PANELS
        for target in panel["targets"]
        if not read_query(concrete(target["expr"]))[0] & EMPTY_HERE
    ]
    with (
        serving(tmp_path, api_key=KEY) as server,
        prometheus(tmp_path, server.url.removeprefix("http://")) as client,
    ):
        deadline = time.monotonic() + 200
        numbers = itertools.count()
        while waiting and time.monotonic() < deadline:
            make_traffic(server, next(numbers))
            waiting = [query for query in waiting if not has_value(client, query)]
        assert not waiting
        groups = client.get("/rules").json()["data"]["groups"]
        states = {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}
        assert states == {rule["alert"]: "ok" for rule in ALERTS}
