"""Servers that are none: what `/predict` would say about bodies that need not be images.

Every image is answered with its own bytes as the label, so that a test sees at once whether an
answer belongs to its image.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

DIGEST = "sha256:" + "0" * 64


def digest_of(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def bodies_of(content_type: str, body: bytes) -> list[bytes]:
    """The images of a request; a digest stands for itself."""
    if content_type.startswith("application/json"):
        images = json.loads(body)["images"]
        return [
            base64.b64decode(one["b64"]) if "b64" in one else one["digest"].encode()
            for one in images
        ]
    boundary = re.search("boundary=(.*)", content_type).group(1).encode()
    parts = body.split(b"--" + boundary)[1:-1]
    return [part.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n") for part in parts]


def answer(bodies: list[bytes], tasks: list[str]) -> dict:
    def about(body: bytes) -> dict:
        prediction = {"label": body[:40].decode(errors="replace"), "index": 0, "score": 0.75}
        one = {"version": 1, "predictions": [prediction], "a-later-member": True}
        if body.startswith(b"known:"):
            one["in_distribution"] = body.startswith(b"known: yes")
        return {"digest": digest_of(body), "cache": "miss", "tasks": dict.fromkeys(tasks, one)}

    return {
        "generation": 7,
        "backbone": "fake",
        "images": [about(body) for body in bodies],
        "timings_ms": {"queue": 0, "decode": 0, "forward": 0, "total": 0},
    }


def problem(status: int, kind: str, detail: str, headers=None, **members) -> httpx.Response:
    document = {"type": f"urn:engram:problem:{kind}", "title": kind, "status": status}
    document |= {"detail": detail, "request_id": "abc123", **members}
    kinds = {"Content-Type": "application/problem+json", **(headers or {})}
    return httpx.Response(status, headers=kinds, content=json.dumps(document))


class Fake:
    """A handler for httpx.MockTransport. `refuse(bodies, count)` may answer in its place."""

    def __init__(self, refuse=None, size=None, forgetful=False):
        self.refuse = refuse or (lambda bodies, count: None)
        self.size = size
        self.forgetful = forgetful
        self.count = 0
        self.image_batches: list[list[bytes]] = []  # the images of each request
        self.requests: list[httpx.Request] = []
        self._lock = threading.Lock()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/readyz":
            return httpx.Response(200, json={"ready": True, "input": self.size})
        bodies = bodies_of(request.headers["Content-Type"], request.read())
        with self._lock:
            self.count += 1
            count = self.count
            if not self.forgetful:
                self.requests.append(request)
                self.image_batches.append(bodies)
        refused = self.refuse(bodies, count)
        if isinstance(refused, Exception):
            raise refused
        if refused is not None:
            return refused
        tasks = request.url.params.get("tasks", "pets").split(",")
        return httpx.Response(200, json=answer(bodies, tasks))


@contextmanager
def listening(refuse=None) -> Iterator[str]:
    """The same on a real socket; its address. What hangs in `refuse` hangs for its client."""
    fake = Fake(refuse, forgetful=True)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # In small pieces a response would wait for the client to acknowledge the first.
        wbufsize = 64 * 1024

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = httpx.Request("POST", f"http://fake{self.path}", content=body)
            request.headers["Content-Type"] = self.headers["Content-Type"]
            reply = fake(request)
            self.send_response(reply.status_code)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.content)

        def log_message(self, *about) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *about) -> None:
            pass  # clients that are interrupted leave without a word

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
