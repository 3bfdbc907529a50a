"""Calls have the keys, limits, shares, logs and metrics of requests over HTTP."""

import json
import logging
import struct
import threading
import zlib

import grpc
import pytest
from engram_server.access.quotas import KeyLimits
from engram_server.api.rpc.calls import Call
from engram_server.api.rpc.protocol import SERVICE, message
from engram_server.api.rpc.services import methods

from tests.api.keys import make_key, secret_of, sends, token_of, write_keys
from tests.api.rpc.service import SECONDS, Wire, infer_request, serving_grpc
from tests.serving import photo

EVERYTHING = {scope: ["*"] for scope in ("predict", "read", "publish", "admin", "metrics")}
INFER = f"/{SERVICE}/ModelInfer"


@pytest.fixture
def keys(tmp_path):
    file = write_keys(
        tmp_path / "keys.json",
        make_key("ann", scopes=EVERYTHING),
        make_key("bob", scopes=EVERYTHING),
        make_key("scenes", scopes={"predict": ["scene"]}),
        make_key("slow", scopes=EVERYTHING, limits=KeyLimits(requests_per_second=0.001)),
    )
    return {"keys_file": str(file)}


def refused(code: str, words: str = ""):
    """Expect a call to fail with a status and these words."""

    class Expectation:
        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            assert isinstance(error, grpc.RpcError), f"expected {code}"
            self.error = error
            assert (error.code(), words in error.details()) == (grpc.StatusCode[code], True), (
                error.code(),
                error.details(),
            )
            return True

    return Expectation()


def test_keys_are_sent_as_metadata(world, keys):
    with serving_grpc(world, **keys) as service:
        request = infer_request(photo(1))
        with refused("UNAUTHENTICATED", "requires a key"):
            service.ask("ModelInfer", request)
        with refused("UNAUTHENTICATED", "Unknown key"):
            service.ask("ModelInfer", request, key={"x-api-key": "wrong"})
        bearer = {"authorization": f"Bearer {token_of('ann', secret_of('ann'))}"}
        for key in (sends("ann"), bearer):
            assert service.ask("ModelInfer", request, key=key).outputs
        for name in ("ServerMetadata", "RepositoryIndex"):
            with refused("UNAUTHENTICATED"):
                service.ask(name)
        assert service.ask("ServerLive").live  # as /livez


def test_keys_reach_their_tasks_only(world, keys):
    with serving_grpc(world, **keys) as service:
        key = sends("scenes")
        scene = infer_request(photo(1), model="scene")
        assert service.ask("ModelInfer", scene, key=key).outputs
        with refused("PERMISSION_DENIED", "'pets'"):
            service.ask("ModelInfer", infer_request(photo(1)), key=key)
        with refused("PERMISSION_DENIED", "'pets'"):
            service.ask("ModelMetadata", message("ModelMetadataRequest")(name="pets"), key=key)
        every = infer_request(photo(1), model="multitask")
        assert [each.name for each in service.ask("ModelInfer", every, key=key).outputs] == [
            "scene"
        ]
        listed = service.ask("RepositoryIndex", key=key).models
        assert {each.name for each in listed} == {"multitask", "scene"}
        with refused("PERMISSION_DENIED", "requires the scope admin"):
            unload = message("RepositoryModelUnloadRequest")(model_name="scene")
            service.ask("RepositoryModelUnload", unload, key=key)
        # No hint reveals a name that the key may not see.
        with refused("PERMISSION_DENIED") as failed:
            service.ask("ModelInfer", infer_request(photo(1), model="pest"), key=key)
        assert "pets" not in failed.error.details()


class ForeignContext:
    """A context as grpc makes it for a call with unusual metadata."""

    def __init__(self, peer: str):
        self._peer = peer

    def peer(self) -> str:
        return self._peer

    def invocation_metadata(self):
        return [("x-request-id", "…"), ("token-bin", b"\xff"), ("x-forwarded-for", "10.0.0.9")]


@pytest.mark.parametrize(
    ("peer", "address"),
    [("ipv4:10.0.0.1:5", "10.0.0.1"), ("ipv6:%5B2001:db8::1%5D:5", "2001:db8::1"), ("unix:", None)],
)
def test_metadata_and_addresses_of_any_form_are_read(world, peer, address):
    call = Call(world.app().state.runtime, methods()[INFER], ForeignContext(peer))
    assert call.record.address == address
    assert len(call.record.id) == 32  # the client's is not fit for a log


