"""Stores of every kind, each new and empty."""

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from task_store import TaskStore, open_store

Opener = Callable[..., TaskStore]
_KEYS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 server of our own on a free port, with one bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
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
    yield endpoint
    server.stop()


@pytest.fixture
def s3_options(s3_endpoint) -> dict[str, Any]:
    return {
        "config": {**_KEYS, "endpoint": s3_endpoint},
        "client_options": {"allow_http": True},
        "retry_config": {"max_retries": 0},
    }


@pytest.fixture
def open_s3(s3_options) -> Opener:
    """Opens the same new prefix of the bucket each time it is called."""
    url = f"s3://tasks/store-{next(_numbers)}"

    def opener(**options: Any) -> TaskStore:
        return open_store(url, **(s3_options | options))

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
    objects = open_store("memory://")._objects

    def opener(**options: Any) -> TaskStore:
        return TaskStore(objects, **options)

    return opener


@pytest.fixture(params=["local", "memory", "s3"])
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
    return {info.path: info.size for info in store._objects.listing("")}
