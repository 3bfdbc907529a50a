"""Azurite, the emulator of Azure's blobs, in a separate process, with one empty container."""

import base64
import contextlib
import hashlib
import hmac
import os
import subprocess
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import httpx

from tests.e2e.s3_servers import await_answer
from tests.e2e.server_process import free_port
from tests.tools import find_tool

CONTAINER = "tasks"
ACCOUNT = "engram"
KEY = base64.b64encode(b"the key of the tests, 32 letters").decode()


def environment(port: int) -> dict[str, str]:
    """How an operator reaches the one at a port."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
        "AZURE_ALLOW_HTTP": "true",
    }


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[int]:
    """The port of an Azurite that keeps everything in memory."""
    port = free_port()
    log = folder / "azurite.log"
    command = [
        str(find_tool("azurite-blob")),
        "--blobHost=127.0.0.1",
        f"--blobPort={port}",
        "--inMemoryPersistence",
        "--disableTelemetry",
        "--silent",
    ]
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        await_answer(process, port, log)
        _create_container(port)
        yield port
    finally:
        process.kill()
        process.wait(timeout=30)


def _create_container(port: int) -> None:
    """What obstore cannot do, signed with the key as Azure wants it."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    # Twelve standard headers, none of which is sent.
    text = f"PUT{12 * chr(10)}{named}/{ACCOUNT}/{ACCOUNT}/{CONTAINER}\nrestype:container"
    digest = hmac.digest(base64.b64decode(KEY), text.encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
    url = f"http://127.0.0.1:{port}/{ACCOUNT}/{CONTAINER}?restype=container"
    httpx.put(url, headers=headers).raise_for_status()
