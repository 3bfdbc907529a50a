"""The benchmark of GPUs, on a CPU: that it runs what it says, and writes nothing without a GPU."""

import copy
import json
import sys
from functools import partial

import pytest
import torch

import benchmarks.measure
from benchmarks import gpu
from benchmarks.measure import write_results
from benchmarks.scale import photos
from tests.documents import read_page


def called(run, example):
    return run


@pytest.fixture
def rows(hugging_face, backbone_of):
    model, backbone = copy.deepcopy(hugging_face("vit")).bfloat16(), backbone_of("vit")
    bench = gpu.Bench(backbone, torch.device("cpu"), torch.bfloat16)
    with torch.no_grad():
        pixels = photos(backbone, 3)
        found = gpu.measure(bench, model, called, partial(gpu.plain, model), pixels, (1, 2), 0.0)
    return [{"shape": "tiny"} | row for row in found]


PROCESSES = [
    {"photos": "new", "processes": count, "rate": 1000.0 * count, "over_one": count, "cpu_ms": 4.0}
    for count in (1, 2)
]


def test_every_way_to_run_a_batch_is_measured_and_right(rows):
    assert [(row["batch"], row["tasks"]) for row in rows] == [(3, 1), (3, 2)]
    for row in rows:
        assert all(row[name] > 0 for name in gpu._COLUMNS)
        assert row["difference"] < 0.05


def test_the_page_has_every_row_and_the_machine(rows, monkeypatch, tmp_path):
    monkeypatch.setattr(benchmarks.measure, "RESULTS", tmp_path)
    results = json.loads(write_results("gpu", rows + PROCESSES, device="a GPU").read_text())
    text = gpu.page(results)
    assert "| tiny | 3 | 2 |" in text
    assert "| new | 2 | 2,000 | 2.00 | 4.00 |" in text
    assert f"of torch on a GPU; Python {results['machine']['python']}" in text.replace("\n", " ")
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))


def test_without_a_gpu_one_sentence_is_said_and_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(benchmarks.measure, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == (
        "torch sees no GPU here, so there is nothing to measure and nothing was written."
    )
    assert list(tmp_path.iterdir()) == []


def test_the_written_page_is_one_that_the_program_writes():
    assert read_page("reference/performance-gpu.md").startswith(gpu.page(None).rstrip())
