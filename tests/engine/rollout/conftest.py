"""An engine whose task `pets` has a default version and a shadow."""

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from engram_bundle import TaskBundle
from engram_server.engine.engine import Engine
from engram_server.engine.observer import EngineObserver
from engram_server.engine.types import EngineConfig, ImageAnswer
from engram_server.model import Backbone
from engram_store import Publish, TaskStore, open_store

from tests.bundles import with_tensors
from tests.serving import ReplaceablePass, make_bundle, photo, predict, reference_logits

MakeEngine = Callable[..., Any]


@functools.cache
def varied_bundle(backbone: Backbone, seed: int) -> TaskBundle:
    """A bundle whose answers differ between noisy photos."""
    made = make_bundle(backbone, seed, golden=False)
    logits = [reference_logits(backbone, made, photo(number)) for number in range(12)]
    return with_tensors(made, {"head.bias": made.tensors["head.bias"] - np.mean(logits, axis=0)})


def pets_store(backbone: Backbone, location: str = "memory://") -> TaskStore:
    """A store with `pets`: version 1 is the default, version 2 the shadow."""
    store = open_store(location)
    store.commit(Publish("pets", varied_bundle(backbone, 1)))
    store.commit(Publish("pets", varied_bundle(backbone, 2), aliases=("shadow",)))
    return store


@pytest.fixture(scope="module")
def backbone(backbone_of: Callable[[str], Backbone]) -> Backbone:
    return backbone_of("vit")


@pytest.fixture
def passes() -> ReplaceablePass:
    return ReplaceablePass()


@pytest.fixture
def running(passes: ReplaceablePass) -> MakeEngine:
    @contextmanager
    def run(
        backbone: Backbone,
        store: TaskStore,
        observer: EngineObserver | None = None,
        **config: Any,
    ) -> Iterator[Engine]:
        config = {"decode_threads": 1, "poll_seconds": 0.05, **config}
        engine = Engine(
            backbone, store, EngineConfig(**config), observer or EngineObserver(), run_pass=passes
        )
        engine.start()
        try:
            yield engine
        finally:
            engine.stop()

    return run


def ask_each(engine: Engine, photos: list[bytes], until: Callable[..., None]) -> list[ImageAnswer]:
    """The answers of `pets`, one photo after the other, so that no shadow is dropped."""
    answers = []
    for image in photos:
        before = compared(engine)
        answers += asyncio.run(predict(engine, [image], ["pets"])).images
        until(lambda before=before: compared(engine) > before)
    return answers


def compared(engine: Engine) -> int:
    return sum(pair.images + pair.dropped for pair in engine.rollouts.evidence("pets"))
