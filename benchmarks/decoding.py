"""What decoding and resizing one photo costs, beside Pillow alone.

    python -m benchmarks.decoding [--quick]

CPU time of one thread, 224 pixels, bicubic; medians of turns in one run. The baseline decodes,
resizes and crops with Pillow, and reads JPEGs at the same reduced size. Photos are the console's,
enlarged and with grain.
"""

import argparse
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import engram_server
import numpy as np
import torch
from engram_server.model.preprocessing import FILTERS, Preprocessing
from engram_server.model.preprocessing.decoding import GAP
from engram_server.model.preprocessing.resizing import Pixels
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks.measure import write_results

EDGE = 224
VIEW = Preprocessing(EDGE, "bicubic", (EDGE, EDGE), 1 / 255, (0.5,) * 3, (0.5,) * 3)
SIZES = ((640, 480), (1280, 960), (2016, 1512), (4032, 3024))
FORMATS = {
    "JPEG": {"quality": 90},
    "progressive JPEG": {"quality": 90, "progressive": True},
    "PNG": {},
    "WebP": {"quality": 85},
}
SAMPLE = Path(engram_server.__file__).parent / "console" / "samples" / "dog.jpg"


def photo(size: tuple[int, int], kind: str) -> bytes:
    enlarged = Image.open(SAMPLE).resize(size, Image.Resampling.BICUBIC)
    grain = np.random.default_rng(0).normal(0, 4, (size[1], size[0], 1))
    picture = Image.fromarray((np.asarray(enlarged) + grain).clip(0, 255).astype(np.uint8))
    out = io.BytesIO()
    picture.save(out, kind.split()[-1], **FORMATS[kind])
    return out.getvalue()


def with_pillow(data: bytes) -> Pixels:
    """The photos are upright and wider than they are high."""
    image = Image.open(io.BytesIO(data))
    size = int(EDGE * image.width / image.height), EDGE
    drafted = image.draft(None, (GAP * size[0], GAP * size[1]))
    resized = image.resize(size, FILTERS["bicubic"], drafted[1] if drafted else None)
    left = (size[0] - EDGE) // 2
    return np.array(resized.crop((left, 0, left + EDGE, EDGE)))


def cpu_seconds(run: Callable[[], object], times: int) -> list[float]:
    """Not what a clock shows: other processes may use the machine."""
    seconds = []
    for _ in range(times):
        began = time.thread_time()
        run()
        seconds.append(time.thread_time() - began)
    return seconds


def measure(size: tuple[int, int], kind: str, turns: int) -> dict[str, object]:
    data = photo(size, kind)
    contenders: dict[str, Callable[[], Pixels]] = {
        "pillow": lambda: with_pillow(data),
        "engram": lambda: VIEW(data, max_pixels=None),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    difference = np.abs(contenders["pillow"]().astype(int) - contenders["engram"]())
    for _ in range(turns):
        for name, run in contenders.items():
            seconds[name] += cpu_seconds(run, 5)
    pillow, ours = (1000 * statistics.median(times) for times in seconds.values())
    return {
        "photo": f"{size[0]} × {size[1]}",
        "format": kind,
        "file_kb": len(data) // 1000,
        "pillow_ms": round(pillow, 2),
        "engram_ms": round(ours, 2),
        "ratio": round(ours / pillow, 2),
        "largest_difference": int(difference.max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="to see that it runs")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    cases = [(size, "JPEG") for size in SIZES]
    cases += [(SIZES[0], kind) for kind in FORMATS if kind != "JPEG"]
    rows = [measure(*case, turns=1 if quick else 15) for case in cases]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    print(write_results("decoding", rows))


if __name__ == "__main__":
    main()
