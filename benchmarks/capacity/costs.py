"""What things cost on one machine: measured once, then enough to size any number of them.

All times are seconds, all sizes bytes. A file of these is what `--write-costs` writes and `--costs`
reads, so that a fleet of machines can be sized on another one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

FLOAT32 = 4


class Load(NamedTuple):
    """What one batch holds."""

    base_rows: int  # token rows of its cold images
    task_rows: int  # one for each image and task
    warm_images: int
    tasks: int  # distinct ones


@dataclass(frozen=True, slots=True)
class PassCost:
    """Time of one batch: a sum over what it holds, fitted to measured batches."""

    batch: float  # whatever it holds
    cold: float  # once, if any image is cold
    base_row: float
    task_row: float
    warm_image: float  # its context is brought to the device
    task: float  # its memory is laid beside the others', its head is read
    typical_error: float = 0.0  # of the fit, as a share: half of the measured batches are nearer
    worst_error: float = 0.0

    def seconds(self, load: Load) -> float:
        return (
            self.batch
            + self.cold * (load.base_rows > 0)
            + self.base_row * load.base_rows
            + self.task_row * load.task_rows
            + self.warm_image * load.warm_images
            + self.task * load.tasks
        )


NOTHING = PassCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def fit(loads: Sequence[Load], seconds: Sequence[float]) -> PassCost:
    """Least squares of the relative errors, so that small batches count as much as large ones.

    Nothing costs less than nothing: what would is left out.
    """
    times = np.array(seconds)
    relative = np.array([(1, load.base_rows > 0, *load) for load in loads]) / times[:, None]
    used = list(range(relative.shape[1]))
    while True:
        found = np.linalg.lstsq(relative[:, used], np.ones(len(times)), rcond=None)[0]
        if (found >= 0).all():
            break
        del used[int(np.argmin(found))]
    costs = np.zeros(relative.shape[1])
    costs[used] = found
    errors = np.abs(relative @ costs - 1)
    batch, cold, base_row, task_row, warm_image, task = costs.tolist()
    typical, worst = float(np.median(errors)), float(errors.max())
    return PassCost(batch, cold, base_row, task_row, warm_image, task, typical, worst)


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a backbone that sizes depend on."""

    layers: int
    tokens: int  # base rows of an image
    patches: int  # of them
    width: int
    attention_width: int
    readout: int  # values of an image's final rows and summary that are kept
    itemsize: int  # of the arithmetic
    weights: int  # of all its weights

    def task_bytes(self, memory: int, classes: int) -> int:
        """A loaded task: keys and values of its memory, its token, its head without bias."""
        states = 2 * self.layers * memory * self.attention_width * self.itemsize
        return states + self.width * self.itemsize + classes * self.width * FLOAT32

    def host_task_bytes(self, memory: int, classes: int) -> int:
        """What is kept of a task that may have to leave the device: its weights as trained."""
        return (self.layers * memory + 1 + classes) * self.width * FLOAT32

    def context_bytes(self, itemsize: int) -> int:
        """An image's context: keys and values, the readout and the attention map."""
        states = 2 * self.layers * self.tokens * self.attention_width * itemsize
        return states + (self.readout + self.patches) * FLOAT32


@dataclass(frozen=True, slots=True)
class Size:
    """Something as it lies in memory, and what the formula says."""

    what: str
    measured: int
    computed: int


@dataclass(frozen=True, slots=True)
class CatalogCosts:
    """What many tasks cost a server before the first request."""

    tasks: int
    open_checkpoint: float  # reading the catalog of a folder, from a checkpoint
    open_log: float  # the same from the log alone
    version_bytes: float  # of one version, in the catalog in memory
    poll: float  # looking for changes when there are none, everything loaded
    change: float  # taking over a change that brings no new bundle
    resolve: float  # of the names of one request, for a combination not requested before
    evict: float  # choosing what to evict, half of the tasks resident
    cache_put: float  # keeping one more bundle in the folder of bundles


@dataclass(frozen=True, slots=True)
class Costs:
    """One machine and one backbone."""

    backbone: str
    device: str
    processor: str
    cores: int
    threads: int  # of a pass on the CPU
    memory: int
    gpu_memory: int  # 0: none
    shape: Shape
    passes: PassCost
    decode: dict[str, float]  # one photo, by its size
    look_up: float  # naming an image by its bytes
    request: float  # CPU time of the event loop for one request over HTTP
    engine_request: float  # the same without HTTP
    task: Size  # with 5 memory tokens and 100 classes, as in all that follows
    host_task_bytes: int  # the same in host memory, where tasks may have to leave the device
    context: Size
    sizes: tuple[Size, ...]  # the formulas at other shapes of tasks and precisions
    bundle_bytes: int
    load: float  # one bundle at a start: read, checked, prepared, its golden examples replayed
    reload: float  # one task from host memory back to the device
    catalog: CatalogCosts

    @property
    def pass_cores(self) -> int:
        """Cores a pass keeps busy: its threads, or the one that launches the GPU's kernels."""
        return self.threads if self.device == "cpu" else 1


_FILE: TypeAdapter[list[Costs]] = TypeAdapter(list[Costs])


def write_costs(path: Path, costs: Sequence[Costs]) -> None:
    path.write_bytes(_FILE.dump_json(list(costs), indent=1) + b"\n")


def read_costs(path: Path) -> list[Costs]:
    """The costs in a file; SystemExit, with a sentence, if it holds none."""
    try:
        found = _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise SystemExit(
            f"{path} is no file of costs, as --write-costs writes it: {where}: {first['msg']}"
        ) from None
    if not found:
        raise SystemExit(f"{path} holds no costs")
    return found


def as_json(costs: Costs) -> object:
    return _FILE.dump_python([costs], mode="json")[0]
