"""Two keys on one server: whatever one of them holds, the other is served."""

import contextlib
import json
import select
import threading
from concurrent.futures import CancelledError

import pytest
from engram_server.access.quotas import KeyLimits
from starlette.testclient import TestClient

from tests.api.conftest import assert_problem
from tests.api.keys import make_key, secret_of, sends, token_of, write_keys
from tests.api.raw_http import listening
from tests.serving import photo

EVERYTHING = {scope: ["*"] for scope in ("predict", "read", "publish", "admin", "metrics")}
KEYS = (make_key("hostile", scopes=EVERYTHING), make_key("other", scopes=EVERYTHING))
MIB = 2**20


@pytest.fixture
def file(tmp_path):
    return write_keys(tmp_path / "keys.json", *KEYS)


@pytest.fixture
def keys(file):
    return {"keys_file": str(file)}


def request(line: str, key: str, body: bytes = b"", length: int | None = None) -> bytes:
    head = f"{line} HTTP/1.1\r\nHost: 127.0.0.1\r\nX-API-Key: {token_of(key, secret_of(key))}\r\n"
    length = len(body) if length is None else length
    return f"{head}Content-Length: {length}\r\n\r\n".encode() + body


@contextlib.contextmanager
def wires(server, count: int):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(server.wire()) for _ in range(count)]


def predict(key: str, query: str = "") -> bytes:
    return request(f"POST /predict?tasks=pets{query}", key, photo(1))


def answered(wires) -> int:
    """How many of them have an answer that was not read yet."""
    return len(select.select([wire.socket for wire in wires], [], [], 0)[0])


@pytest.mark.parametrize(
    ("line", "pool"),
    [("POST /predict", "body_bytes"), ("PUT /tasks/team/x", "bundle_bytes")],
)
def test_one_key_does_not_take_all_bytes_in_flight(world, keys, line, pool):
    """S4: half-sent bodies of one key, for as long as they may take."""
    limits = {"inflight_body_bytes": 400_000, "inflight_bundle_bytes": 400_000}
    with listening(world, **keys, **limits) as server:
        used = getattr(server.runtime.pools, pool)
        with wires(server, 4) as held:
            for wire in held:
                wire.send(request(line, "hostile", bytes(99_999), 100_000))
            server.await_value(lambda: used.used >= 190_000, True)
            assert server.ask(predict("other")).status == 200
            upload = world.bundle(77).to_bytes()
            assert server.ask(request("POST /tasks/validate", "other", upload)).status == 200
            assert used.used <= 200_000
        server.await_value(lambda: used.used, 0)


def test_half_sent_images_of_a_key_count_as_concurrent_images(world, tmp_path):
    """S4: the limit of a key holds for images that are never sent to their end."""
    limited = make_key("limited", KeyLimits(concurrent_images=1), scopes=EVERYTHING)
    file = write_keys(tmp_path / "limited.json", limited, *KEYS)
    with listening(world, keys_file=str(file)) as server:
        with server.wire() as half, server.counts("key_images"):
            half.send(request("POST /predict?tasks=pets", "limited", b"half", 1000))
            server.await_value(lambda: server.runtime.pools.body_bytes.used, 4)
            rejected = server.ask(predict("limited"))
            assert rejected.status == 429
            assert rejected.problem == "quota-exceeded"
            assert server.ask(predict("other")).status == 200
        server.await_value(lambda: server.ask(predict("limited")).status, 200)


def test_uploads_do_not_take_the_bytes_of_predictions(world, keys):
    with listening(world, **keys, inflight_body_bytes=400_000) as server, server.wire() as wire:
        wire.send(request("PUT /tasks/team/x", "hostile", bytes(899_999), 900_000))
        server.await_value(lambda: server.runtime.pools.bundle_bytes.used, 899_999)
        assert server.runtime.pools.body_bytes.used == 0
        assert server.ask(predict("hostile")).status == 200


def test_answers_of_one_key_are_rejected_while_those_of_others_fit(world, keys, monkeypatch):
    """S9: answers are counted until they are sent, and one key has a share of them."""
    monkeypatch.setattr("engram_server.api.inference.NUMBER_BYTES", 1_000_000)  # three per answer
    go_on = threading.Event()
    monkeypatch.setattr(
        "engram_server.api.routes.predict.write", lambda *_: (go_on.wait(30), b"{}")[1]
    )
    limits = {"answer_bytes": 16 * MIB, "inflight_answer_bytes": 32 * MIB}
    with (
        listening(world, **keys, **limits) as server,
        wires(server, 12) as held,
        server.wire() as wire,
    ):
        pool = server.runtime.pools.answer_bytes
        try:
            for each in held:
                each.send(predict("hostile", "&return=logits"))
            # Five are half of the pool, and ten would fit.
            server.await_value(lambda: answered(held), 7)
            share = pool.used
            assert 5 * 3_000_000 <= share <= 16 * MIB
            wire.send(predict("other", "&return=logits"))
            server.await_value(lambda: pool.used >= share + 3_000_000, True)
        finally:
            go_on.set()
        assert wire.answer().status == 200
        answers = [each.answer() for each in held]
        assert sorted(each.status for each in answers) == [200] * 5 + [429] * 7
        details = [json.loads(each.body)["detail"] for each in answers if each.status == 429]
        assert all("bytes of responses are in flight" in detail for detail in details)
        server.await_value(lambda: pool.used, 0)


