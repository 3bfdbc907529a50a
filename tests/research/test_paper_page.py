"""The page about the paper's tables says what the figures say, whichever way they turn out."""

import copy
import itertools
import json
import math

import numpy as np
import pytest

from research.paper_page import (
    HEAD,
    PAPER,
    Regime,
    Row,
    best_memory,
    difference,
    render,
    rows_of,
)

IMAGES = 100
DATA = ("cifar100", "flowers102")
SERVABLE = [("head", 0), ("class", 0), ("memory", 1), ("memory", 5)]
EVERY = [("full fine-tuning", 0), *SERVABLE, ("full attention", 5)]


def run(regime, memory, right, *, rate=0.01, seed=0, val=0.5, loss=1.0):
    """A run that gets the first `right` of the test images right."""
    return {
        "regime": regime,
        "memory": memory,
        "rate": rate,
        "seed": seed,
        "val_accuracy": val,
        "val_loss": loss,
        "test": "1" * right + "0" * (IMAGES - right),
    }


def stage(table, data, runs):
    return {"table": table, "data": data, "seconds": 60.0, "runs": runs}


def made_up(**right):
    """Results of a whole run; each regime gets 60 images right unless `right` overrides it."""
    counter = itertools.count()
    stages = {
        f"stage {next(counter)}": stage(
            table,
            data,
            [run(kind, memory, right.get(f"{kind}_{memory}", 60)) for kind, memory in rows],
        )
        for table, rows in (("a", SERVABLE), ("b", EVERY))
        for data in DATA
    }
    counts = {"classes": 10, "train": 1200, "val": 100, "test": IMAGES}
    scale = {"classes": 10, "train": 120, "test": 100, "epochs": 3, "batch": 32, "seeds": 1}
    return {
        "command": "python -m research.paper_tables --b-epochs 3",
        "settings": {"tables": {"a": scale, "b": scale}, "rates": [0.003, 0.01]},
        "machine": {"threads": 2, "torch": "9.9"},
        "backbone": {
            "name": "made-up",
            "layers": 12,
            "width": 192,
            "parameters": 5_000_000,
            "flops": 2_500_000_000,
        },
        "data": {name: {"tables": {"a": counts, "b": counts}} for name in DATA},
        "costs": {
            "outputs": 10,
            "rows": [
                {"regime": kind, "memory": memory, "parameters": 1920 + memory, "flops": 12_500_000}
                for kind, memory in EVERY
            ],
        },
        "stages": stages,
    }


def line_of(page, title, after="## Table A"):
    """The cells of a row of the first table after a heading."""
    lines = page[page.index(after) :].splitlines()
    line = next(line for line in lines if line.startswith(f"| {title} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def one_line(page):
    return " ".join(page.split())


# --- words ----------------------------------------------------------------------------------------


# --- figures --------------------------------------------------------------------------------------


def test_rows_show_accuracy_interval_gain_and_the_paper():
    page = render(made_up(memory_5=70))
    cells = line_of(page, "5 memory tokens")
    assert cells[1] == f"{PAPER['CIFAR-100'][4]:.1f}"
    assert cells[2] == "70.0 (60.4 to 78.1)"  # Wilson, by hand
    assert cells[3].startswith("+10.0 (+")
    assert line_of(page, "head only")[3] == ""
    assert line_of(page, "full fine-tuning", after="## Table B")[1] == "91.8"
    assert line_of(page, "5 memory tokens, full attention", after="## Table B")[1] == ""


def test_every_row_of_the_paper_is_there():
    page = render(made_up())
    assert line_of(page, "20 memory tokens", after="## The paper's figures")[1:] == [
        "76.9",
        "50.0",
        "90.9",
        "54.1",
    ]


def test_the_page_is_a_pure_function_of_the_json():
    results = made_up(memory_1=70)
    before = copy.deepcopy(results)
    assert render(results) == render(json.loads(json.dumps(results)))
    assert results == before


# --- choices --------------------------------------------------------------------------------------


def test_the_rate_is_chosen_on_validation_whatever_the_test_says():
    runs = [
        run("head", 0, 90, rate=0.003, val=0.5),
        run("head", 0, 70, rate=0.01, val=0.6, loss=2.0),
        run("head", 0, 80, rate=0.03, val=0.6, loss=1.0),
    ]
    row = rows_of({"stages": {"one": stage("a", "cifar100", runs)}}, "a", "cifar100")[HEAD]
    assert row.rate == 0.03
    assert row.accuracy == 0.8


def test_starts_are_averaged_and_share_a_rate():
    runs = [
        run("memory", 5, 60, rate=0.01, seed=0, val=0.9),
        run("memory", 5, 80, rate=0.01, seed=1, val=0.1),
        run("memory", 5, 10, rate=0.03, seed=0, val=0.6),
        run("memory", 5, 10, rate=0.03, seed=1, val=0.6),
    ]
    results = {"stages": {"one": stage("a", "cifar100", runs)}}
    row = rows_of(results, "a", "cifar100")[Regime("memory", 5)]
    assert (row.rate, row.seeds) == (0.03, 2)
    runs[2]["val_accuracy"] = runs[3]["val_accuracy"] = 0.2
    row = rows_of(results, "a", "cifar100")[Regime("memory", 5)]
    assert row.accuracy == pytest.approx(0.7)
    assert row.interval == pytest.approx((0.6042, 0.7811), abs=1e-4)


def test_the_memory_size_spoken_of_is_chosen_on_validation():
    runs = [run("memory", 1, 60, val=0.7), run("memory", 5, 90, val=0.6), run("head", 0, 50)]
    rows = rows_of({"stages": {"one": stage("a", "cifar100", runs)}}, "a", "cifar100")
    assert best_memory(rows).regime == Regime("memory", 1)


def row_of(right):
    return Row(HEAD, 0.01, 1, 0.5, 1.0, np.array(right, dtype=float))


def test_the_paired_interval_is_that_of_agresti_and_min():
    one, other = row_of([1] * 12 + [0] * 88), row_of([0] * 9 + [1] * 3 + [1] * 4 + [0] * 84)
    only_one, only_other, count = 9 + 0.5, 4 + 0.5, 100 + 2
    middle = (only_one - only_other) / count
    spread = (only_one + only_other) - (only_one - only_other) ** 2 / count
    half = 1.959964 * math.sqrt(spread) / count
    gap = difference(one, other)
    assert gap.value == pytest.approx(0.05)
    assert (gap.low, gap.high) == pytest.approx((middle - half, middle + half), abs=1e-6)


def test_pairs_give_a_tighter_interval_than_the_two_alone():
    one, other = row_of([1] * 70 + [0] * 30), row_of([1] * 66 + [0] * 34)
    gap = difference(one, other)
    alone = sum(high - low for low, high in (one.interval, other.interval))
    assert gap.high - gap.low < alone / 3
