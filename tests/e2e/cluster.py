"""Several servers of one store, behind haproxy, which a test may stop, kill and start again."""

import contextlib
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.e2e.server_process import ServerProcess, free_port, start
from tests.tools import find_tool

HAPROXY = """
global
    maxconn 200
defaults
    mode http
    maxconn 200
    timeout connect 2s
    timeout client 60s
    timeout server 60s
    timeout check 5s
    option redispatch 1
    retries 3
    retry-on conn-failure
frontend all
    bind 127.0.0.1:{port}
    default_backend engram
backend engram
    balance roundrobin
    option http-server-close
    option httpchk GET /readyz
    default-server check inter 250ms fall 1 rise 1
{servers}
"""


class Cluster:
    """`count` servers with the same settings, each in a folder and at a port of its own."""

    def __init__(
        self,
        folder: Path,
        backbone: Path,
        count: int,
        environment: Mapping[str, str],
        **settings: object,
    ) -> None:
        self._folder = folder
        self._backbone = backbone
        self._environment = environment
        self._settings = settings
        self._ports = [free_port() for _ in range(count)]
        self._servers: dict[int, ServerProcess] = {}

    @property
    def ports(self) -> Sequence[int]:
        return self._ports

    @property
    def urls(self) -> list[str]:
        """Of the servers that run."""
        return [server.url for server in self._servers.values()]

    def __enter__(self) -> "Cluster":
        try:
            with ThreadPoolExecutor(len(self._ports)) as pool:
                list(pool.map(self.start, range(len(self._ports))))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *about: object) -> None:
        for server in self._servers.values():
            server.kill()

    def start(self, number: int) -> None:
        """Start one, and wait until it is ready."""
        folder = self._folder / f"replica-{number}"
        folder.mkdir(exist_ok=True)
        server = start(
            folder,
            self._backbone,
            port=self._ports[number],
            environment=self._environment,
            **self._settings,
        )
        try:
            server.await_ready()
        except BaseException:
            server.kill()
            raise
        self._servers[number] = server

    def kill(self, number: int) -> None:
        """As a machine that loses its power."""
        self._servers.pop(number).kill()

    def stop(self, number: int) -> None:
        """As an orchestrator does; it must leave in order."""
        server = self._servers[number]
        assert server.stop() == 0, server.log.read_text()
        del self._servers[number]


@contextlib.contextmanager
def haproxy(folder: Path, ports: Sequence[int]) -> Iterator[str]:
    """The address of a proxy that asks each server's /readyz."""
    port = free_port()
    servers = [f"    server replica-{n} 127.0.0.1:{each}" for n, each in enumerate(ports)]
    config = folder / "haproxy.cfg"
    config.write_text(HAPROXY.format(port=port, servers="\n".join(servers)))
    log = folder / "haproxy.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [find_tool("haproxy"), "-db", "-f", str(config)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while not _answers(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield url
    finally:
        process.kill()
        process.wait(timeout=30)


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    return False
