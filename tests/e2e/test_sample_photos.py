"""The sample photos, predicted as in the console: every task that knows the object names it.

What `make serve` serves with no settings: the embedded backbone and the demo tasks.
"""

import httpx
import pytest

from tests.conftest import PHOTOS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# What each task should say first; `base` may name a near relation, since ImageNet has no others.
RIGHT: dict[str, dict[str, set[str]]] = {
    "cat": {"cifar10": {"cat"}, "base": {"tabby cat", "tiger cat (striped)", "Egyptian cat"}},
    "dog": {"cifar10": {"dog"}, "base": {"German shepherd", "malinois"}},
    "flower": {"flowers": {"pink-yellow dahlia", "orange dahlia"}},
    "parrot": {"cifar10": {"bird"}, "base": {"macaw"}},
    "horse": {"cifar10": {"horse"}, "base": {"horse (sorrel)"}},
    "butterfly": {
        "cifar100": {"butterfly"},
        "base": {"monarch butterfly", "gossamer-winged butterfly", "ringlet (butterfly)"},
    },
    "bee": {"cifar100": {"bee"}, "base": {"bee"}},
    "camel": {"cifar100": {"camel"}, "base": {"Arabian camel"}},
    "castle": {"cifar100": {"castle"}, "base": {"castle"}},
    "bridge": {"cifar100": {"bridge"}, "base": {"suspension bridge"}},
    "coffee": {"cifar100": {"cup"}, "base": {"espresso", "cup", "coffee mug"}},
    "rocket": {"cifar100": {"rocket"}, "base": {"missile", "projectile", "space shuttle"}},
}


def answers(server, name: str) -> dict[str, dict]:
    photo = (PHOTOS / f"{name}.jpg").read_bytes()
    answer = httpx.post(f"{server.url}/predict?top_k=1", content=photo, timeout=60).json()
    return answer["images"][0]["tasks"]


def first_answers(server, name: str) -> dict[str, str]:
    """What every task calls a photo."""
    found = answers(server, name)
    return {task: answer["predictions"][0]["label"] for task, answer in found.items()}


def test_every_sample_photo_has_its_right_answers():
    assert sorted(RIGHT) == sorted(path.stem for path in PHOTOS.glob("*.jpg"))


@pytest.mark.parametrize("name", RIGHT)
def test_every_task_that_knows_the_thing_names_it_first(embedded_server, name):
    first = first_answers(embedded_server, name)
    wrong = {task: first[task] for task, right in RIGHT[name].items() if first[task] not in right}
    assert wrong == {}


@pytest.mark.parametrize("name", RIGHT)
def test_no_right_answer_is_marked_as_out_of_distribution(embedded_server, name):
    found = answers(embedded_server, name)
    marked = [task for task in RIGHT[name] if found[task].get("in_distribution") is False]
    assert marked == []


@pytest.mark.parametrize("name", RIGHT)
def test_every_sample_photo_is_fit_for_use(embedded_server, name):
    assert first_answers(embedded_server, name)["quality"] == "sharp and well exposed"
