"""The promise of the project, on a real server: tasks change all the time and no answer suffers."""

import asyncio
import itertools
import random

import httpx
import numpy as np
import pytest
import torch
from engram_server.model import MultiTaskViT, load_backbone
from engram_store import open_store
from engram_store.catalog import Catalog

from tests.e2e.server_process import serving
from tests.serving import make_bundle, photo

TASKS = [f"task{number}" for number in range(16)]
VERSIONS = 4
CLIENTS = 64
REQUESTS_EACH = 12
IMAGES = [photo(number, image_format="JPEG") for number in range(6)]
TOLERANCE = 1e-4


class Bundles:
    """Every bundle the run will publish, and what each answers for each image."""

    def __init__(self, backbone):
        self.of = {
            (task, number): make_bundle(
                backbone,
                100 * place + number,
                memory=(place + number) % 4,
                classes=3 + place,
                golden=number == 0,
            )
            for place, task in enumerate(TASKS)
            for number in range(VERSIONS)
        }
        pixels = torch.stack(
            [torch.from_numpy(backbone.preprocessing(image, max_pixels=10**8)) for image in IMAGES]
        )
        model = MultiTaskViT(backbone)
        for (task, number), bundle in self.of.items():
            model.add(f"{task}-{number}", bundle)
        logits = model(pixels)
        self.expected = {
            bundle.digest: logits[f"{task}-{number}"].numpy()
            for (task, number), bundle in self.of.items()
        }


async def upload(client, task, bundle):
    answer = await client.put(f"/tasks/{task}", content=bundle.to_bytes())
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


async def change_tasks(client, bundles, done, changes):
    """Uploads, label moves, rollbacks and retirements, until the clients are through."""
    dice = random.Random(0)
    for turn in itertools.count():
        if done.is_set():
            return
        task = dice.choice(TASKS)
        published = await upload(client, task, bundles.of[task, dice.randrange(VERSIONS)])
        moved = await client.put(
            f"/tasks/{task}/aliases/canary", json={"version": published["version"]}
        )
        assert moved.status_code == 200, moved.text
        if turn % 2:
            undone = await client.post(f"/tasks/{task}/rollback")
            assert undone.status_code in (200, 409), undone.text  # 409: nothing to undo
        side = bundles.of[dice.choice(TASKS), 1]
        await upload(client, "passing", side)
        retired = await client.delete("/tasks/passing")
        assert retired.status_code in (200, 204), retired.text
        changes.append(turn)


async def ask(client, seed, answers):
    dice = random.Random(seed)
    for _ in range(REQUESTS_EACH):
        image = dice.randrange(len(IMAGES))
        tasks = dice.sample(TASKS, dice.randint(1, 8))
        answer = await client.post(
            "/predict",
            params={"tasks": ",".join(tasks), "return": "logits"},
            content=IMAGES[image],
            headers={"content-type": "image/jpeg"},
        )
        assert answer.status_code == 200, answer.text
        answers.append((image, tasks, answer.json()))


async def run(url, bundles):
    answers, changes, done = [], [], asyncio.Event()
    limits = httpx.Limits(max_connections=CLIENTS + 2)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        for task in TASKS:
            await upload(client, task, bundles.of[task, 0])
        changing = asyncio.create_task(change_tasks(client, bundles, done, changes))
        await asyncio.gather(*(ask(client, seed, answers) for seed in range(CLIENTS)))
        done.set()
        await changing
    return answers, changes


def defaults_by_generation(store):
    """Which version each task's default was, at every generation."""
    catalog, found = Catalog(), {}
    for entry in reversed(store.history(limit=10**6)):
        catalog, problems = catalog.apply([entry])
        assert not problems
        found[catalog.generation] = catalog
    return found


def logits_of(task_answer):
    return np.array(task_answer["logits"], dtype=np.float32)


@pytest.mark.long
def test_sixty_four_clients_get_only_right_answers_while_tasks_change(folder_of, tmp_path):
    folder = folder_of("vit")
    bundles = Bundles(load_backbone(folder))
    # Contexts in full precision, so that warm answers meet the same tolerance as cold ones.
    with serving(tmp_path, folder, queue_images=1000, cache_precision="float32") as server:
        answers, changes = asyncio.run(run(server.url, bundles))
        assert server.stop() == 0
    assert len(answers) == CLIENTS * REQUESTS_EACH
    assert len(changes) >= 3, "the tasks hardly changed during the run"

    generations = defaults_by_generation(open_store(tmp_path / "store"))
    seen = set()
    for image, tasks, answer in answers:
        catalog = generations[answer["generation"]]
        seen.add(answer["generation"])
        (found,) = answer["images"]
        assert list(found["tasks"]) == tasks
        for task in tasks:
            version = catalog.resolve(task)
            assert found["tasks"][task]["version"] == version.version
            difference = logits_of(found["tasks"][task]) - bundles.expected[version.digest][image]
            assert np.abs(difference).max() < TOLERANCE
    assert len(seen) > 3
