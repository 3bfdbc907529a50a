"""Repeating and giving up, without clock and network: operations are gone through step by step."""

import httpx
import pytest
from engram_vit import core as core_module
from engram_vit.core import Core, Request, Send, Sleep
from engram_vit.errors import (
    AccessDenied,
    ClientError,
    Conflict,
    ConnectionFailed,
    DeadlineExceeded,
    Invalid,
    NotFound,
    ResponseTimeout,
    ServerBusy,
    ServerError,
    UnexpectedResponse,
    UsageError,
)

from tests.client.fake_server import problem

URL = "http://server:1"
BUSY = problem(429, "overloaded", "Too much.", {"Retry-After": "3"})
GOOD = httpx.Response(200, json={"tasks": []})


class Clock:
    """A server with preset outcomes, and a clock that advances only in pauses."""

    def __init__(self, patience=60.0, timeout=60.0):
        self.time = 100.0
        self.core = Core(
            URL, timeout=timeout, patience=patience, now=lambda: self.time, chance=lambda: 0.0
        )
        self.pauses: list[float] = []
        self.requests: list[httpx.Request] = []

    def run(self, operation, outcomes, seconds_each=0.0):
        """The operation's result; the last outcome stays."""
        waiting = list(outcomes)
        reply = None
        try:
            while True:
                effect = operation.send(reply)
                if isinstance(effect, Sleep):
                    self.pauses.append(effect.seconds)
                    self.time += effect.seconds
                    reply = None
                elif isinstance(effect, Send):
                    self.requests.append(effect.request)
                    self.time += seconds_each
                    reply = waiting.pop(0) if len(waiting) > 1 else waiting[0]
                    if isinstance(reply, httpx.Response):
                        reply.request = effect.request
        except StopIteration as done:
            return done.value


def refused(reason="Connection refused"):
    return httpx.ConnectError(reason)


def test_a_busy_server_is_retried_when_it_says():
    clock = Clock()
    assert clock.run(clock.core.tasks(), [BUSY, BUSY, GOOD]) == ()
    assert clock.pauses == [3.0, 3.0]


def test_a_storm_of_429_ends_with_patience_and_says_so():
    clock = Clock(patience=10)
    with pytest.raises(
        ServerBusy, match=r"Too much\. Gave up after 4 tries; the next was due in 3\.0 s"
    ):
        clock.run(clock.core.tasks(), [BUSY])
    assert clock.pauses == [3.0, 3.0, 3.0]


def test_a_pause_longer_than_patience_is_not_begun():
    clock = Clock(patience=10)
    later = problem(503, "store-unavailable", "The store is away.", {"Retry-After": "30"})
    with pytest.raises(ServerBusy):
        clock.run(clock.core.tasks(), [later])
    assert clock.pauses == []