def test_forwarded_addresses_of_trusted_proxies_are_believed(world):
    context = ForeignContext("ipv4:10.0.0.1:5")
    runtime = world.app(trusted_proxies=("10.0.0.1",)).state.runtime
    record = Call(runtime, methods()[INFER], context).record
    assert (record.address, record.proxy) == ("10.0.0.9", "10.0.0.1")


def test_long_messages_of_errors_arrive(world):
    with serving_grpc(world) as service:
        request = infer_request(photo(1))
        request.inputs[0].name = "é" * 1000
        request.inputs[0].datatype = "é" * 1000
        with refused("INVALID_ARGUMENT", "Unknown input 'éé"):
            service.ask("ModelInfer", request)


def test_quotas_hold_and_say_when_to_retry(world, keys):
    with serving_grpc(world, **keys) as service:
        assert service.ask("ServerMetadata", key=sends("slow")).name
        with refused("RESOURCE_EXHAUSTED", "0.001 requests per second") as failed:
            service.ask("ServerMetadata", key=sends("slow"))
        trailing = dict(failed.error.trailing_metadata())
        assert int(trailing["grpc-retry-pushback-ms"]) > 100_000
        assert trailing["x-request-id"]


def test_messages_are_limited(world):
    with serving_grpc(world, body_bytes=50_000) as service:
        with refused("RESOURCE_EXHAUSTED", "larger than max"):
            service.method("ModelInfer")(bytes(50_001), timeout=SECONDS)
        bomb = zlib.compress(bytes(10_000_000))
        with refused("INVALID_ARGUMENT", "exceeds the limit"):
            service.method("ModelInfer")(bomb, timeout=SECONDS)
    with serving_grpc(world) as service, refused("INVALID_ARGUMENT", "limit of 65,536 bytes"):
        service.ask("ModelConfig", message("ModelConfigRequest")(name="x" * 70_000))


def test_answers_are_limited(world):
    with (
        serving_grpc(world, answer_bytes=30) as service,
        refused("INVALID_ARGUMENT", "send fewer images"),
    ):
        service.ask("ModelInfer", infer_request(photo(1)))


def test_a_slow_message_has_the_time_of_a_body(world):
    with serving_grpc(world, body_seconds=0.2) as service:
        before, wire = service.rejected("body_time"), Wire(service.port)
        wire.call(1, INFER, struct.pack(">BI", 0, 1000) + b"begin")
        service.await_value(lambda: service.rejected("body_time"), before + 1)
        service.await_value(lambda: service.runtime.pools.body_bytes.used, 0)
        wire.close()


def test_half_sent_messages_of_one_key_leave_room_for_others(world, keys):
    limits = {"body_bytes": 100_000, "inflight_body_bytes": 400_000}
    with serving_grpc(world, **keys, **limits) as service:
        wire, pool = Wire(service.port), service.runtime.pools.body_bytes
        for number in range(4):
            start = struct.pack(">BI", 0, 90_000)
            wire.call(2 * number + 1, INFER, start + bytes(1000), sends("ann"))
        service.await_value(lambda: pool.used, 200_000)
        request = infer_request(photo(1))
        assert service.ask("ModelInfer", request, key=sends("bob")).outputs
        with refused("RESOURCE_EXHAUSTED", "one caller may hold as much as remains free"):
            service.ask("ModelInfer", request, key=sends("ann"))
        wire.close()
        service.await_value(lambda: pool.used, 0)
        assert service.ask("ModelInfer", request, key=sends("ann")).outputs


def test_answers_that_are_not_read_count_until_the_client_is_gone(world, keys, monkeypatch):
    monkeypatch.setattr("engram_server.api.inference.NUMBER_BYTES", 100_000)  # per value
    with serving_grpc(world, **keys) as service:
        wire, pool = Wire(service.port), service.runtime.pools.answer_bytes
        data = infer_request(photo(1)).SerializeToString()
        wire.call(1, INFER, struct.pack(">BI", 0, len(data)) + data, sends("ann"))
        service.await_value(lambda: pool.used, 300_000)
        assert service.ask("ModelInfer", infer_request(photo(1)), key=sends("bob")).outputs
        assert pool.used == 300_000
        wire.close()
        service.await_value(lambda: pool.used, 0)