def test_large_answers_are_held_until_they_are_sent(world, keys, monkeypatch):
    large = json.dumps({"filler": "x" * 16 * MIB}).encode()
    monkeypatch.setattr("engram_server.api.routes.predict.write", lambda *_: large)
    monkeypatch.setattr("engram_server.api.inference.NUMBER_BYTES", 1_000_000)
    with listening(world, **keys) as server, server.wire() as wire:
        pool = server.runtime.pools.answer_bytes
        wire.send(predict("hostile", "&return=logits"))
        server.await_value(lambda: pool.used > 0, True)
        assert server.ask(predict("other")).status == 200
        assert pool.used > 0  # the answer is in memory as long as it is not read
        assert wire.answer().body == large
        server.await_value(lambda: pool.used, 0)


def test_downloads_that_are_read_slowly_leave_slots_for_others(world, keys, monkeypatch):
    """S6."""
    large = bytes(16 * MIB)
    monkeypatch.setattr(world.engine.tasks, "read_bytes", lambda digest: large)
    get = "GET /tasks/pets/versions/1/bundle"
    with listening(world, **keys, max_downloads=4) as server, wires(server, 4) as held:
        for wire in held:
            wire.send(request(get, "hostile"))
        server.await_value(lambda: server.runtime.pools.downloads.used, 2)
        assert len(server.ask(request(get, "other")).body) == len(large)


def test_validations_of_one_key_leave_slots_for_others(world, keys, monkeypatch):
    """S5: neither slow uploads nor slow validations."""
    validate, go_on = world.engine.tasks.validate, threading.Event()

    def slow(file):
        if file.read_bytes() == b"slow":
            go_on.wait(30)
        return validate(file)

    monkeypatch.setattr(world.engine.tasks, "validate", slow)
    with listening(world, **keys) as server, wires(server, 8) as held:
        for number, wire in enumerate(held):
            body = b"slow" if number % 2 else b"slo"
            wire.send(request("POST /tasks/validate", "hostile", body, 4))
        server.await_value(lambda: server.runtime.pools.validations.used, 2)
        answer = server.ask(request("POST /tasks/validate", "other", world.bundle(5).to_bytes()))
        assert (answer.status, json.loads(answer.body)["valid"]) == (200, True)
        go_on.set()


def test_a_task_that_is_being_solved_does_not_delay_changes_of_others(
    world, keys, fresh, monkeypatch
):
    """S7: solving takes seconds; committing, and the other's solving, go on."""
    begun, go_on, calls = threading.Event(), threading.Event(), []
    solve = world.engine.teaching._solve

    def slow(update, *more):
        calls.append(update.task)
        if update.task == "slow":
            begun.set()
            go_on.wait(30)
        return solve(update, *more)

    monkeypatch.setattr(world.engine.teaching, "_solve", slow)
    files = [("a", ("1.png", photo(1))), ("b", ("2.png", photo(2)))]
    with TestClient(world.app(**keys)) as client:

        def teach(task, key):
            return client.post(f"/tasks/{task}/examples", files=files, headers=sends(key))

        answers = []
        slow_ones = [
            threading.Thread(target=lambda: answers.append(teach("slow", "hostile")))
            for _ in range(3)
        ]
        for thread in slow_ones:
            thread.start()
        assert begun.wait(30)
        moved = client.put(
            "/tasks/pets/aliases/canary", json={"version": 1}, headers=sends("other")
        )
        assert moved.status_code == 200, moved.text
        assert teach(fresh, "other").status_code == 201
        assert calls.count("slow") == 1  # one at a time for each key
        go_on.set()
        for thread in slow_ones:
            thread.join(30)
        assert {answer.status_code for answer in answers} <= {200, 201}
        client.delete("/tasks/pets/aliases/canary", headers=sends("other"))
        client.delete("/tasks/slow", headers=sends("other"))


