"""`engram batch` against the bare pass and HTTP, and what kept tensors save.

    python -m benchmarks.batch [--quick]

Generated JPEGs of 640×480, four tasks (two with a row, one that reads layers, one head), on the
ViT-Ti of `../shared`, or random weights of its shape. The bare pass decodes in threads and runs the
same batches, without rows and files; it, `engram batch` and `engram predict` over HTTP take turns,
folder by folder. Tasks over kept tensors are compared with the same task over photos in this run:
`50,000 summaries` are the kept parts of this run, linked several times. Memory is measured with the
embedded backbone over a list that repeats the images.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from engram_bundle import TaskBundle
from engram_server.batch.pipeline import OnProgress, Progress
from engram_server.batch.run import run_batch
from engram_server.batch.setup import BatchOptions, Keep
from engram_server.embedded import BACKBONE, TASKS
from engram_server.engine.engine import place_backbone
from engram_server.engine.types import EngineConfig
from engram_server.model import Backbone, TaskWeights, load_backbone
from engram_server.model.masked_pass import masked_pass
from engram_server.model.preprocessing.resizing import Pixels
from engram_server.model.tasks import StackCache, Task, prepare
from engram_server.parts.kept import LEVELS, Level
from engram_store import open_store
from rich.console import Console
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.measure import write_results
from benchmarks.serving import SHARED, bundle, jpeg, served

FOLDERS = 5
AHEAD = 3  # batches decoded in advance, as `engram batch`
NAMES = ("row1", "row2", "layers", "head")
KEPT_PART = 100
MEMORY_PART = 500


@dataclass(frozen=True, slots=True)
class Sizes:
    images: int
    kept_contexts: int
    summaries: int  # images of the linked folder
    memory: int


FULL = Sizes(images=5000, kept_contexts=1000, summaries=50_000, memory=50_000)
QUICK = Sizes(images=100, kept_contexts=40, summaries=1000, memory=400)


@dataclass(frozen=True, slots=True)
class Bench:
    place: Path
    backbone: Backbone
    config: EngineConfig
    folders: Sequence[Path]

    def run(self, source: Path | str, out: Path | None, *tasks: str, **options: object) -> float:
        """Seconds of one run of `engram batch` in this process, without loading the backbone."""
        files = [self.place / f"{name}.safetensors" for name in tasks]
        chosen = replace(BatchOptions(str(source), out, bundles=files), **options)  # type: ignore[arg-type]
        started = time.perf_counter()
        summary = run_batch(chosen, self.config, lambda: self.backbone, None)
        seconds = time.perf_counter() - started
        assert not summary.errors
        return seconds


def vit_tiny(place: Path) -> Path:
    pretrained = SHARED / "backbones" / "vit-tiny-patch16-224"
    if pretrained.is_dir():
        return pretrained
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768
    )
    config.num_labels = 1000
    ViTForImageClassification(config).save_pretrained(place / "backbone")
    return place / "backbone"


def layer_bundle(backbone: Backbone, seed: int) -> TaskBundle:
    """A head of random weights that reads every layer of the summary."""
    head = bundle(backbone, seed, memory=False)
    layers = backbone.summary_layers
    generator = torch.Generator().manual_seed(seed)
    shape = (100, len(layers), *backbone.summary_shape[1:])
    weight = (torch.randn(shape, generator=generator) * 0.02).half().float().numpy()
    manifest = head.manifest.model_copy(update={"layers": layers})
    tensors = {name: one for name, one in head.tensors.items() if not name.startswith("golden")}
    return TaskBundle(manifest, {**tensors, "layers.weight": weight})


def prepare_bench(place: Path, images: int) -> tuple[Bench, Path]:
    """Photos in folders, tasks in files and in a store, and the folder of the backbone."""
    source = vit_tiny(place)
    backbone = load_backbone(source)
    store = open_store(place / "store")
    made = [bundle(backbone, 1), bundle(backbone, 2), layer_bundle(backbone, 3)]
    made.append(bundle(backbone, 4, memory=False))
    for name, one in zip(NAMES, made, strict=True):
        named = TaskBundle(one.manifest.model_copy(update={"name": name}), one.tensors)
        (place / f"{name}.safetensors").write_bytes(named.to_bytes())
        store.publish(name, named)
    folders = [place / "photos" / str(number) for number in range(FOLDERS)]
    for folder in folders:
        folder.mkdir(parents=True)
    for number in range(images):
        (folders[number % FOLDERS] / f"{number:05}.jpg").write_bytes(jpeg(number))
    return Bench(place, backbone, EngineConfig(), folders), source


# --- the bare pass, `engram batch` and HTTP -------------------------------------------------------


def bare_pass(bench: Bench) -> Callable[[Path], float]:
    """Decode in threads and run the same batches, without rows and files."""
    (backbone,) = place_backbone(bench.backbone, bench.config).values()
    files = [TaskBundle.load(bench.place / f"{name}.safetensors") for name in NAMES]
    tasks = [prepare(backbone, TaskWeights.from_bundle(one)) for one in files]
    rows = sum(task.token is not None for task in tasks)
    size = bench.config.budget_rows // (backbone.geometry.tokens + rows)

    def run(folder: Path) -> float:
        started = time.perf_counter()
        _run_bare(backbone, tasks, sorted(folder.iterdir()), size, bench.config.decode_threads)
        return time.perf_counter() - started

    return run


def _run_bare(
    backbone: Backbone, tasks: list[Task], paths: list[Path], size: int, threads: int
) -> None:
    def decode(path: Path) -> Pixels:
        return backbone.preprocessing(path.read_bytes(), max_pixels=None)

    batches = [paths[start : start + size] for start in range(0, len(paths), size)]
    stacks = StackCache()
    with ThreadPoolExecutor(threads) as pool:
        upcoming: list[list[Future[Pixels]]] = []
        for number in range(len(batches)):
            while len(upcoming) <= AHEAD and number + len(upcoming) < len(batches):
                batch = batches[number + len(upcoming)]
                upcoming.append([pool.submit(decode, path) for path in batch])
            images = [torch.from_numpy(future.result()) for future in upcoming.pop(0)]
            with torch.inference_mode():
                masked_pass(backbone, torch.stack(images), None, [tasks] * len(images), stacks)


def predict_over_http(url: str, folder: Path) -> float:
    engram = Path(sys.executable).with_name("engram")
    command = [engram, "predict", folder, "--tasks", ",".join(NAMES), "--top-k", "1", "--csv"]
    started = time.perf_counter()
    subprocess.run([*map(str, command), "--server", url], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def compare_speed(bench: Bench, backbone: Path) -> dict[str, float]:
    """Images per second of the three, in turns."""
    bare = bare_pass(bench)
    seconds: dict[str, list[float]] = {"bare pass": [], "engram batch": [], "engram predict": []}
    with served(backbone, bench.place / "store") as url:
        bare(bench.folders[0])  # warm up
        predict_over_http(url, bench.folders[0])
        for number, folder in enumerate(bench.folders):
            seconds["bare pass"].append(bare(folder))
            out = bench.place / f"rows-{number}"
            seconds["engram batch"].append(bench.run(folder, out, *NAMES))
            seconds["engram predict"].append(predict_over_http(url, folder))
    images = len(list(bench.folders[0].iterdir()))
    return {name: images / statistics.median(each) for name, each in seconds.items()}


# --- kept tensors ---------------------------------------------------------------------------------


def keep(bench: Bench, level: Level, images: int) -> tuple[Path, float, float]:
    """Keep one level; return the folder, bytes per image, and the time keeping adds."""
    listing = bench.place / f"{level}.csv"
    paths = [str(path) for folder in bench.folders for path in sorted(folder.iterdir())][:images]
    listing.write_text("\n".join(["path", *paths]) + "\n")
    plain = bench.run(listing, bench.place / f"plain-{level}", "head")
    folder = bench.place / level
    keeping = bench.run(
        listing,
        bench.place / f"beside-{level}",
        "head",
        keep=Keep(level, folder),
        part_images=KEPT_PART,
    )
    size = sum(path.stat().st_size for path in folder.iterdir())
    return folder, size / len(paths), keeping / plain


def linked(folder: Path, images: int) -> Path:
    """The same kept parts several times, as a larger folder."""
    large = folder.with_name(f"{folder.name}-{images}")
    large.mkdir()
    manifest = json.loads((folder / "_manifest.json").read_text())
    part, have = manifest["kept"]["part_images"], manifest["source"]["images"]
    assert have % part == 0, "parts of one size can be linked"
    assert images % part == 0
    for number in range(images // part):
        for path in folder.glob(f"part-{number % (have // part):05}.*"):
            name = f"part-{number:05}{path.name[len('part-00000') :]}"
            os.link(path, large / name)
    manifest["source"]["images"] = images
    (large / "_manifest.json").write_text(json.dumps(manifest))
    return large


def compare_kept(
    bench: Bench, source: Path, level: Level, task: str, images: int
) -> dict[str, object]:
    """A task over kept tensors against the same task over photos, per image."""
    photos = bench.folders[0]
    count = len(list(photos.iterdir()))
    from_photos = bench.run(photos, bench.place / f"photos-{level}-{task}", task) / count
    from_kept = bench.run(source, bench.place / f"kept-{level}-{task}", task) / images
    return {
        "source": level,
        "images": images,
        "task": task,
        "photos per second": 1 / from_photos,
        "kept per second": 1 / from_kept,
        "ratio": from_photos / from_kept,
    }


# --- memory ---------------------------------------------------------------------------------------


class _Memory(Progress):
    """Resident megabytes after each batch."""

    def __init__(self) -> None:
        self.megabytes: list[float] = []

    def begin(self, images: int, finished: int) -> OnProgress:
        return lambda count: self.megabytes.append(resident_megabytes())


def resident_megabytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure_memory(bench: Bench, images: int) -> dict[str, float]:
    """Highest resident memory in the first fifth and in the last, over many images."""
    listing = bench.place / "many.csv"
    paths = [str(path) for folder in bench.folders for path in sorted(folder.iterdir())]
    listing.write_text("\n".join(["path", *(paths * (images // len(paths)))]) + "\n")
    memory = _Memory()
    options = BatchOptions(
        str(listing), bench.place / "many", bundles=[TASKS / "flowers.safetensors"],
        part_images=MEMORY_PART, keep=Keep("summaries", bench.place / "many-kept"),
    )  # fmt: skip
    run_batch(options, bench.config, lambda: load_backbone(BACKBONE), None, (), memory)
    fifth = len(memory.megabytes) // 5
    return {
        "images": images,
        "first_fifth_megabytes": max(memory.megabytes[:fifth]),
        "last_fifth_megabytes": max(memory.megabytes[-fifth:]),
    }


# --- all of it ------------------------------------------------------------------------------------


def measure(place: Path, sizes: Sizes, console: Console) -> list[dict[str, object]]:
    bench, backbone = prepare_bench(place, sizes.images)
    rows: list[dict[str, object]] = []
    speeds = compare_speed(bench, backbone)
    batch = speeds["engram batch"]
    rows.append(
        {
            "measure": "images per second",
            **speeds,
            "batch to bare pass": batch / speeds["bare pass"],
            "batch to predict": batch / speeds["engram predict"],
        }
    )
    console.print(rows[-1])
    contenders = {"embeddings": "head", "summaries": "layers", "contexts": "row1"}
    for level in LEVELS:
        images = sizes.kept_contexts if level == "contexts" else min(sizes.images, 1000)
        folder, size, cost = keep(bench, level, images)
        rows.append({"measure": "keeping", "level": level, "bytes": size, "time": cost})
        console.print(rows[-1])
        source, count = folder, images
        if level != "contexts":
            source, count = linked(folder, sizes.summaries), sizes.summaries
        task = contenders[level]
        rows.append({"measure": "kept", **compare_kept(bench, source, level, task, count)})
        console.print(rows[-1])
        shutil.rmtree(folder)
    rows.append({"measure": "memory", **measure_memory(bench, sizes.memory)})
    console.print(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few images, to see that it runs")
    quick = parser.parse_args().quick
    console = Console()
    with tempfile.TemporaryDirectory() as place:
        rows = measure(Path(place), QUICK if quick else FULL, console)
    if not quick:
        console.print(write_results("batch", rows))


if __name__ == "__main__":
    main()
