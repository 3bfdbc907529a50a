"""Decoding stops at its limit, at the deadline, and when the client is gone."""

import asyncio
import threading
import time
from concurrent.futures import CancelledError

import pytest
from engram_server.engine.predictions import decoding_limit
from engram_server.engine.types import RunOptions
from engram_server.errors import DeadlineExceeded, ImageTooLarge
from engram_server.model.preprocessing import budget
from engram_store import open_store

from tests.engine.test_engine import running
from tests.serving import make_bundle, photo, predict


def test_the_limit_is_cpu_time_of_the_thread():
    stop = decoding_limit(0.02, None, lambda: False)
    stop()
    started = time.thread_time()
    while time.thread_time() - started < 0.02:
        pass
    with pytest.raises(ImageTooLarge, match=r"longer than 0\.02 s.*smaller image"):
        stop()


def test_a_deadline_and_a_client_that_is_gone_end_decoding():
    with pytest.raises(DeadlineExceeded):
        decoding_limit(10, time.monotonic() - 1, lambda: False)()
    with pytest.raises(CancelledError):
        decoding_limit(10, None, lambda: True)()


@pytest.fixture
def world(backbone_of):
    backbone, store = backbone_of("vit"), open_store("memory://")
    store.publish("task", make_bundle(backbone, 1))
    return backbone, store


def test_an_image_that_takes_too_long_is_refused_and_the_next_is_not(world, monkeypatch):
    slow = threading.Event()
    slow.set()
    read = budget.BoundedFile.read

    def work(file, size=-1):
        until = time.thread_time() + 0.05
        while slow.is_set() and time.thread_time() < until:
            pass
        return read(file, size)

    monkeypatch.setattr(budget.BoundedFile, "read", work)
    with running(*world, decode_seconds=0.1) as (engine, _):
        with pytest.raises(ImageTooLarge, match="Decoding the image took longer"):
            asyncio.run(predict(engine, [photo(1)]))
        slow.clear()
        assert asyncio.run(predict(engine, [photo(1)])).images


@pytest.mark.parametrize("features", [False, True])
def test_an_image_of_a_client_that_is_gone_is_not_decoded_to_its_end(
    world, monkeypatch, until, features
):
    """The thread is in the middle of a file when the deadline passes."""
    entered, leave, ended = threading.Event(), threading.Event(), []
    read = budget.BoundedFile.read

    def wait(file, size=-1):
        entered.set()
        assert leave.wait(timeout=60)
        try:
            return read(file, size)
        except BaseException as error:
            ended.append(type(error))
            raise

    monkeypatch.setattr(budget.BoundedFile, "read", wait)

    async def give_up(engine):
        options = RunOptions(features=features)
        reading = asyncio.ensure_future(engine.predictions.read_images([photo(1)], options))
        await asyncio.to_thread(entered.wait)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        leave.set()

    with running(*world) as (engine, _):
        asyncio.run(give_up(engine))
        until(lambda: ended == [CancelledError])
