"""The servers compared: how to start each, its request format, and what it holds for T tasks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from engram_server.settings import Settings

from benchmarks.peers.prepared import HEAD, MEMORY, Prepared

Command = Callable[[Prepared, int], list[str]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A server that people run."""

    name: str
    environment: str  # a key of environments.PINS
    command: Command  # arguments of its interpreter, for a port
    holds: str  # for T tasks
    precision: str
    form: str = "raw"
    path: str = "/predict?tasks={tasks}"


@dataclass(frozen=True, slots=True)
class Ours:
    """Our server, with requests for tasks of one kind."""

    name: str
    precision: str
    prefix: str  # of the tasks' names

    def path(self, tasks: int) -> str:
        names = ",".join(f"{self.prefix}{number}" for number in range(tasks))
        return f"/predict?top_k=1&tasks={names}"


MODELS, ONE_BACKBONE, ADAPTERS = "T networks", "one backbone, T heads", "one backbone, T adapters"


def _program(name: str) -> Command:
    module = f"benchmarks.peers.servers.{name}_server"
    return lambda prepared, port: ["-m", module, str(prepared.model), str(port)]


def _openvino(precision: str) -> Command:
    module = "benchmarks.peers.servers.openvino_server"
    return lambda prepared, port: [
        "-m",
        module,
        str(prepared.openvino / f"{precision}.xml"),
        str(prepared.heads),
        str(port),
    ]


PEERS = (
    Peer("LitServe", "litserve", _program("litserve"), MODELS, "float32", "json", "/predict"),
    Peer(
        "MLServer",
        "mlserver",
        _program("mlserver"),
        MODELS,
        "float32",
        "open inference",
        "/v2/models/classifiers/infer",
    ),
    Peer("Ray Serve", "ray", _program("ray"), MODELS, "float32"),
    Peer("FastAPI, pipelines", "fastapi", _program("pipelines"), MODELS, "float32"),
    Peer("FastAPI, OpenVINO", "openvino", _openvino("float32"), ONE_BACKBONE, "float32"),
    Peer("FastAPI, OpenVINO int8", "openvino", _openvino("int8"), ONE_BACKBONE, "int8"),
    Peer("FastAPI, adapters", "adapters", _program("adapters"), ADAPTERS, "float32"),
)

ENGRAM = Ours("Engram", "float32", MEMORY)
ENGRAM_HEADS = Ours("Engram, heads only", "float32", HEAD)
ENGRAM_INT8 = Ours("Engram int8", "int8", MEMORY)
ENGRAM_INT8_HEADS = Ours("Engram int8, heads only", "int8", HEAD)


def precisions() -> list[str]:
    """Those of the peers that this Engram has too."""
    known = get_args(Settings.model_fields["precision"].annotation)
    return [precision for precision in ("float32", "int8") if precision in known]


def rivals(peer: Peer) -> list[Ours]:
    """Which of ours a peer takes turns with: one of plain heads also with ours of plain heads."""
    if peer.holds != ONE_BACKBONE:
        return [ENGRAM]
    both = {"float32": [ENGRAM_HEADS, ENGRAM], "int8": [ENGRAM_INT8_HEADS, ENGRAM_INT8]}
    return both[peer.precision] if peer.precision in precisions() else [ENGRAM_HEADS, ENGRAM]
