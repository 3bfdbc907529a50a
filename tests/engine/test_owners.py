"""Contexts belong to their owner: the cache reveals nothing about images of others."""

import asyncio
import threading

import numpy as np
import pytest
from engram_server.engine.engine import Engine
from engram_server.engine.observer import EngineObserver
from engram_server.engine.types import EngineConfig
from engram_server.errors import ContextNotCached
from engram_server.model.masked_pass import masked_pass
from engram_store import open_store

from tests.serving import ReplaceablePass, make_bundle, photo, predict


@pytest.fixture
def passes():
    return ReplaceablePass()


@pytest.fixture
def engine(backbone_of, passes):
    backbone = backbone_of("vit")
    store = open_store("memory://")
    store.publish("task", make_bundle(backbone, 1))
    engine = Engine(
        backbone, store, EngineConfig(poll_seconds=60), EngineObserver(), run_pass=passes
    )
    engine.start()
    yield engine
    engine.stop()


def ask(engine, image, owner):
    return asyncio.run(predict(engine, [image], ["task"], owner=owner)).images[0]


def test_a_photo_that_another_owner_sent_is_a_miss(engine):
    assert ask(engine, photo(1), "alice").cache == "miss"
    assert ask(engine, photo(1), "bob").cache == "miss"
    assert ask(engine, photo(1), None).cache == "miss"
    assert [ask(engine, photo(1), owner).cache for owner in ("alice", "bob", None)] == ["hit"] * 3


def test_a_digest_that_another_owner_sent_is_not_cached(engine):
    digest = ask(engine, photo(1), "alice").digest
    for stranger in ("bob", None, ""):
        with pytest.raises(ContextNotCached, match=digest):
            ask(engine, digest, stranger)
    assert ask(engine, digest, "alice").cache == "hit"


@pytest.mark.parametrize("prefix", ["alice/", "alice\n", "('alice', '"])
def test_no_digest_spells_another_owner(engine, prefix):
    digest = ask(engine, photo(1), "alice").digest
    with pytest.raises(ContextNotCached):
        ask(engine, f"{prefix}{digest}", None)


def test_without_owners_a_context_is_shared(engine):
    digest = ask(engine, photo(1), None).digest
    assert ask(engine, digest, None).cache == "hit"


def test_pixel_values_are_an_owners_own_too(engine):
    pixels = np.zeros((3, *engine.backbone.image_size), np.float32)
    assert ask(engine, pixels, "alice").cache == "miss"
    assert ask(engine, pixels, "bob").cache == "miss"
    assert ask(engine, pixels, "bob").cache == "hit"


def test_one_photo_of_two_owners_in_one_batch_is_a_miss_for_both(engine, passes):
    """Neither the answers nor the rows of the pass tell one owner of the other."""
    reached, opened, images = threading.Event(), threading.Event(), []

    def held(backbone, pixels, *args, **kwargs):
        images.append(0 if pixels is None else len(pixels))
        reached.set()
        assert opened.wait(timeout=60)
        return masked_pass(backbone, pixels, *args, **kwargs)

    passes.run = held

    async def scenario():
        def start(image, owner):
            return asyncio.create_task(predict(engine, [image], ["task"], owner=owner))

        first = start(photo(0), "alice")
        while not reached.is_set():
            await asyncio.sleep(0.001)
        same = [start(photo(7), owner) for owner in ("alice", "bob", "alice")]
        while engine.queued_images < 3:
            await asyncio.sleep(0.001)
        opened.set()
        return [answer.images[0] for answer in await asyncio.gather(first, *same)][1:]

    answers = asyncio.run(scenario())
    assert [answer.cache for answer in answers] == ["miss"] * 3
    assert images == [1, 2]  # Alice's twice is one image of the pass, Bob's is another
