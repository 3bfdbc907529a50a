"""KServe's own REST client, as it comes from PyPI, against a real server process.

It has no metadata and no repository calls; what it has is tried. The client lives in an environment
of its own, which `make test-long` installs, and `kserve_program` is what runs there.
"""

import json
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from engram_server.embedded import BACKBONE
from engram_server.model import load_backbone

from tests.conftest import PHOTOS
from tests.e2e.server_process import serving

pytestmark = pytest.mark.long

PYTHON = Path(sys.prefix) / "kserve" / "bin" / "python"
PROGRAM = Path(__file__).with_name("kserve_program.py")


@pytest.fixture(scope="module")
def photo() -> Path:
    return PHOTOS / "rocket.jpg"


@pytest.fixture(scope="module")
def expected(answers_and_expected):
    return answers_and_expected[1]


@pytest.fixture(scope="module")
def answers(answers_and_expected):
    return answers_and_expected[0]


@pytest.fixture(scope="module")
def answers_and_expected(tmp_path_factory, photo):
    """What the client got, and all scores of `/predict`, in class order."""
    assert PYTHON.exists(), "kserve's client is not installed: make test-long does that"
    folder = tmp_path_factory.mktemp("kserve")
    preprocessing = load_backbone(BACKBONE).preprocessing
    pixels = torch.from_numpy(preprocessing(photo.read_bytes(), max_pixels=10**8))
    np.save(folder / "values.npy", preprocessing.normalise(pixels[None]).numpy())
    with serving(folder, cache_bytes=0) as server:
        done = subprocess.run(
            [PYTHON, PROGRAM, server.url, photo, folder / "values.npy"],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        url = f"{server.url}/predict?tasks=cifar10,flowers,base&top_k=1000"
        tasks = httpx.post(url, content=photo.read_bytes()).json()["images"][0]["tasks"]
        assert server.stop() == 0
    scores = {
        name: [p["score"] for p in sorted(task["predictions"], key=lambda p: p["index"])]
        for name, task in tasks.items()
    }
    return json.loads(done.stdout.splitlines()[-1]), scores


def test_server_and_models_are_live_and_ready(answers):
    assert answers["live"] is True
    assert answers["ready"] is True
    assert answers["models"] == {
        "cifar10": True,
        "cifar10@1": True,
        "base": True,
        "multitask": True,
        "nothing": False,
    }


@pytest.mark.parametrize(
    "request_name",
    ["image", "image_binary_output", "pixel_values", "pixel_values_json", "version"],
)
def test_scores_are_those_of_predict(answers, expected, request_name):
    (row,) = answers[request_name]
    assert row == pytest.approx(expected["cifar10"], abs=1e-5)


def test_answer_names_the_request_and_the_model(answers):
    assert answers["identified"] == ["seven", "cifar10"]


def test_classification_gives_the_best_labels(answers, expected):
    ((first, second),) = answers["classification"]
    best = np.argsort(expected["cifar10"])[::-1]
    assert [int(text.split(":")[1]) for text in (first, second)] == best[:2].tolist()
    assert first.endswith(":ship")


def test_multitask_answers_several_tasks(answers, expected):
    assert list(answers["several"]) == ["flowers", "cifar10@1", "base"]
    for output, task in (("flowers", "flowers"), ("cifar10@1", "cifar10"), ("base", "base")):
        (row,) = answers["several"][output]
        assert row == pytest.approx(expected[task], abs=1e-5)


@pytest.mark.parametrize(
    ("mistake", "status", "words"),
    [
        ("unknown_model", 404, "cifar11"),
        ("unknown_task", 404, "cifar11"),
        ("unknown_output", 422, "'logits'"),
        ("no_image", 422, "looks like text"),
        ("wrong_shape", 422, "[N, 3, 176, 176]"),
    ],
)
def test_mistakes_reach_the_caller_as_a_sentence(answers, mistake, status, words):
    found, text = answers[mistake]
    assert found == status
    assert words in text
