"""Nothing piles up: tasks that come and go leave neither tensors nor bytes behind."""

import asyncio
import gc
import os
import time
from pathlib import Path

import pytest
import torch
from engram_server.engine.engine import Engine
from engram_server.engine.observer import EngineObserver
from engram_server.engine.types import EngineConfig
from engram_store import Retire, open_store

from tests.serving import make_bundle, photo, predict

CYCLES = 1000
SETTLED = 100  # allocators and caches have reached their size by then


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tensors(engine):
    engine.rollouts.count()  # answers that were collected to be counted together
    gc.collect()
    # By type, not isinstance: that asks objects for their class, and some answer with a warning.
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory use from /proc")
def test_a_thousand_published_and_retired_tasks_leave_memory_where_it_was(backbone_of, tmp_path):
    backbone = backbone_of("vit")
    store = open_store(tmp_path)
    store.publish("stays", make_bundle(backbone, 0))
    engine = Engine(
        backbone, store, EngineConfig(poll_seconds=3600, cache_bytes=0), EngineObserver()
    )
    engine.start()
    image = photo(0)

    async def run():
        for cycle in range(CYCLES):
            bundle = make_bundle(backbone, cycle + 1, memory=4, golden=cycle % 10 == 0)
            store.publish("passes", bundle)
            await asyncio.to_thread(engine.tasks.sync)
            answer = await predict(engine, [image], ["stays", "passes"])
            assert answer.images[0].tasks["passes"].served.version == cycle + 1
            store.commit(Retire("passes"))
            await asyncio.to_thread(engine.tasks.sync)
            del bundle, answer
            if cycle == SETTLED:
                await predict(engine, [image], ["stays"])
                settled = tensors(engine), resident_bytes()
        await predict(engine, [image], ["stays"])
        deadline = time.monotonic() + 10
        while tensors(engine) > settled[0] and time.monotonic() < deadline:
            await asyncio.sleep(0.01)  # the worker may still hold the last batch
        return settled, (tensors(engine), resident_bytes())

    try:
        (tensors_before, bytes_before), (tensors_after, bytes_after) = asyncio.run(run())
    finally:
        engine.stop()
    assert tensors_after <= tensors_before
    assert bytes_after < 1.05 * bytes_before