def test_retry_after_may_be_a_date():
    clock = Clock(patience=10)
    past = problem(429, "overloaded", "Too much.", {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"})
    assert clock.run(clock.core.tasks(), [past, GOOD]) == ()
    assert clock.pauses == [core_module.FIRST_PAUSE]


def test_a_server_that_never_answered_is_not_waited_for():
    clock = Clock()
    with pytest.raises(
        ConnectionFailed, match=r"No connection: http://server:1 \(Connection refused\)"
    ):
        clock.run(clock.core.tasks(), [refused()])
    assert clock.pauses == []


def test_a_server_that_vanishes_is_waited_for_with_growing_pauses():
    clock = Clock()
    clock.run(clock.core.tasks(), [GOOD])
    broken = httpx.ReadError("reset")
    assert clock.run(clock.core.tasks(), [broken, *[refused()] * 6, GOOD]) == ()
    assert clock.pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_gateway_without_its_server_is_waited_for():
    clock = Clock()
    gateway = httpx.Response(502, html="<h1>Bad Gateway</h1>")
    assert clock.run(clock.core.tasks(), [gateway, GOOD]) == ()


def test_no_answer_in_time_is_final():
    clock = Clock(timeout=20)
    with pytest.raises(ResponseTimeout, match=r"No response from .* within 20 s"):
        clock.run(clock.core.tasks(), [httpx.ReadTimeout("")])
    assert len(clock.requests) == 1


def test_a_change_of_unknown_outcome_is_not_repeated():
    clock = Clock()
    clock.run(clock.core.tasks(), [GOOD])
    with pytest.raises(ConnectionFailed, match="The connection broke"):
        clock.run(clock.core.rollback("birds", "default"), [httpx.ReadError("reset")])
    assert len(clock.requests) == 2


def test_a_change_that_was_never_sent_is_repeated():
    clock = Clock()
    clock.run(clock.core.tasks(), [GOOD])
    changed = {"task": "birds", "generation": 4, "aliases": {"default": 1}, "versions": [1]}
    outcomes = [refused(), httpx.Response(200, json=changed)]
    assert clock.run(clock.core.rollback("birds", "default"), outcomes).versions == (1,)


def test_the_time_left_is_sent_to_the_server_and_bounds_the_wait():
    clock = Clock(timeout=60)
    operation = clock.core.call(Request("GET", "/tasks"), deadline=clock.time + 5)
    clock.run(operation, [BUSY, GOOD])
    first, second = clock.requests
    assert first.headers["X-Deadline-Ms"] == "5000"
    assert second.headers["X-Deadline-Ms"] == "2000"
    assert second.extensions["timeout"]["read"] == 2.0


def test_a_deadline_ends_waiting_before_it_passes():
    clock = Clock()
    operation = clock.core.call(Request("GET", "/tasks"), deadline=clock.time + 5)
    with pytest.raises(DeadlineExceeded, match="while waiting: Too much"):
        clock.run(operation, [BUSY])
    assert clock.pauses == [3.0]


@pytest.mark.parametrize(
    "outcome",
    [httpx.ReadTimeout(""), problem(504, "deadline-exceeded", "The deadline passed.")],
    ids=["client clock", "server response"],
)
def test_a_deadline_that_passes_is_an_error(outcome):
    clock = Clock()
    operation = clock.core.call(Request("GET", "/tasks"), deadline=clock.time + 5)
    with pytest.raises(DeadlineExceeded, match="deadline passed"):
        clock.run(operation, [outcome], seconds_each=5)


@pytest.mark.parametrize(
    ("response", "expected", "message"),
    [
        (problem(401, "key-required", "Send the key."), AccessDenied, "Send the key"),
        (problem(403, "not-permitted", "Needs the admin key."), AccessDenied, "admin key"),
        (
            problem(404, "unknown-task", "There is no task 'pest'.", names=["pest"]),
            NotFound,
            "pest",
        ),
        (problem(409, "still-extended", "A child extends it."), Conflict, "child"),
        (problem(412, "already-exists", "It exists."), Conflict, "exists"),
        (problem(422, "malformed-bundle", "Not a bundle."), Invalid, "Not a bundle"),
        (problem(503, "task-unavailable", "It could not be loaded."), ServerError, "loaded"),
        (problem(500, "internal", "Something."), ServerError, "abc123"),
        (httpx.Response(404, html="<h1>nginx</h1>"), UnexpectedResponse, "not an Engram response"),
        (httpx.Response(308, headers={"Location": "https://x/"}), UnexpectedResponse, "https://x/"),
        (httpx.Response(200, html="<h1>Welcome</h1>"), UnexpectedResponse, "Check the address"),
        (httpx.Response(200, json={"hello": 1}), UnexpectedResponse, "Check the address"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_each_refusal_is_one_kind_of_error_and_final(response, expected, message):
    clock = Clock()
    with pytest.raises(expected, match=message) as raised:
        clock.run(clock.core.tasks(), [response])
    assert type(raised.value) is expected
    assert len(clock.requests) == 1


def test_an_error_has_the_details_of_the_response():
    clock = Clock()
    with pytest.raises(NotFound) as raised:
        clock.run(clock.core.task("pest"), [problem(404, "unknown-task", "No.", names=["pest"])])
    error = raised.value
    assert (error.status, error.kind, error.names) == (404, "unknown-task", ("pest",))
    assert error.request_id == "abc123"


def test_every_error_says_how_a_command_ends():
    waiting, codes = [ClientError], {}
    while waiting:
        one = waiting.pop()
        codes[one.__name__] = one.exit_code
        waiting += one.__subclasses__()
    assert {name for name, code in codes.items() if code == 3} == {
        *("ServerBusy", "ConnectionFailed", "DeadlineExceeded", "ResponseTimeout")
    }
    assert (codes["AccessDenied"], codes["NotFound"], codes["UsageError"]) == (4, 5, 2)
    assert set(codes.values()) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("name", "path"),
    [("birds", "/tasks/birds"), ("team/birds", "/tasks/team/birds"), ("a?b#c", "/tasks/a%3Fb%23c")],
)
def test_special_characters_of_task_names_are_escaped(name, path):
    clock = Clock()
    with pytest.raises(NotFound):
        clock.run(clock.core.task(name), [problem(404, "unknown-task", "No.")])
    assert clock.requests[0].url.raw_path.decode() == path


@pytest.mark.parametrize(
    ("address", "used"),
    [
        ("http://host:8000/", "http://host:8000"),
        ("host:8000", "http://host:8000"),
        ("https://host/engram", "https://host/engram"),
        ("[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_are_accepted_as_people_write_them(address, used):
    assert Core(address, timeout=1, patience=1).url == used


@pytest.mark.parametrize("address", ["", "ftp://host", "http://", "http://host:port"])
def test_an_invalid_address_is_a_clear_error(address):
    with pytest.raises(UsageError, match="Invalid server address"):
        Core(address, timeout=1, patience=1)


@pytest.mark.parametrize("key", ["", "ключ-12345", "line\nfeed"])
def test_what_is_no_key_is_refused_and_not_repeated(key):
    with pytest.raises(UsageError, match="printable ASCII"):
        Core(URL, key, timeout=1, patience=1)


def test_the_key_goes_with_every_request():
    core = Core(URL, "secret-key", timeout=1, patience=1)
    sent = next(core.tasks()).request
    assert sent.headers["Authorization"] == "Bearer secret-key"


def test_a_download_that_was_changed_on_the_way_is_refused():
    clock = Clock()
    response = httpx.Response(200, content=b"bundle", headers={"ETag": '"sha256:other"'})
    with pytest.raises(UnexpectedResponse, match="A proxy may have changed the file"):
        clock.run(clock.core.pull("birds@3"), [response])


def test_a_reference_without_a_version_is_refused_before_asking():
    clock = Clock()
    with pytest.raises(UsageError, match="'birds@' has no version"):
        clock.run(clock.core.pull("birds@"), [GOOD])
    assert not clock.requests


# --- waiting for replicas -------------------------------------------------------------------------

CHANGED = {"task": "pets", "generation": 7, "aliases": {"default": 1}, "versions": [1]}
BEHIND = {"serving": ["a-1"], "behind": ["b-1"], "error": None}


def test_waiting_for_all_replicas_is_requested_with_a_longer_timeout():
    clock = Clock(timeout=10)
    late = httpx.Response(202, json={**CHANGED, "replicas": BEHIND})
    changed = clock.run(clock.core.rollback("pets", "default", wait="all"), [late])
    (request,) = clock.requests
    assert dict(request.url.params) == {"alias": "default", "wait": "all", "timeout": "30"}
    assert request.extensions["timeout"]["read"] == 40
    assert changed.replicas.behind == ("b-1",)
    assert not changed.replicas.complete


def test_without_waiting_the_result_has_no_replicas():
    clock = Clock()
    good = httpx.Response(200, json=CHANGED)
    changed = clock.run(clock.core.set_alias("pets", "default", 1), [good])
    assert changed.replicas is None
    assert not clock.requests[0].url.params
    with pytest.raises(UsageError, match="'some'"):
        clock.run(clock.core.retire("pets", None, wait="some"), [good])


def test_replicas_are_listed_and_unknown_members_left_out():
    clock = Clock()
    names = ("id", "hostname", "address", "started", "version", "backbone", "fingerprint")
    one = {**dict.fromkeys(names, "x"), "this": True, "generation": 7, "age_seconds": 0.5}
    listed = httpx.Response(200, json={"replicas": [{**one, "colour": "blue"}]})
    (replica,) = clock.run(clock.core.replicas(), [listed])
    assert (replica.id, replica.this, replica.generation) == ("x", True, 7)
    assert replica.process is None, "of an older server"


# --- pages ----------------------------------------------------------------------------------------


def page_of(*names, following=None):
    facts = {"version": 1, "status": "ready", "reason": None, "task_type": "single_label"}
    facts |= {"classes": 2, "description": "", "aliases": {"default": 1}, "versions": [1]}
    tasks = [{**facts, "task": name} for name in names]
    return httpx.Response(200, json={"tasks": tasks, "next": following})


def test_tasks_are_read_page_by_page():
    clock = Clock()
    pages = [page_of("a", "b", following="b"), page_of("c")]
    listed = clock.run(clock.core.tasks(search="x", team="vision"), pages)
    assert [task.task for task in listed] == ["a", "b", "c"]
    queries = [dict(request.url.params) for request in clock.requests]
    assert queries == [{"q": "x", "team": "vision"}, {"q": "x", "team": "vision", "cursor": "b"}]


def test_tasks_of_a_server_without_pages_are_listed():
    clock = Clock()
    listed = page_of("a")
    old = httpx.Response(200, json={"tasks": listed.json()["tasks"]})
    assert [task.task for task in clock.run(clock.core.tasks(retired=True), [old])] == ["a"]
    assert dict(clock.requests[0].url.params) == {"retired": "true"}
