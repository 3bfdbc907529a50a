"""What one server process does without a model: requests per second and CPU time by stage.

    python -m benchmarks.front_end [--quick] [--beside CHECKOUT] [--against-litserve]

The pass returns constants at once, so that all of the time is that of the front end: HTTP,
authentication, admission, decoding, queue, worker and JSON. `wrk` sends the requests over 16
connections that are kept open. `--beside` measures the packages of another checkout in turns with
these, `--against-litserve` a LitServe server with a null model.

The stages are CPU time of one request at a time, from the clocks of the threads: time that the
process waits for a core is not in it.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks.measure import write_results
from benchmarks.null_device import IMAGE_SIZE

HERE = Path(__file__).resolve().parent.parent
CONNECTIONS = 16
TASKS = 16
IMAGES = 32
STAGES = ("parse", "auth", "admission", "body", "queue", "render", "loop", "decode", "worker")
_PACKAGES = ("server", "task_store", "training", "clients/python")
LITSERVE = {1: "LitServe, one API process", 2: "LitServe, two API processes"}


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of request, and how many images it has."""

    name: str
    path: str
    content_type: str
    body: bytes
    images: int = 1


@dataclass(frozen=True, slots=True)
class Rate:
    """What a contender did with a shape in one turn."""

    requests: float  # per second
    cpu: float  # seconds of the server per request


def photo() -> bytes:
    """A JPEG of 640 × 480 pixels and some 25 kB, as a phone's thumbnail."""
    patches = np.random.default_rng(0).integers(0, 256, (15, 20, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(patches).resize((640, 480), Image.Resampling.BICUBIC).save(out, "JPEG")
    return out.getvalue()


def shapes_of(digests: Sequence[str], images: Sequence[bytes]) -> list[Shape]:
    """The requests that are measured; the server has cached the images with these digests."""
    one = json.dumps({"images": [{"digest": digests[0]}]}).encode()
    many = json.dumps({"images": [{"digest": each} for each in digests]}).encode()
    tasks = ",".join(f"task{number}" for number in range(TASKS))
    predict, first = "/predict?tasks=", "task0"
    shape = [3, *IMAGE_SIZE]
    header = {
        "inputs": [
            {
                "name": "pixel_values",
                "datatype": "FP32",
                "shape": [1, *shape],
                "parameters": {"binary_data_size": 4 * int(np.prod(shape))},
            }
        ]
    }
    head = json.dumps(header).encode()
    tensor = head + np.zeros(shape, np.float32).tobytes()
    as_json = "application/json"
    return [
        Shape("one image by digest", predict + first, as_json, one),
        Shape("one image by digest, 16 tasks", predict + tasks, as_json, one),
        Shape("one cached JPEG", predict + first, "image/jpeg", images[0]),
        Shape("32 images by digest", predict + first, as_json, many, len(digests)),
        Shape("32 images by digest, 16 tasks", predict + tasks, as_json, many, len(digests)),
        Shape("one tensor over /v2", f"/v2/models/{first}/infer#{len(head)}", "", tensor),
    ]


# --- servers --------------------------------------------------------------------------------------


class Contender:
    """A running server process."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int) -> None:
        self.name = name
        self.process = process
        self.port = port

    def signal(self, number: signal.Signals) -> None:
        """Stop or continue the process and its children: an idle server may poll."""
        for pid in _tree(self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cpu_seconds(self) -> float:
        """Of the process and its children."""
        return sum(map(_cpu_of, _tree(self.process.pid)))


def _tree(pid: int) -> list[int]:
    found = [pid]
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid:
                    found += _tree(int(folder.name))
    return found


def _cpu_of(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def started(name: str, command: Sequence[str], checkout: Path, ready: str) -> Iterator[Contender]:
    """A server process that answers under `ready`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    paths = [str(checkout / package) for package in _PACKAGES]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, str(HERE)])}
    process = subprocess.Popen(
        [*command, str(port)], env=environment, cwd=HERE, start_new_session=True
    )
    try:
        with httpx.Client(timeout=5) as client:
            while True:
                if process.poll() is not None:
                    raise SystemExit(f"{name} did not start; its message is above")
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"http://127.0.0.1:{port}{ready}").status_code == 200:
                        break
                time.sleep(0.1)
        yield Contender(name, process, port)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # LitServe leaves children
        process.wait()


# --- load -----------------------------------------------------------------------------------------


def _script(shape: Shape) -> str:
    """What wrk sends, in Lua."""
    path, _, head = shape.path.partition("#")
    headers = {"Content-Type": shape.content_type} if shape.content_type else {}
    if head:
        headers |= {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": head,
        }
    lines = [f'wrk.headers["{name}"] = "{value}"' for name, value in headers.items()]
    escaped = "".join(f"\\{byte:03d}" for byte in shape.body)
    return "\n".join(
        ['wrk.method = "POST"', f'wrk.path = "{path}"', *lines, f'wrk.body = "{escaped}"', ""]
    )


