"""Stores of every kind, each new and empty."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import boto3
import pytest
from engram_store import TaskStore, open_store
from engram_store.layout import log_path
from moto.s3.responses import S3Response
from moto.server import ThreadedMotoServer

from tests.task_store import azurite

Opener = Callable[..., TaskStore]
NO_RETRIES = {"retry_config": {"max_retries": 0}}
_numbers = itertools.count()


@dataclass(frozen=True)
class Remote:
    """A server of objects, and the variables with which an operator says how to reach it."""

    bucket: str
    environment: Mapping[str, str]


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Remote]:
    """An S3 server of our own on a free port, with one bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    _write_one_at_a_time()
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket="tasks")
    client.close()
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }
    yield Remote("s3://tasks", environment)
    server.stop()


def _write_one_at_a_time() -> None:
    """moto looks whether a key exists and then writes it, with nothing to hold others back.

    So two creations at the same moment can both succeed, which S3 rules out.
    """
    put_object, lock = S3Response.put_object, threading.Lock()

    def guarded(self: S3Response) -> Any:
        with lock:
            return put_object(self)

    S3Response.put_object = guarded


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory) -> Iterator[Remote]:
    """Azurite on a free port, with one container."""
    with azurite.azurite(tmp_path_factory.mktemp("azurite")) as port:
        yield Remote(f"az://{azurite.CONTAINER}", azurite.environment(port))


@pytest.fixture
def s3(s3_server, monkeypatch) -> Remote:
    return _reached(s3_server, monkeypatch)


@pytest.fixture
def azure(azure_server, monkeypatch) -> Remote:
    return _reached(azure_server, monkeypatch)


def _reached(server: Remote, monkeypatch: pytest.MonkeyPatch) -> Remote:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture(params=["s3", "azure"])
def remote(request) -> Remote:
    """Each server, its variables set."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def open_remote(remote) -> Opener:
    return _opener_of_new_prefix(remote)


@pytest.fixture
def open_s3(s3) -> Opener:
    return _opener_of_new_prefix(s3)


@pytest.fixture
def open_azure(azure) -> Opener:
    return _opener_of_new_prefix(azure)


def _opener_of_new_prefix(server: Remote) -> Opener:
    """Opens the same new prefix of the bucket each time it is called."""
    url = f"{server.bucket}/store-{next(_numbers)}"

    def opener(**options: Any) -> TaskStore:
        return open_store(url, **(NO_RETRIES | options))

    return opener


@pytest.fixture
def open_local(tmp_path) -> Opener:
    """Opens the same new folder each time it is called."""

    def opener(**options: Any) -> TaskStore:
        return open_store(f"file://{tmp_path / 'store'}", **options)

    return opener


@pytest.fixture
def open_memory() -> Opener:
    """Opens the same objects in memory each time it is called, as another process would."""
    objects = open_store("memory://").objects

    def opener(**options: Any) -> TaskStore:
        return TaskStore(objects, **options)

    return opener


@pytest.fixture(params=["local", "memory", "s3", "azure"])
def reopen(request) -> Opener:
    """An opener over each backend: everything that uses it is the conformance suite."""
    return request.getfixturevalue(f"open_{request.param}")


@pytest.fixture
def store(reopen) -> TaskStore:
    return reopen(actor="ada@lab")


@pytest.fixture
def local(open_local) -> TaskStore:
    return open_local(actor="ada@lab")


def listing(store: TaskStore) -> dict[str, int]:
    """Every object and its size: what a refused request must leave as it was."""
    return {info.path: info.size for info in store.objects.listing("")}


def before_entry(
    store: TaskStore, generation: int, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run an action once, right before the store creates the log entry of a generation."""
    create, pending = store.objects.create, [action]

    def interrupted(path: str, data: bytes) -> bool:
        if path == log_path(generation) and pending:
            pending.pop()()
        return create(path, data)

    monkeypatch.setattr(store.objects, "create", interrupted)
