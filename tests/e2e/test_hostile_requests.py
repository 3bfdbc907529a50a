"""No request holds up the others: `/livez` answers beside each of them, and memory stays."""

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import httpx
import pytest
from engram_server.api.rpc.protocol import SERVICE
from engram_server.model import load_backbone
from engram_store import Publish, open_store

from tests.api.raw_http import Wire
from tests.e2e.hostile_requests import BODY, HOSTILE, LARGE_PICTURES, MESSAGES, WITHOUT_A_KEY
from tests.e2e.process_group import await_all, peak_bytes, process_ids
from tests.e2e.server_process import ServerProcess, free_port, serving
from tests.serving import make_bundle, photo

LONGEST_DELAY = 0.25  # seconds
MOST_MEMORY = 4 * BODY
DECODED = 2**30  # the default of ENGRAM_DECODED_BYTES
# A machine with other work to do may be late by itself: never several times in a row.
ATTEMPTS = 4
TASKS = 2000
AT_ONCE = 4
PROCESSES = (1, 3)

pytestmark = [pytest.mark.long, pytest.mark.alone, pytest.mark.timeout(600)]


@dataclass
class Watch:
    """Asks `/livez` all the time, and remembers the longest it took."""

    port: int
    longest: float = 0.0
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        wire = Wire(self.port, timeout=60)
        while not self.stopped.is_set():
            started = time.monotonic()
            wire.send(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert wire.answer().status == 200
            self.longest = max(self.longest, time.monotonic() - started)
            self.stopped.wait(0.005)
        wire.close()

    @contextlib.contextmanager
    def running(self):
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            self.stopped.set()
            thread.join(60)


def send(port: int, request: bytes) -> bytes:
    """All that the server answers until it has nothing more to say."""
    wire = Wire(port, timeout=60)
    try:
        with contextlib.suppress(ConnectionError):
            wire.send(request)
        with contextlib.suppress(ConnectionError):
            return b"HTTP/1.1 %d" % wire.answer().status
        return b""
    finally:
        wire.close()


@pytest.fixture(scope="module", params=PROCESSES)
def server(request, folder_of, tmp_path_factory):
    """A server with a task of 21,841 classes and thousands of others."""
    folder = tmp_path_factory.mktemp("hostile")
    backbone = load_backbone(folder_of("vit"))
    store = open_store(folder / "store")
    store.publish("many", make_bundle(backbone, 1, classes=21_841))
    small = make_bundle(backbone, 2, classes=3)
    for number in range(TASKS):
        store.commit(Publish(f"team-x/species-{number:04d}", small))
    settings = {"poll_seconds": 60, "heartbeat_seconds": 0, "processes": request.param}
    with serving(folder, folder_of("vit"), **settings) as server:
        await_all(server, request.param)
        yield server


@pytest.fixture(scope="module")
def known_digest(server) -> str:
    answer = httpx.post(f"{server.url}/predict?tasks=many", content=photo(1), timeout=60)
    return answer.json()["images"][0]["digest"]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_requests_do_not_delay_other_callers(server, known_digest, name):
    watch_beside(server, name, HOSTILE[name](known_digest), most_memory=MOST_MEMORY)


@pytest.fixture(scope="module")
def server_with_keys(folder_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    with serving(folder, folder_of("vit"), api_key="12345678") as server:
        yield server


@pytest.mark.parametrize("name", WITHOUT_A_KEY)
def test_clients_without_a_key_do_not_delay_other_callers(server_with_keys, name):
    request = WITHOUT_A_KEY[name]()
    watch_beside(server_with_keys, name, request, most_memory=MOST_MEMORY, clients=AT_ONCE)


@pytest.mark.parametrize("name", LARGE_PICTURES)
def test_the_largest_images_do_not_delay_other_callers(server, name):
    watch_beside(server, name, LARGE_PICTURES[name](), most_memory=DECODED + MOST_MEMORY)


@pytest.fixture(scope="module")
def server_with_grpc(folder_of, tmp_path_factory):
    port = free_port()
    with serving(tmp_path_factory.mktemp("grpc"), folder_of("vit"), grpc_port=port) as server:
        yield server, port


@pytest.mark.parametrize("name", MESSAGES)
def test_hostile_messages_do_not_delay_other_callers(server_with_grpc, name):
    server, grpc_port = server_with_grpc

    def call(_: int, message: bytes) -> bytes:
        options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", options) as channel:
            done = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(message, timeout=60)
            return b"gRPC     " + done.code().name.encode()

    watch_beside(server, name, MESSAGES[name](), most_memory=MOST_MEMORY, send=call)


def watch_beside(
    server: ServerProcess,
    name: str,
    request: bytes,
    *,
    most_memory: int,
    clients: int = 1,
    send: Callable[[int, bytes], bytes] = send,
) -> None:
    """Send a request, and see what it does to others and to memory."""
    port = httpx.URL(server.url).port
    # The others answer the watching requests, with allocators that grow by themselves.
    most_memory += BODY * max(0, len(process_ids(server)) - 1)
    delays = []
    for _ in range(ATTEMPTS):
        before = peak_bytes(server, forget=True)
        watch = Watch(port)
        with watch.running(), ThreadPoolExecutor(clients) as pool:
            answer, *_ = pool.map(send, [port] * clients, [request] * clients)
        grown = peak_bytes(server) - before
        delays.append(round(watch.longest, 3))
        assert b" 5" not in answer[8:10], answer
        assert grown < most_memory, f"{grown / 2**20:.0f} MiB more"
        if watch.longest < LONGEST_DELAY:
            break
    print(f"\n{name}: {answer!r}, delays {delays}, {grown / 2**20:.0f} MiB")
    assert delays[-1] < LONGEST_DELAY, delays