def test_a_slow_read_of_examples_does_not_delay_validations_of_others(world, keys, monkeypatch):
    """S7: reading the examples of a version may solve it anew, which takes seconds."""
    begun, go_on = threading.Event(), threading.Event()
    read = world.engine.teaching.examples

    def slow(*args):
        begun.set()
        go_on.wait(30)
        return read(*args)

    monkeypatch.setattr(world.engine.teaching, "examples", slow)
    with listening(world, **keys) as server, wires(server, 3) as held:
        try:
            for wire in held:
                wire.send(request("GET /tasks/pets/examples", "hostile"))
            assert begun.wait(10)
            upload = world.bundle(5).to_bytes()
            answer = server.ask(request("POST /tasks/validate", "other", upload))
            assert (answer.status, json.loads(answer.body)["valid"]) == (200, True)
            assert not answered(held)
        finally:
            go_on.set()
        assert [wire.answer().problem for wire in held] == ["not-taught"] * 3


def test_solving_ends_with_its_client(world, keys, fresh, monkeypatch):
    ended, over = threading.Event(), threading.Event()

    def endless(update, catalog, check):
        try:
            while not over.wait(0.01):
                check()
        except CancelledError:
            ended.set()
            raise
        raise AssertionError("it was not ended")

    monkeypatch.setattr(world.engine.teaching, "_solve", endless)
    boundary = b'--b\r\nContent-Disposition: form-data; name="a"; filename="1.png"\r\n\r\n'
    body = boundary + photo(1) + b"\r\n--b--\r\n"
    head = request(f"POST /tasks/{fresh}/examples", "other", body)
    head = head.replace(b"Host:", b"Content-Type: multipart/form-data; boundary=b\r\nHost:")
    with listening(world, **keys) as server:
        with server.wire() as wire:
            wire.send(head)
            server.await_value(lambda: bool(server.runtime.threads.solving._running), True)
        try:
            assert ended.wait(30)
        finally:
            over.set()
    assert fresh not in world.store.catalog().names


@pytest.fixture
def slow_history(world, monkeypatch):
    """Histories of a thousand changes take until this event is set."""
    go_on, history = threading.Event(), world.engine.tasks.history

    def slow(task, limit):
        if limit == 1000:
            go_on.wait(30)
        return history(task, limit)

    monkeypatch.setattr(world.engine.tasks, "history", slow)
    yield go_on
    go_on.set()


SLOW = "GET /tasks/pets/history?limit=1000"


def test_reads_of_one_key_leave_threads_for_others(world, keys, slow_history):
    with listening(world, **keys) as server, wires(server, 60) as held:
        for wire in held:
            wire.send(request(SLOW, "hostile"))
        server.await_value(lambda: server.runtime.pools.reads.used, 4)
        assert server.ask(request("GET /tasks/pets/history?limit=5", "other")).status == 200
        slow_history.set()


# --- keys -----------------------------------------------------------------------------------------


def test_a_revoked_key_is_out_while_all_threads_are_busy(world, keys, file, slow_history):
    """S10: the keys file has its own thread, and requests wait for a read in progress."""
    with listening(world, **keys) as server, wires(server, 60) as held:
        for wire in held:
            wire.send(request(SLOW, "hostile"))
        server.await_value(lambda: server.runtime.pools.reads.used >= 4, True)
        write_keys(file, make_key("other", scopes=EVERYTHING))
        server.await_value(lambda: server.ask(predict("hostile")).status, 401, seconds=1.0)
        assert server.ask(predict("other")).status == 200
        slow_history.set()


@pytest.mark.parametrize(
    ("limits", "says"),
    [
        (KeyLimits(tasks=2), "3 tasks, and its limit is 2"),
        (KeyLimits(versions=2), "3 versions, and its limit is 2"),
        (KeyLimits(store_bytes=50_000), "bytes of bundles, and its limit is 50000"),
    ],
)
def test_a_key_publishes_within_its_quota(world, tmp_path, limits, says):
    """S11: no key fills the store or the answers of others."""
    limited = make_key("limited", limits, scopes=EVERYTHING)
    file = write_keys(tmp_path / "limited.json", limited, *KEYS)
    with TestClient(world.app(keys_file=str(file))) as client:
        published, rejected = [], None
        for number in range(20):
            name = f"quota/{number}"
            body = world.bundle(500 + number).to_bytes()
            answer = client.put(f"/tasks/{name}", content=body, headers=sends("limited"))
            if answer.status_code != 201:
                rejected = answer
                break
            published.append(name)
        assert published
        assert rejected is not None
        assert says in assert_problem(rejected, 409, "storage-quota-exceeded")["detail"]
        # Other keys are not affected.
        other = client.put(
            "/tasks/quota/other", content=world.bundle(600).to_bytes(), headers=sends("other")
        )
        assert other.status_code == 201
        for name in (*published, "quota/other"):
            assert client.delete(f"/tasks/{name}", headers=sends("other")).status_code == 200
