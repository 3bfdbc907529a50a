"""Images as pixel values: passed to the backbone unchanged, beside other images."""

import asyncio

import numpy as np
import pytest
import torch
from engram_server.errors import ContextNotCached
from engram_store import open_store

from tests.engine.test_engine import TOLERANCE, Gate, running, until
from tests.serving import make_bundle, photo, predict, reference_logits


@pytest.fixture(scope="module")
def backbone(backbone_of):
    return backbone_of("vit")


@pytest.fixture(scope="module")
def bundle(backbone):
    return make_bundle(backbone, 1)


@pytest.fixture
def store(bundle):
    opened = open_store("memory://")
    opened.publish("task", bundle)
    return opened


def values_of(backbone, image: bytes) -> np.ndarray:
    pixels = torch.from_numpy(backbone.preprocessing(image, max_pixels=10**8))
    return backbone.preprocessing.normalise(pixels[None])[0].numpy()


def logits(answer) -> list[np.ndarray]:
    return [image.tasks["task"].logits for image in answer.images]


def test_pixel_values_are_answered_among_files_whatever_their_order(backbone, bundle, store):
    files = [photo(seed) for seed in range(4)]
    values = [values_of(backbone, file) for file in files]
    mixed = [values[0], files[1], values[2], files[3], values[3], files[2]]
    expected = [reference_logits(backbone, bundle, files[n]) for n in (0, 1, 2, 3, 3, 2)]
    with running(backbone, store, cache_bytes=0) as (engine, observer):
        answer = asyncio.run(predict(engine, mixed, ["task"]))
        for got, want in zip(logits(answer), expected, strict=True):
            np.testing.assert_allclose(got, want, atol=TOLERANCE)
        assert sum(images for images, _ in observer.batches) == 6


def test_cold_and_warm_files_and_values_share_a_batch(backbone, bundle, store):
    files = [photo(seed) for seed in range(10, 14)]
    values = [values_of(backbone, file) for file in files]
    with running(backbone, store, cache_dtype=None) as (engine, _):
        first = asyncio.run(predict(engine, [values[0], files[1]], ["task"]))
        again = asyncio.run(predict(engine, [values[2], values[0], files[3], files[1]], ["task"]))
        assert [image.cache for image in first.images] == ["miss", "miss"]
        assert [image.cache for image in again.images] == ["miss", "hit", "miss", "hit"]
        for got, number in zip(logits(again), (2, 0, 3, 1), strict=True):
            want = reference_logits(backbone, bundle, files[number])
            np.testing.assert_allclose(got, want, atol=TOLERANCE)


def test_pixel_values_are_never_taken_for_a_file_of_the_same_bytes(backbone, store):
    values = values_of(backbone, photo(20))
    with running(backbone, store) as (engine, _):
        digest = asyncio.run(predict(engine, [values], ["task"])).images[0].digest
        assert digest.startswith("pixels:")
        with pytest.raises(ContextNotCached):
            asyncio.run(predict(engine, ["sha256:" + digest.partition(":")[2]], ["task"]))


def test_values_beyond_arithmetic_change_no_neighbours_answer(backbone, bundle, store):
    file = photo(30)
    good = values_of(backbone, file)
    expected = reference_logits(backbone, bundle, file)
    huge = np.full_like(good, 3e38)

    async def scenario(engine, observer, gate):
        first = asyncio.create_task(predict(engine, [photo(31)], ["task"]))
        await until(gate.reached.is_set)
        # These wait for the pass that is held, and so make one batch.
        neighbours = asyncio.create_task(predict(engine, [huge, good, file, -huge, good], ["task"]))
        await until(lambda: observer.depth == 5)
        gate.open.set()
        await first
        return logits(await neighbours)

    with running(backbone, store, cache_bytes=0) as (engine, observer):
        found = asyncio.run(scenario(engine, observer, Gate(observer.passes)))
    for number in (1, 2, 4):
        np.testing.assert_allclose(found[number], expected, atol=TOLERANCE)
    assert not np.isfinite(found[0]).all()
