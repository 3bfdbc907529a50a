"""A caller that takes as much as it can of one thing, until its standard input ends.

    python -m benchmarks.hostile_caller ATTACK PORT KEY [--file FILE]

It runs in a process of its own: what it does must not slow down the caller that is measured.
"""

import argparse
import functools
import http.client
import io
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

MIB = 2**20


class Caller:
    def __init__(self, port: int, key: str, file: bytes) -> None:
        self.port = port
        self.headers = {"X-API-Key": key}
        self.file = file
        self.counter = itertools.count()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def repeat(self, method: str, path: str, body: Callable[[], bytes | None]) -> None:
        """Send the same request on one connection, as fast as it is answered."""
        connection = self.connect()
        while True:
            connection.request(method, path, body(), self.headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status in (429, 503):
                time.sleep(0.05)

    def hold(self, method: str, path: str, size: int, sent: int) -> None:
        """Announce a body, send most of it, and wait; then again."""
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        start = (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}Content-Length: {size}\r\n\r\n"
        )
        block = bytes(MIB)
        while True:
            with socket.create_connection(("127.0.0.1", self.port)) as wire:
                wire.sendall(start.encode())
                for _ in range(sent // MIB):
                    wire.sendall(block)
                wire.recv(65536)  # until the server ends it

    def sip(self, path: str) -> None:
        """Read an answer in small pieces."""
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        while True:
            with socket.create_connection(("127.0.0.1", self.port)) as wire:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                wire.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}\r\n".encode())
                while wire.recv(65536):
                    time.sleep(0.5)

    # Attacks: what each of the threads does

    def photos(self) -> None:
        """Images that were never seen, for all tasks."""
        self.repeat("POST", "/predict", lambda: picture(next(self.counter), (320, 240)))

    def large_photos(self) -> None:
        content = large_picture()
        # Other bytes after the end of the picture: never cached.
        self.repeat("POST", "/predict", lambda: content + next(self.counter).to_bytes(8, "big"))

    def bodies(self) -> None:
        self.hold("POST", "/predict", 32 * MIB, 31 * MIB)

    def uploads(self) -> None:
        self.hold("PUT", f"/tasks/hostile/{next(self.counter)}", 255 * MIB, 64 * MIB)

    def validations(self) -> None:
        self.repeat("POST", "/tasks/validate", lambda: self.file)

    def teaching(self) -> None:
        number = next(self.counter)

        def body() -> bytes:
            parts = []
            for label in ("a", "b", "c", "d"):
                head = f'Content-Disposition: form-data; name="{label}"; filename="p"'
                content = picture(next(self.counter), (160, 120))
                parts.append(f"--b\r\n{head}\r\n\r\n".encode() + content + b"\r\n")
            return b"".join(parts) + b"--b--\r\n"

        self.headers["Content-Type"] = "multipart/form-data; boundary=b"
        self.repeat("POST", f"/tasks/hostile/taught-{number}/examples", body)

    def answers(self) -> None:
        """Large answers that are hardly read."""
        connection = self.connect()
        connection.request("POST", "/predict", picture(0, (320, 240)), self.headers)
        digest = json.loads(connection.getresponse().read())["images"][0]["digest"]
        body = json.dumps({"images": [{"digest": digest}] * 60}).encode()
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        path = "/predict?tasks=large&return=logits"
        request = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{head}Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body
        while True:
            with socket.create_connection(("127.0.0.1", self.port)) as wire:
                wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                wire.sendall(request)
                while wire.recv(4096):
                    time.sleep(0.5)

    def reads(self) -> None:
        self.repeat("GET", "/tasks", lambda: None)

    def downloads(self) -> None:
        self.sip("/tasks/large/versions/1/bundle")


# Threads of each attack.
ATTACKS = {
    "photos": 32,
    "large_photos": 8,
    "bodies": 16,
    "uploads": 8,
    "validations": 8,
    "teaching": 8,
    "answers": 40,
    "reads": 64,
    "downloads": 16,
}


@functools.cache
def large_picture() -> bytes:
    return picture(0, (6000, 4000))


def picture(seed: int, size: tuple[int, int]) -> bytes:
    """A picture of random colour patches."""
    patches = np.random.default_rng(seed).integers(0, 256, (30, 40, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(patches).resize(size, Image.Resampling.BILINEAR).save(out, "JPEG")
    return out.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("attack", choices=ATTACKS)
    parser.add_argument("port", type=int)
    parser.add_argument("key")
    parser.add_argument("--file", type=Path)
    args = parser.parse_args()
    caller = Caller(args.port, args.key, b"" if args.file is None else args.file.read_bytes())
    attack = getattr(caller, args.attack)
    large_picture()  # which takes a while

    def keep_on() -> None:
        while True:
            try:
                attack()
            except (OSError, http.client.HTTPException, KeyError, ValueError):
                time.sleep(0.05)

    for _ in range(ATTACKS[args.attack]):
        threading.Thread(target=keep_on, daemon=True).start()
    print("begun", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
