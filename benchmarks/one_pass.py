"""What N tasks in one pass cost: over one plain forward, over a dense mask, over N models.

    python -m benchmarks.one_pass [--quick] [--precisions]

ViT-B/32 and ViT-B/16 shapes with random weights, five memory tokens a task, float32 on the CPU; the
same tasks once more with row adapters of rank 8 on all four maps, in multiples of those without.
Contenders take turns within one run; every figure is a ratio of medians. `N models` is N times the
plain forward of this run: N fine-tuned copies are that very forward N times.

`--precisions` runs only the last part: the pass as a server on a CPU runs it, its matrices plain,
packed, and in int8, over one plain forward in float32; and one image whose context is kept, over
the same image cold.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.dense_mask import DenseMaskViT
from benchmarks.measure import medians, write_results
from server.model import Backbone, MultiTaskViT, TaskWeights, load_backbone
from server.model.adapters import Adapter, LowRank, map_sizes
from server.model.linear import adds_in_32_bits

BATCHES = (1, 8)  # larger ones are a curve of `benchmarks.scale`
PRECISION_BATCHES = {32: (1, 8), 16: (8,)}  # by patch size
PRECISION_TASK_COUNTS = (1, 16)
WARM_TASKS = 4
TASK_COUNTS = (1, 4, 16, 64)
MEMORY_TOKENS = 5
RANK = 8
CLASSES = 100


def build(patch: int) -> tuple[ViTForImageClassification, Backbone]:
    """A ViT-B of random weights, as Hugging Face runs it and as we do."""
    torch.manual_seed(0)
    config = ViTConfig(patch_size=patch)
    config.num_labels = 1000
    config._attn_implementation = "sdpa"
    model = ViTForImageClassification(config)
    model.train(False)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return model, load_backbone(folder)


def random_tasks(
    backbone: Backbone, count: int, *, classes: int = CLASSES, memory: int = MEMORY_TOKENS
) -> list[TaskWeights]:
    layers, width = backbone.layers, backbone.width
    return [
        TaskWeights(
            head_weight=torch.randn(classes, width) * 0.02,
            head_bias=torch.zeros(classes),
            class_token=torch.randn(width) * 0.02,
            memory=torch.randn(layers, memory, width) * 0.02,
        )
        for _ in range(count)
    ]


def with_adapter(backbone: Backbone, task: TaskWeights, rank: int = RANK) -> TaskWeights:
    adapter: Adapter = {
        name: LowRank(
            torch.randn(backbone.layers, into, rank) * into**-0.5,
            torch.randn(backbone.layers, rank, out) * 0.02,
        )
        for name, (into, out) in map_sizes(backbone).items()
    }
    return replace(task, adapter=adapter)


def named(model: MultiTaskViT, tasks: list[TaskWeights]) -> list[str]:
    names = [f"task{number}" for number in range(len(tasks))]
    for name, task in zip(names, tasks, strict=True):
        model.add(name, task)
    return names


@torch.no_grad()
def plain(model: ViTForImageClassification, pixels: Tensor) -> Tensor:
    logits: Tensor = model(pixels).logits
    return logits


def measure_shape(patch: int, batches: tuple[int, ...], seconds: float) -> list[dict[str, object]]:
    huggingface, backbone = build(patch)
    rows: list[dict[str, object]] = []
    for batch in batches:
        pixels = torch.randn(batch, 3, *backbone.image_size)
        contenders: dict[str, Callable[[], object]] = {"plain": partial(plain, huggingface, pixels)}
        for count in TASK_COUNTS:
            tasks = random_tasks(backbone, count)
            ours = MultiTaskViT(backbone)
            contenders[f"ours {count}"] = partial(ours, pixels, named(ours, tasks))
            adapted = MultiTaskViT(backbone)
            names = named(adapted, [with_adapter(backbone, task) for task in tasks])
            contenders[f"adapted {count}"] = partial(adapted, pixels, names)
            contenders[f"dense {count}"] = partial(DenseMaskViT(backbone, tasks), pixels)
        times = medians(contenders, seconds=seconds)
        for count in TASK_COUNTS:
            ours_time, one = times[f"ours {count}"], times["plain"]
            rows.append(
                {
                    "shape": f"ViT-B/{patch}",
                    "batch": batch,
                    "tasks": count,
                    "over_one_forward": ours_time / one,
                    "over_dense_mask": ours_time / times[f"dense {count}"],
                    "over_n_models": ours_time / (count * one),
                    "adapters_over_none": times[f"adapted {count}"] / ours_time,
                    "plain_seconds": one,
                }
            )
    return rows


def served_as(backbone: Backbone) -> dict[str, Backbone]:
    return {
        "plain": backbone,
        "packed": backbone.packed(),
        "int8": backbone.packed(int8=True),
    }


def measure_precisions(patch: int, seconds: float) -> list[dict[str, object]]:
    """The pass in each form of the matrices, over one plain forward in float32."""
    huggingface, backbone = build(patch)
    forms = served_as(backbone)
    rows: list[dict[str, object]] = []
    for batch in PRECISION_BATCHES[patch]:
        images = torch.randint(0, 256, (batch, *backbone.image_size, 3), dtype=torch.uint8)
        pixels = backbone.preprocessing.normalise(images)
        contenders: dict[str, Callable[[], object]] = {"plain": partial(plain, huggingface, pixels)}
        for count in PRECISION_TASK_COUNTS:
            tasks = random_tasks(backbone, count)
            for form, packed in forms.items():
                ours = MultiTaskViT(packed)
                contenders[f"{form} {count}"] = partial(ours, images, named(ours, tasks))
        times = medians(contenders, seconds=seconds)
        for count in PRECISION_TASK_COUNTS:
            ratios = {form: times[f"{form} {count}"] / times["plain"] for form in forms}
            rows.append({"shape": f"ViT-B/{patch}", "batch": batch, "tasks": count} | ratios)
    return rows


def measure_warm(seconds: float) -> list[dict[str, object]]:
    """One image asked other tasks again, its context kept in float16, over the same image cold."""
    _, backbone = build(32)
    images = torch.randint(0, 256, (1, *backbone.image_size, 3), dtype=torch.uint8)
    tasks = random_tasks(backbone, WARM_TASKS)
    contenders: dict[str, Callable[[], object]] = {}
    for form, packed in served_as(backbone).items():
        ours = MultiTaskViT(packed)
        names = named(ours, tasks)
        context = ours.encode(images)[0]
        kept = replace(context, states=context.states.half())
        contenders[f"cold {form}"] = partial(ours, images, names)
        contenders[f"warm {form}"] = partial(ours.predict_pairs, [kept], [names])
    times = medians(contenders, seconds=seconds, least=10)
    ratios = {form: times[f"cold {form}"] / times[f"warm {form}"] for form in served_as(backbone)}
    return [{"shape": "ViT-B/32", "warm_tasks": WARM_TASKS} | ratios]


def show_precisions(rows: list[dict[str, object]]) -> Table:
    sums = "32" if adds_in_32_bits() else "16"
    table = Table(title=f"Over one HF forward in float32 (products added in {sums} bits)")
    names = ("shape", "batch", "tasks", "plain", "packed", "int8")
    for column in names:
        table.add_column(column, justify="left" if column == "shape" else "right")
    for row in rows:
        known = [row.get(name, "warm" if name == "batch" else WARM_TASKS) for name in names]
        cells = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in known]
        table.add_row(*cells)
    return table


def show(rows: list[dict[str, object]]) -> Table:
    table = Table(title="One masked pass, as a multiple of …")
    for column in (
        "shape",
        "batch",
        "tasks",
        "one HF forward",
        "dense mask",
        "N models",
        "adapters",
    ):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for row in rows:
        names = ("over_one_forward", "over_dense_mask", "over_n_models", "adapters_over_none")
        ratios = [row[name] for name in names]
        cells = [str(row["shape"]), str(row["batch"]), str(row["tasks"])]
        table.add_row(*cells, *(f"{ratio:.3f}" for ratio in ratios))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="batch 8 only, less time for each")
    parser.add_argument("--precisions", action="store_true", help="only the forms of the matrices")
    given = parser.parse_args()
    quick: bool = given.quick
    batches = (8,) if quick else BATCHES
    seconds = 15.0 if quick else 30.0
    console = Console()
    if given.precisions:
        forms = [row for patch in PRECISION_BATCHES for row in measure_precisions(patch, seconds)]
        forms += measure_warm(seconds)
        console.print(show_precisions(forms))
        console.print(f"written to {write_results('precisions', forms).name}")
        return
    rows = [row for patch in (32, 16) for row in measure_shape(patch, batches, seconds)]
    console.print(show(rows))
    console.print(f"written to {write_results('one_pass', rows).name}")


if __name__ == "__main__":
    main()
