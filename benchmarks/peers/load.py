"""The load generator, a process of its own: `python -m benchmarks.peers.load PHOTO…`.

Each line of its input is a phase, as JSON; each line of its output what the phase gave. Clients
keep their connections, and each sends its next photo when the last was answered. Bodies are made
before the clock starts. Nothing but the standard library, so that it takes little of the cores.
"""

import base64
import http.client
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Phase:
    """What to send where, for how long."""

    port: int
    path: str
    form: str  # of the body: a key of FORMS
    tasks: int
    clients: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds of each request, of all of them together, and the first answer."""

    latencies: list[float]
    elapsed: float
    answer: str

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.elapsed


def _as_json(photo: bytes, tasks: int) -> bytes:
    return json.dumps({"image": base64.b64encode(photo).decode(), "tasks": tasks}).encode()


def _as_open_inference(photo: bytes, tasks: int) -> bytes:
    image = base64.b64encode(photo).decode()
    inputs = [
        {"name": "image", "shape": [1, 1], "datatype": "BYTES", "data": [image]},
        {"name": "tasks", "shape": [1, 1], "datatype": "INT32", "data": [tasks]},
    ]
    return json.dumps({"inputs": inputs}).encode()


FORMS: dict[str, tuple[str, Callable[[bytes, int], bytes]]] = {
    "raw": ("image/jpeg", lambda photo, _: photo),
    "json": ("application/json", _as_json),
    "open inference": ("application/json", _as_open_inference),
}


class RequestFailed(Exception):
    """A server answered something else than 200."""


def send(phase: Phase, photos: Sequence[bytes]) -> Outcome:
    """One phase: clients begin at different photos, and send no more after `seconds`."""
    kind, form = FORMS[phase.form]
    bodies = [form(photo, phase.tasks) for photo in photos]
    latencies: list[float] = []
    answers: list[bytes] = []
    failures: list[str] = []
    started = time.perf_counter()

    def client(place: int) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", phase.port, timeout=300)) as open_one:
            for body in itertools.cycle(bodies[place:] + bodies[:place]):
                before = time.perf_counter()
                try:
                    open_one.request("POST", phase.path, body, headers)
                    answer = open_one.getresponse()
                    content = answer.read()
                except (OSError, http.client.HTTPException) as error:
                    failures.append(repr(error))
                    return
                if answer.status != 200:
                    failures.append(f"{answer.status}: {content[:500].decode(errors='replace')}")
                    return
                latencies.append(time.perf_counter() - before)
                answers.append(content)
                if time.perf_counter() - started >= phase.seconds:
                    return

    headers = {"Content-Type": kind}
    threads = [threading.Thread(target=client, args=(each,)) for each in range(phase.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    if failures:
        raise RequestFailed(failures[0])
    return Outcome(latencies, elapsed, answers[0].decode())


def main(photos: Sequence[bytes], lines: TextIO, out: TextIO) -> None:
    for line in lines:
        try:
            result: dict[str, object] = asdict(send(Phase(**json.loads(line)), photos))
        except RequestFailed as error:
            result = {"error": str(error)}
        print(json.dumps(result), file=out, flush=True)


if __name__ == "__main__":
    main([Path(photo).read_bytes() for photo in sys.argv[1:]], sys.stdin, sys.stdout)
