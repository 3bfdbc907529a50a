"""Phases of a peer and of ours take turns; what each gave, and the ratios within the turns."""

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.peers.contenders import Ours, Peer, precisions, rivals
from benchmarks.peers.environments import REPOSITORY, python_of
from benchmarks.peers.load import Outcome, Phase, RequestFailed, send
from benchmarks.peers.prepared import FOLDER, Prepared
from benchmarks.peers.processes import NotStarted, free_port, memory_of, running, stopped
from benchmarks.serving import CLIENTS, SETTINGS

TASK_COUNTS = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int
    seconds: float  # of a phase; every client sends at least one photo
    counts: tuple[int, ...] = TASK_COUNTS


@dataclass(frozen=True, slots=True)
class Row:
    """One server, with requests for `tasks` tasks of each photo, beside one peer."""

    name: str
    beside: str  # the peer with which it took turns
    tasks: int
    requests: int
    rate: float  # requests a second, the median of the rounds
    p50: float  # seconds
    p99: float
    memory: int
    ratio: float  # its rate over the peer's, the median of the rounds; 1.0: the peer itself


@dataclass(frozen=True, slots=True)
class Server:
    """A running server and its request format."""

    name: str
    pid: int
    port: int
    form: str
    path: str  # with {tasks}, or whole

    def phase(self, tasks: int, clients: int, seconds: float) -> Phase:
        return Phase(self.port, self.path.format(tasks=tasks), self.form, tasks, clients, seconds)


class Generator:
    """The load generator's process."""

    def __init__(self, photos: Sequence[Path]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.load", *map(str, photos)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, phase: Phase) -> Outcome:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asdict(phase)), file=self._process.stdin, flush=True)
        result = json.loads(self._process.stdout.readline())
        if "error" in result:
            raise RequestFailed(result["error"])
        return Outcome(**result)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


# --- servers --------------------------------------------------------------------------------------


@contextmanager
def peer_running(peer: Peer, prepared: Prepared) -> Iterator[Server]:
    port = free_port()
    command = [str(python_of(peer.environment)), *peer.command(prepared, port)]
    probe = Server(peer.name, 0, port, peer.form, peer.path)
    with running(command, {}, lambda: _answers(probe, prepared), _log(peer.name)) as pid:
        yield Server(peer.name, pid, port, peer.form, peer.path)


@contextmanager
def ours_running(precision: str, prepared: Prepared) -> Iterator[tuple[int, int]]:
    """Process and port of an `engram serve`."""
    port = free_port()
    settings = {
        **SETTINGS,
        "backbone": prepared.model,
        "store": prepared.store,
        "port": port,
        "precision": precision,
    }
    environment = {f"ENGRAM_{name.upper()}": str(value) for name, value in settings.items()}
    command = [str(Path(sys.executable).with_name("engram")), "serve"]
    probe = Server("", 0, port, "raw", "/predict?tasks=head0")
    log = _log(f"engram {precision}")
    with running(command, environment, lambda: _answers(probe, prepared), log) as pid:
        yield pid, port


def _log(name: str) -> Path:
    return FOLDER / f"{name.replace(', ', '-').replace(' ', '-').lower()}.log"


def _answers(server: Server, prepared: Prepared) -> bool:
    with contextlib.suppress(RequestFailed):
        send(server.phase(1, 1, 0.0), [prepared.photos[0].read_bytes()])
        return True
    return False


# --- phases ---------------------------------------------------------------------------------------


def measure(prepared: Prepared, peers: Sequence[Peer], plan: Plan) -> Iterator[list[Row] | str]:
    """For each peer its rows and those of ours beside it, or why it could not be measured."""
    with ExitStack() as stack:
        ours = {
            precision: stack.enter_context(ours_running(precision, prepared))
            for precision in precisions()
        }
        generator = Generator(prepared.photos)
        stack.callback(generator.close)
        for peer in peers:
            try:
                with peer_running(peer, prepared) as server:
                    beside = {each.name: (each, *ours[each.precision]) for each in rivals(peer)}
                    yield [
                        row
                        for tasks in plan.counts
                        for row in _turns(generator, server, list(beside.values()), tasks, plan)
                    ]
            except (NotStarted, RequestFailed) as error:
                yield f"{type(error).__name__}: {error}"


def _turns(
    generator: Generator,
    peer: Server,
    ours: Sequence[tuple[Ours, int, int]],
    tasks: int,
    plan: Plan,
) -> list[Row]:
    servers = [
        peer,
        *(Server(each.name, pid, port, "raw", each.path(tasks)) for each, pid, port in ours),
    ]
    for server in servers:
        # Twice: the first loads what so many tasks need, the second has all clients connected.
        check_answer(generator.run(server.phase(tasks, 1, 0.0)), tasks, server.name)
        generator.run(server.phase(tasks, min(CLIENTS, 2), 0.0))
    outcomes: list[list[Outcome]] = [[] for _ in servers]
    for _ in range(plan.rounds):
        for server, results in zip(servers, outcomes, strict=True):
            with stopped({other.pid for other in servers} - {server.pid}):
                results.append(generator.run(server.phase(tasks, CLIENTS, plan.seconds)))
    weights = [memory_of(server.pid) for server in servers]
    return [
        summarise(server.name, peer.name, tasks, results, outcomes[0], weight)
        for server, results, weight in zip(servers, outcomes, weights, strict=True)
    ]


def check_answer(outcome: Outcome, tasks: int, name: str) -> None:
    """Raise if the server answers fewer tasks than requested; the comparison would not be fair."""
    count = outcome.answer.count("score")
    if count != tasks:
        raise RequestFailed(
            f"{name} gave {count} answers for {tasks} tasks: {outcome.answer[:300]}"
        )


def summarise(
    name: str,
    beside: str,
    tasks: int,
    outcomes: Sequence[Outcome],
    peer: Sequence[Outcome],
    memory: int,
) -> Row:
    latencies = [seconds for outcome in outcomes for seconds in outcome.latencies]
    ratios = [one.rate / other.rate for one, other in zip(outcomes, peer, strict=True)]
    return Row(
        name=name,
        beside=beside,
        tasks=tasks,
        requests=len(latencies),
        rate=statistics.median(outcome.rate for outcome in outcomes),
        p50=float(np.percentile(latencies, 50)),
        p99=float(np.percentile(latencies, 99)),
        memory=memory,
        ratio=statistics.median(ratios),
    )