def send(contender: Contender, shape: Shape, seconds: int) -> Rate:
    """Load a server with a shape of requests."""
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(_script(shape))
        script.flush()
        before = contender.cpu_seconds()
        out = subprocess.run(
            [
                *("wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", script.name),
                f"http://127.0.0.1:{contender.port}",
            ],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        cpu = contender.cpu_seconds() - before
    if "Non-2xx" in out or "Socket errors" in out:
        raise SystemExit(f"{contender.name}, {shape.name}: {out}")
    sent = re.search(r"(\d+) requests in ([\d.]+)(m?)s", out)
    assert sent is not None, out
    count = int(sent[1])
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    assert rate is not None, out
    return Rate(float(rate[1]), cpu / count)


def warm(contender: Contender, images: Sequence[bytes]) -> list[str]:
    """Let a server cache images; returns their digests."""
    url = f"http://127.0.0.1:{contender.port}/predict?tasks=task0"
    digests = []
    for image in images:
        answer = httpx.post(url, content=image, headers={"Content-Type": "image/jpeg"})
        digests.append(answer.raise_for_status().json()["images"][0]["digest"])
    return digests


def distinct_photos(count: int) -> list[bytes]:
    """JPEGs that differ in their comment only, so that they cost the same."""
    plain = photo()
    comments = (number.to_bytes(4) for number in range(count))
    return [b"%b\xff\xfe\x00\x06%b%b" % (plain[:2], each, plain[2:]) for each in comments]


def stages_of(contender: Contender, shape: Shape, requests: int) -> Mapping[str, float]:
    """CPU microseconds of one request by stage, one request at a time."""
    path, _, head = shape.path.partition("#")
    headers = {"Content-Type": shape.content_type}
    if head:
        headers = {
            "Content-Type": "application/octet-stream",
            "Inference-Header-Content-Length": head,
        }
    with httpx.Client(base_url=f"http://127.0.0.1:{contender.port}") as client:
        for number in range(requests + 20):
            if number == 20:
                client.get("/stages")  # begins anew
            client.post(path, content=shape.body, headers=headers).raise_for_status()
        found: dict[str, float] = client.get("/stages").json()
    return {stage: 1e6 * seconds / requests for stage, seconds in found.items()}


# --- the run --------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="short turns")
    add("--beside", type=Path, metavar="CHECKOUT", help="another checkout of this repository")
    add("--against-litserve", action="store_true", help="LitServe with a null model")
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        raise SystemExit("This needs wrk, an HTTP load generator: install Debian's package wrk.")
    turns, seconds, requests = (2, 2, 50) if args.quick else (5, 5, 400)
    ours = [sys.executable, "-m", "benchmarks.null_device"]
    checkouts = {"Engram": HERE}
    if args.beside is not None:
        checkouts[f"Engram, {args.beside.name}"] = args.beside.resolve()
    images = distinct_photos(IMAGES)
    rows: list[dict[str, object]] = []
    stages: dict[tuple[str, str], Mapping[str, float]] = {}
    for name, checkout in checkouts.items():
        with started(name, [*ours, "--stages"], checkout, "/readyz") as server:
            for shape in shapes_of(warm(server, images), images):
                stages[name, shape.name] = stages_of(server, shape, requests)
    with contextlib.ExitStack() as stack:
        contenders = [
            stack.enter_context(started(name, ours, checkout, "/readyz"))
            for name, checkout in checkouts.items()
        ]
        shapes = shapes_of([warm(each, images) for each in contenders][-1], images)
        plans = [(each, shape) for shape in shapes for each in contenders]
        if args.against_litserve:
            plans += [(each, shapes[0]) for each in _litserve(stack)]
        rates = _in_turns(plans, turns, seconds)
    for (contender, request), measured in rates.items():
        rows.append(
            {
                "contender": contender,
                "shape": request,
                "requests_per_second": statistics.median(each.requests for each in measured),
                "cpu_ms": 1000 * statistics.median(each.cpu for each in measured),
                "stages_us": dict(stages.get((contender, request), {})),
            }
        )
    _print(rows)
    write_results("front_end", rows)


def _litserve(stack: contextlib.ExitStack) -> list[Contender]:
    from benchmarks.peers.environments import python_of  # only then are its packages needed

    python = str(python_of("litserve"))
    module = "benchmarks.peers.servers.litserve_null"
    return [
        stack.enter_context(started(name, [python, "-m", module, str(count)], HERE, "/health"))
        for count, name in LITSERVE.items()
    ]


def _in_turns(
    plans: Sequence[tuple[Contender, Shape]], turns: int, seconds: int
) -> dict[tuple[str, str], list[Rate]]:
    rates: dict[tuple[str, str], list[Rate]] = {}
    contenders = {contender for contender, _ in plans}
    try:
        for turn in range(turns + 1):
            for contender, shape in plans:
                for other in contenders:
                    other.signal(signal.SIGCONT if other is contender else signal.SIGSTOP)
                rate = send(contender, shape, seconds if turn else 1)
                if turn:  # the first warms up
                    rates.setdefault((contender.name, shape.name), []).append(rate)
    finally:
        for contender in contenders:
            contender.signal(signal.SIGCONT)
    return rates


def _print(rows: Sequence[Mapping[str, object]]) -> None:
    table = Table(title="The front end, one process, medians")
    for column in ("server", "request", "requests/s", "CPU ms", "stages, µs of CPU"):
        table.add_column(column)
    for row in rows:
        stages = row["stages_us"]
        assert isinstance(stages, dict)
        table.add_row(
            str(row["contender"]),
            str(row["shape"]),
            f"{row['requests_per_second']:.0f}",
            f"{row['cpu_ms']:.3f}",
            ", ".join(f"{name} {value:.0f}" for name, value in stages.items()),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
