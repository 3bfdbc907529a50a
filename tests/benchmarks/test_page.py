"""The performance page and the pictures say what the results say, and nothing else."""

import json

import pytest
from engram_server.embedded import BACKBONE
from engram_server.model import load_backbone

import benchmarks.measure
from benchmarks import figure, page
from benchmarks.measure import write_results
from benchmarks.scale import BATCH, pass_of_resident, points
from tests.documents import read_page

PEER_ROWS = [
    {
        "name": name,
        "beside": "LitServe",
        "tasks": tasks,
        "requests": 40,
        "rate": rate / tasks if name == "LitServe" else rate,
        "p50": 0.5,
        "p99": 0.9,
        "memory": 3 * 10**9,
        "ratio": 1.0 if name == "LitServe" else 1.1 * tasks,
    }
    for tasks in (1, 4, 16)
    for name, rate in (("LitServe", 14.0), ("Engram", 15.0), ("Engram, heads only", 15.5))
]


def results(rows, monkeypatch, tmp_path, name="peers"):
    monkeypatch.setattr(benchmarks.measure, "RESULTS", tmp_path)
    return {name: json.loads(write_results(name, rows).read_text())}


def test_every_figure_of_the_results_is_on_the_page(monkeypatch, tmp_path):
    failed = {"beside": "MLServer", "error": "NotStarted: no such module"}
    text = page.page(results([*PEER_ROWS, failed], monkeypatch, tmp_path))
    assert "| **Engram** | 16 | 15 | **17.6×** | 500 | 900 | 3.0 | 40 |" in text
    assert "| LitServe | 16 | 0.875 |  | 500 | 900 | 3.0 | 40 |" in text
    assert "MLServer could not be measured: NotStarted: no such module." in text
    assert "## Serving" not in text  # it was not measured
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))


def test_turns_that_were_not_alone_on_the_machine_are_marked_and_not_drawn(monkeypatch, tmp_path):
    slowed = [
        {**row, "beside": "Ray Serve", "rate": 0.5 * row["rate"]}
        | ({"name": "Ray Serve"} if row["name"] == "LitServe" else {})
        for row in PEER_ROWS
    ]
    text = page.page(results([*PEER_ROWS, *slowed], monkeypatch, tmp_path))
    assert "| Ray Serve | 16 † |" in text
    assert "| LitServe | 16 |" in text
    assert "† Something else was using the machine" in text
    drawn = figure.peers_chart([*PEER_ROWS, *slowed])
    assert set(drawn.series) == {"LitServe", "Engram", "Engram, heads only"}
    assert drawn.series["Engram"] == [15.0, 15.0, 15.0]


def test_the_page_says_when_and_on_what_it_was_measured(monkeypatch, tmp_path):
    rows = [{"curve": "tasks", "at": 16, "seconds": 0.5, "ratio": 1.2}]
    rows += [{"size": "context, float16", "bytes": 1850000}]
    text = page.page(results(rows, monkeypatch, tmp_path, "scale"))
    machine = results(rows, monkeypatch, tmp_path, "scale")["scale"]["machine"]
    for fact in ("date", "processor", "cores", "torch", "transformers", "python"):
        assert str(machine[fact]) in text
    assert "| 16 | 500 | 1.20 |" in text
    assert "| context, float16 | 1,850 |" in text


def test_precisions_and_warm_images_have_their_own_section(monkeypatch, tmp_path):
    ratios = {"plain": 0.96, "packed": 0.951, "int8": 0.61}
    rows = [{"shape": "ViT-B/32", "batch": 8, "tasks": 1} | ratios]
    rows += [{"shape": "ViT-B/32", "warm_tasks": 4, "plain": 4.0, "packed": 3.7, "int8": 2.5}]
    text = page.page(results(rows, monkeypatch, tmp_path, "precisions"))
    assert "| ViT-B/32 | 8 | 1 | 0.960 | 0.951 | 0.610 |" in text
    assert "| ViT-B/32, cold over warm | 1 | 4 | 4.00 | 3.70 | 2.50 |" in text


def test_few_of_many_resident_tasks_with_adapters_are_answered():
    backbone = load_backbone(BACKBONE)
    result = pass_of_resident(backbone, 7, tasks_per_image=2, rank=3)()
    assert len(result.logits) == 2
    assert all(len(each.images) == BATCH for each in result.logits)


def test_a_curve_is_reported_in_multiples_of_its_first_point():
    calls = []
    found = points("batch", {1: lambda: calls.append(1), 8: lambda: calls.append(8)}, 0.0)
    assert [point.at for point in found] == [1, 8]
    assert found[0].ratio == 1.0
    assert found[1].ratio == pytest.approx(found[1].seconds / found[0].seconds)
    assert calls.count(1) == calls.count(8) > 3


def test_the_written_page_is_one_that_the_program_writes():
    text = read_page("reference/performance.md")
    assert text.startswith(page.page({}).rstrip())
    titles = {f"## {title}" for title, _, _ in page._SECTIONS.values()}
    assert {line for line in text.splitlines() if line.startswith("## ")} <= titles


def test_the_latency_chart_is_drawn_from_the_published_table():
    chart = figure.latency()
    assert chart.counts == [1, 4, 16]
    assert {"Engram", "LitServe", "Ray Serve"} <= chart.series.keys()
    assert chart.series["LitServe"][2] > chart.series["Engram"][2] > 0
    committed = (figure.PAGE.parents[1] / "images" / "latency.svg").read_text(encoding="utf-8")
    assert committed == figure.draw(figure.latency())
