"""What decoding large JPEGs at a fraction changes: `python -m research.scaled_jpeg DATA`.

The server decodes a JPEG at 1/2, 1/4 or 1/8 where that leaves `GAP` times the resized picture
(`server.model.preprocessing.decoding`). This compares some gaps with decoding the whole file, in
pictures of the smallest size that a gap lets be scaled, which is where most is lost. DATA is what
`research.demo_data` made. Prints the lines of docs/explanation/precision.md: by how many of 255
levels pixels differ, what that changes in the answers of the demo task `flowers`, and the time.

Large photos are made of small ones: a *mosaic* has them side by side, pixel for pixel, which is
more detail than a camera gives; a photo *enlarged* gets grain; *noise* is the worst there is.
"""

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Final
from unittest import mock

import numpy as np
import torch
from PIL import Image

from research.demo_limits import read_task
from research.int8_accuracy import answers, compare
from server import embedded
from server.model import load_backbone
from server.model.preprocessing import Preprocessing, decoding
from task_store import TaskBundle

TASK: Final = "flowers"
WHOLE: Final = 10**6  # a gap that no file has: nothing is scaled
GAPS: Final = (2, 3, 4)
SCALES: Final = (2, 4, 8)
FILES: Final = tuple((quality, chroma) for quality in (75, 90, 95) for chroma in ("4:2:0", "4:4:4"))
SIZES: Final = ((4032, 3024), (1920, 1440), (1280, 960), (640, 480))
LARGEST: Final = 5400  # edge of a picture
TURNS: Final = 9
GRAIN: Final = 6.0  # standard deviation, in levels

Kind = Callable[[Sequence[Path], int, int], Image.Image]


def mosaic(photos: Sequence[Path], width: int, height: int) -> Image.Image:
    picture = Image.new("RGB", (width, height))
    left = top = 0
    for path in list(photos) * (1 + width * height // (len(photos) * 50_000)):
        with Image.open(path) as photo:
            edge = min(photo.size)
            picture.paste(photo.convert("RGB").crop((0, 0, edge, edge)), (left, top))
        left += edge
        if left >= width:
            left, top = 0, top + edge
    return picture


def enlarged(photos: Sequence[Path], width: int, height: int) -> Image.Image:
    with Image.open(photos[0]) as photo:
        smooth = photo.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    grain = np.random.default_rng(0).normal(0, GRAIN, (height, width, 3)).astype(np.float32)
    return Image.fromarray((np.asarray(smooth) + grain).clip(0, 255).astype(np.uint8))


def noise(_: Sequence[Path], width: int, height: int) -> Image.Image:
    levels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


KINDS: Final[Mapping[str, Kind]] = {"mosaic": mosaic, "enlarged": enlarged, "noise": noise}


def encoded(picture: Image.Image, quality: int, chroma: str) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality, subsampling=chroma)
    return file.getvalue()


def gap_of(gap: int) -> AbstractContextManager[object]:
    return mock.patch.object(decoding, "GAP", gap)


def seen(view: Preprocessing, data: bytes, gap: int) -> np.ndarray:
    with gap_of(gap):
        return view(data, max_pixels=None)


def pixel_changes(photos: Sequence[Path], target: int) -> Iterator[dict[str, object]]:
    """For each gap and kind of picture: all scales and all files together."""
    view = Preprocessing(target, "bicubic", None, 1 / 255, (0.5,) * 3, (0.5,) * 3)
    for gap in GAPS:
        for kind, make in KINDS.items():
            changes = []
            for scale in SCALES:
                # A few pixels more, so that the last column is partly filled.
                edge = gap * scale * target + 3
                if edge > LARGEST:
                    continue
                picture = make(photos, edge * 4 // 3, edge)
                for quality, chroma in FILES:
                    data = encoded(picture, quality, chroma)
                    whole = seen(view, data, WHOLE).astype(int)
                    changes.append(np.abs(seen(view, data, gap) - whole))
            yield {
                "target": target,
                "gap": gap,
                "picture": kind,
                "mean": round(max(float(change.mean()) for change in changes), 2),
                "of_1000_one_is_over": max(float(np.quantile(c, 0.999)) for c in changes),
                "largest": max(int(change.max()) for change in changes),
            }


def answer_changes(data: Path, scale: int, most: int | None) -> Iterator[dict[str, object]]:
    """For each gap: the test photos enlarged to the smallest size that is scaled so far."""
    backbone = load_backbone(embedded.BACKBONE)
    bundle = TaskBundle.load(embedded.TASKS / f"{TASK}.safetensors")
    part = read_task(TASK, data, bundle).part("test")
    step = max(1, len(part.samples) // (most or len(part.samples)))
    targets = torch.from_numpy(part.targets())[::step]
    resize = backbone.preprocessing.resize
    assert isinstance(resize, int), "the demo backbone resizes the shortest edge"
    for gap in GAPS:
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for number, sample in enumerate(part.samples[::step]):
                with Image.open(sample.path) as photo:
                    factor = gap * scale * resize / min(photo.size)
                    size = [1 + int(edge * factor) for edge in photo.size]
                paths.append(Path(folder, f"{number}.jpg"))
                paths[-1].write_bytes(encoded(enlarged([sample.path], *size), 90, "4:2:0"))
            with gap_of(WHOLE):
                whole = answers({"whole": backbone}, bundle, paths)["whole"]
            with gap_of(gap):
                scaled = answers({"scaled": backbone}, bundle, paths)["scaled"]
        change = asdict(compare(whole, scaled, targets, bundle.labels, paths))
        yield {"gap": gap, "scale": scale, "images": len(paths), **change}


def times(photos: Sequence[Path], view: Preprocessing) -> Iterator[dict[str, object]]:
    """Milliseconds of CPU time by size and gap; medians of turns."""
    for size in SIZES:
        data = encoded(enlarged(photos, *size), 90, "4:2:0")
        taken: dict[int, list[float]] = {gap: [] for gap in (WHOLE, *GAPS)}
        for _ in range(TURNS):
            for gap, turns in taken.items():
                before = time.thread_time()
                seen(view, data, gap)
                turns.append(1000 * (time.thread_time() - before))
        line = {f"gap {gap}": round(float(np.median(turns)), 1) for gap, turns in taken.items()}
        yield {"size": size, "resize": view.resize, "whole": line.pop(f"gap {WHOLE}"), **line}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--scale", type=int, default=2, choices=SCALES, help="of photos asked")
    parser.add_argument("--most", type=int, help="photos asked, evenly chosen; else all")
    given = parser.parse_args(arguments)
    photos = sorted((given.data / TASK / "test").rglob("*.jpg"))
    view = load_backbone(embedded.BACKBONE).preprocessing
    for line in times(photos, view):
        print(json.dumps(line), flush=True)
    for line in answer_changes(given.data, given.scale, given.most):
        print(json.dumps(line), flush=True)
    for target in (176, 224):
        for line in pixel_changes(photos, target):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
