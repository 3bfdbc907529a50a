"""Two independent implementations of S3, each in a process of its own, with one empty bucket."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import boto3
import httpx

from tests.e2e.server_process import free_port

BUCKET = "tasks"
KEY, SECRET = "test", "test-secret"
START_SECONDS = 90.0


def environment(port: int) -> dict[str, str]:
    """How a server of tasks finds the one at a port."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
    }


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[int]:
    """The port of a moto server, which keeps everything in memory."""
    port = free_port()
    program = Path(sys.executable).with_name("moto_server")
    with _running([str(program), "-H", "127.0.0.1", "-p", str(port)], port, folder / "moto.log"):
        yield port


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[int]:
    """The port of SeaweedFS's S3 gateway: master, volume server and filer in one process."""
    data = folder / "seaweedfs"
    data.mkdir()
    names = ("master", "volume", "filer", "s3")
    ports = {name: (free_port(), free_port()) for name in names}
    command = [
        str(Path(sys.executable).with_name("weed")),
        "server",
        f"-dir={data}",
        "-ip=127.0.0.1",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
        "-volume.max=10",
        "-s3",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *(f"-{name}.port={http}" for name, (http, _) in ports.items()),
        *(f"-{name}.port.grpc={grpc}" for name, (_, grpc) in ports.items()),
    ]
    port = ports["s3"][0]
    with _running(command, port, folder / "seaweedfs.log"):
        yield port


@contextlib.contextmanager
def _running(command: list[str], port: int, log: Path) -> Iterator[None]:
    keys = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **keys}, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        await_answer(process, port, log)
        _create_bucket(port)
        yield
    finally:
        process.kill()
        process.wait(timeout=30)


def await_answer(process: subprocess.Popen, port: int, log: Path) -> None:
    """Return once the process answers at the port, whatever it says."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/", timeout=5)
            return
        time.sleep(0.05)
    raise AssertionError(f"it did not start in time:\n{log.read_text()}")


def _create_bucket(port: int) -> None:
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