def test_calls_of_one_address_are_limited(world):
    with serving_grpc(world, connections=4) as service:
        wire, before = Wire(service.port), service.rejected("calls")
        for number in range(3):
            wire.call(2 * number + 1, INFER, b"\0")
        service.await_value(lambda: service.rejected("calls"), before + 1)
        with refused("UNAVAILABLE", "calls are in flight"):
            service.ask("ServerLive")
        wire.close()

        def answered() -> bool:
            try:
                return service.ask("ServerLive").live
            except grpc.RpcError:
                return False

        service.await_value(answered, True)


class Stopped:
    """A pass that waits until it is let go."""

    def __init__(self, world, monkeypatch):
        self.begun, self.go_on = threading.Event(), threading.Event()
        run = world.passes.run
        monkeypatch.setattr(world.passes, "run", self)
        self._run = run

    def __call__(self, *args, **kwargs):
        self.begun.set()
        assert self.go_on.wait(SECONDS)
        return self._run(*args, **kwargs)


def test_a_cancelled_call_leaves_the_queue(world, monkeypatch):
    stopped = Stopped(world, monkeypatch)
    with serving_grpc(world) as service:
        pending = world.engine.predictions
        first = service.method("ModelInfer").future(infer_request(photo(81)).SerializeToString())
        assert stopped.begun.wait(SECONDS)
        second = service.method("ModelInfer").future(infer_request(photo(82)).SerializeToString())
        service.await_value(lambda: pending.pending_images, 2)
        second.cancel()
        service.await_value(lambda: pending.pending_images, 1)
        stopped.go_on.set()
        assert first.result(SECONDS)


def test_the_deadline_of_a_client_reaches_the_queue(world, monkeypatch):
    stopped = Stopped(world, monkeypatch)
    with serving_grpc(world) as service:
        first = service.method("ModelInfer").future(infer_request(photo(83)).SerializeToString())
        assert stopped.begun.wait(SECONDS)
        with refused("DEADLINE_EXCEEDED"):
            service.method("ModelInfer")(infer_request(photo(84)).SerializeToString(), timeout=0.2)
        service.await_value(lambda: world.engine.predictions.pending_images, 1)
        stopped.go_on.set()
        assert first.result(SECONDS)


def test_calls_in_flight_are_answered_at_shutdown(world, monkeypatch):
    stopped = Stopped(world, monkeypatch)
    channel = None
    with serving_grpc(world) as service:
        channel = grpc.insecure_channel(f"127.0.0.1:{service.port}")
        call = channel.unary_unary(INFER).future(infer_request(photo(85)).SerializeToString())
        assert stopped.begun.wait(SECONDS)
        threading.Timer(0.2, stopped.go_on.set).start()
    assert call.result(SECONDS)
    channel.close()


def test_calls_are_logged_measured_and_audited(world, keys, tmp_path, caplog):
    log = tmp_path / "audit.jsonl"
    caplog.set_level(logging.INFO, "engram.access")
    with serving_grpc(world, **keys, audit_log=str(log), audit_predictions=True) as service:
        labels = {"route": INFER, "method": "gRPC", "status": "200"}

        def count() -> float:
            name = "engram_request_seconds_count"
            return world.metrics.registry.get_sample_value(name, labels) or 0

        before = count()
        service.ask(
            "ModelInfer", infer_request(photo(1)), key={**sends("ann"), "x-request-id": "r7"}
        )
        assert count() == before + 1
        with refused("UNAUTHENTICATED"):
            service.ask("ModelInfer", infer_request(photo(1)))
        for change in ("Unload", "Load"):
            request = message(f"RepositoryModel{change}Request")(model_name="age")
            service.ask(f"RepositoryModel{change}", request, key=sends("ann"))
    (line,) = [each for each in caplog.records if each.__dict__.get("images") == 1]
    assert (line.path, line.status, line.tasks) == (INFER, 200, 1)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    found = [(each["action"], each.get("outcome"), each.get("task")) for each in records]
    assert ("model_infer", "ended", "pets") in found
    assert ("model_infer", "refused", None) in found
    for action in ("repository_model_unload", "repository_model_load"):
        assert [each[1:] for each in found if each[0] == action] == [
            ("begun", "age"),
            ("ended", "age"),
        ]


def test_an_unexpected_error_reveals_nothing(world, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("secret")

    with serving_grpc(world) as service:
        monkeypatch.setattr("engram_server.api.rpc.messages.read_request", broken)
        with refused("INTERNAL", "search the server log") as failed:
            service.ask("ModelInfer", infer_request(photo(1)))
        assert "secret" not in failed.error.details()
