"""Images wait until there is memory to decode them, and are refused where there never is."""

import asyncio
import threading
import time

import pytest
from engram_server.engine.observer import EngineObserver
from engram_server.engine.predictions import DecodingMemory
from engram_server.errors import DeadlineExceeded, ImageTooLarge
from engram_server.model.preprocessing import decoding
from engram_store import open_store

from tests.engine.test_engine import running
from tests.serving import MetricListener, make_bundle, photo, predict


class Peak(MetricListener):
    """The most that was reserved at once."""

    most = now = 0

    def decoding_bytes(self, nbytes):
        self.now = nbytes
        self.most = max(self.most, nbytes)


def reserve(memory, nbytes, hold, entered):
    with memory.reserved(nbytes, None):
        entered.append(nbytes)
        assert hold.wait(timeout=60)


def test_an_image_larger_than_all_the_room_is_rejected_with_both_sizes():
    memory = DecodingMemory(1000, EngineObserver())
    with (
        pytest.raises(ImageTooLarge, match=r"1,001 bytes.*limit is 1,000"),
        memory.reserved(1001, None),
    ):
        pass


def test_images_wait_for_room_in_the_order_they_came(until):
    observer, hold, entered = Peak(), threading.Event(), []
    memory = DecodingMemory(1000, observer)
    threads = []

    def begin(nbytes):
        thread = threading.Thread(target=reserve, args=(memory, nbytes, hold, entered), daemon=True)
        thread.start()
        threads.append(thread)

    begin(700)
    until(lambda: entered == [700])
    begin(900)
    until(lambda: memory.contended)
    begin(100)  # would fit beside the first, and would push the large one back
    assert entered == [700]
    hold.set()
    for thread in threads:
        thread.join(timeout=60)
    assert entered[:2] == [700, 900]
    assert observer.most <= 1000
    assert observer.now == 0


def test_waiting_ends_at_the_deadline():
    memory = DecodingMemory(1000, EngineObserver())
    with memory.reserved(700, None):
        waiting = memory.reserved(700, time.monotonic() + 0.01)
        with pytest.raises(DeadlineExceeded), waiting:
            pass
    with memory.reserved(1000, time.monotonic() + 60):
        pass  # nothing is left behind


def test_an_image_that_cannot_be_decoded_gives_its_room_back():
    observer = Peak()
    memory = DecodingMemory(1000, observer)
    with pytest.raises(ValueError, match="broken"), memory.reserved(1000, None):
        raise ValueError("broken")
    assert observer.now == 0


@pytest.fixture
def world(backbone_of):
    backbone, store = backbone_of("vit"), open_store("memory://")
    store.publish("task", make_bundle(backbone, 1))
    return backbone, store


def test_four_large_images_are_decoded_within_the_memory_for_two(world, monkeypatch):
    """Each a PNG of 8 bytes a pixel: before, all four were decoded at once."""
    images = [photo(seed, size=(300, 400)) for seed in range(4)]
    at_once, most, lock = 0, 0, threading.Lock()
    real = decoding.decode

    def count_concurrent(image):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02)  # long enough for the others to come
        rgb = real(image)
        with lock:
            at_once -= 1
        return rgb

    monkeypatch.setattr(decoding, "decode", count_concurrent)
    room = int(2.5 * 9 * 300 * 400)
    with running(*world, decode_threads=4, decoded_bytes=room) as (engine, _):
        answer = asyncio.run(predict(engine, images))
    assert len(answer.images) == 4
    assert most == 2


def test_an_image_beyond_the_memory_is_rejected_and_smaller_ones_are_not(world):
    with running(*world, decoded_bytes=1_000_000) as (engine, _):
        with pytest.raises(ImageTooLarge, match="Decoding the image"):
            asyncio.run(predict(engine, [photo(1, size=(400, 400))]))
        assert asyncio.run(predict(engine, [photo(1, size=(40, 40))])).images
