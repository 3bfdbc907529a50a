"""Interleaved timing: machines are shared and noisy, so contenders take turns within one run."""

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def medians(
    contenders: Mapping[str, Callable[[], object]], *, seconds: float = 20.0, least: int = 3
) -> dict[str, float]:
    """Median seconds of each contender, taking turns until the time is used up."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    gc.collect()
    gc.disable()  # A collection that happens to fall on one contender is not its cost.
    try:
        started, rounds = time.perf_counter(), 0
        while rounds < least or time.perf_counter() - started < seconds:
            for name, run in contenders.items():
                before = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - before)
            rounds += 1
            if rounds >= 200:
                break
    finally:
        gc.enable()
    return {name: statistics.median(values) for name, values in times.items()}


def write_results(name: str, rows: list[dict[str, object]], *, device: str = "cpu") -> Path:
    """The figures of a run as JSON, with what they were measured on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    machine = {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": torch.get_num_threads(),
        "device": device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return path


def processor_name() -> str:
    """As Linux tells it, or else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
