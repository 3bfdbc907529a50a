"""A canary answers its share of the images, always the same ones."""

import asyncio

import pytest
from engram_server.engine.types import Canary
from engram_store import Conflict, MoveAlias, Publish, Retire, SetCanary, open_store

from tests.bundles import bundle
from tests.engine.rollout.conftest import pets_store
from tests.serving import photo, predict


def versions(engine, photos, reference="pets", **options):
    answer = asyncio.run(predict(engine, photos, [reference], canaries=True, **options))
    return [image.tasks[reference].served.version for image in answer.images]


def test_share_of_images_is_answered_by_the_canary_and_sticks(backbone, running):
    store = pets_store(backbone)
    photos = [photo(seed) for seed in range(40)]
    with running(backbone, store) as engine:
        assert set(versions(engine, photos)) == {1}
        engine.tasks.commit(SetCanary("pets", "default", 2, 0.5))
        first = versions(engine, photos)
        assert 8 <= first.count(2) <= 32
        assert versions(engine, photos) == first
        engine.tasks.commit(SetCanary("pets", "default", 2, 0.8))
        more = versions(engine, photos)
        assert all(later == 2 for before, later in zip(first, more, strict=True) if before == 2)
        assert set(versions(engine, photos, "pets@1")) == {1}
        engine.tasks.commit(SetCanary("pets", "default", 2, 0))
        assert set(versions(engine, photos)) == {1}


def test_moving_the_alias_to_the_canary_ends_it(tmp_path, backbone):
    store = pets_store(backbone, str(tmp_path))
    store.commit(SetCanary("pets", "default", 2, 0.25))
    reopened = open_store(tmp_path).catalog().task("pets").canaries
    assert reopened == {"default": (2, 0.25)}
    store.commit(MoveAlias("pets", "default", 2))
    assert store.catalog().task("pets").canaries == {}
    store.commit(SetCanary("pets", "default", 1, 0.25))
    store.commit(Retire("pets", 1))
    assert open_store(tmp_path).catalog().task("pets").canaries == {}


def test_canary_survives_a_checkpoint(tmp_path):
    store = open_store(tmp_path, checkpoint_every=1)
    store.commit(Publish("pets", bundle(1)))
    store.commit(Publish("pets", bundle(2), aliases=("new",)))
    store.commit(SetCanary("pets", "default", 2, 0.1))
    store.commit(Publish("other", bundle(3)))
    assert open_store(tmp_path).catalog().task("pets").canaries == {"default": (2, 0.1)}
    assert store.verify().damages == ()


def test_canary_must_be_another_version_of_the_same_type():
    store = open_store("memory://")
    store.commit(Publish("pets", bundle(1)))
    with pytest.raises(Conflict, match="points to version 1 already"):
        store.commit(SetCanary("pets", "default", 1, 0.5))


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_shares_are_accurate(share):
    class Task:
        name = "pets"

    taken = sum(Canary(Task, share).takes(f"sha256:{number}") for number in range(4000))
    assert abs(taken / 4000 - share) < 0.03
