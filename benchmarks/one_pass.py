"""What N tasks in one pass cost: over one plain forward, over a dense mask, over N models.

    python -m benchmarks.one_pass [--quick] [--precisions | --layers]

ViT-B/32 and ViT-B/16 shapes with random weights, five memory tokens a task, float32 on the CPU; the
same tasks once more with LoRA of rank 8 on all four projections, in multiples of those without.
Contenders take turns within one run; every figure is a ratio of medians. `N models` is N times the
plain forward of this run: N fine-tuned copies are that very forward N times.

`--precisions` runs only the last part: the pass as a server on a CPU runs it, its matrices plain,
packed, and in int8, over one plain forward in float32; and one image whose context is kept, over
the same image cold.

`--layers` measures tasks without rows whose heads read three layers beside the class token.
"""

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from engram_server.model import Backbone, MultiTaskViT, TaskWeights, load_backbone
from engram_server.model.kernels.linear import adds_in_32_bits
from engram_server.model.lora import Lora, LoraWeight, target_sizes
from engram_server.model.tasks import LayerWeights
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from benchmarks.dense_mask import DenseMaskViT
from benchmarks.measure import medians, write_results

BATCHES = (1, 8)  # larger ones are a curve of `benchmarks.scale`
PRECISION_BATCHES = {32: (1, 8), 16: (8,)}  # by patch size
PRECISION_TASK_COUNTS = (1, 16)
WARM_TASKS = 4
TASK_COUNTS = (1, 4, 16, 64)
LAYER_TASK_COUNTS = (16, 256)
LAYERS_READ = (4, 8, 11)
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


def with_lora(backbone: Backbone, task: TaskWeights, rank: int = RANK) -> TaskWeights:
    lora: Lora = {
        name: LoraWeight(
            torch.randn(backbone.layers, into, rank) * into**-0.5,
            torch.randn(backbone.layers, rank, out) * 0.02,
        )
        for name, (into, out) in target_sizes(backbone).items()
    }
    return replace(task, lora=lora)


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
            names = named(adapted, [with_lora(backbone, task) for task in tasks])
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
    """Speedup of a warm image, its context cached in float16, over the same image cold."""
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


def measure_layers(seconds: float, batch: int = 8) -> list[dict[str, object]]:
    """Tasks that read layers, and head-only ones, over one plain forward."""
    huggingface, backbone = build(32)
    pixels = torch.randn(batch, 3, *backbone.image_size)
    contenders: dict[str, Callable[[], object]] = {"plain": partial(plain, huggingface, pixels)}
    shape = (CLASSES, len(LAYERS_READ), *backbone.summary_shape[1:])
    for count in LAYER_TASK_COUNTS:
        heads = [
            replace(task, class_token=None, memory=None) for task in random_tasks(backbone, count)
        ]
        layers = [
            replace(head, layers=LayerWeights(LAYERS_READ, (torch.randn(shape) * 0.02).half()))
            for head in heads
        ]
        for kind, tasks in (("heads", heads), ("layers", layers)):
            ours = MultiTaskViT(backbone)
            contenders[f"{kind} {count}"] = partial(ours, pixels, named(ours, tasks))
    times = medians(contenders, seconds=seconds, least=5)
    return [
        {"shape": "ViT-B/32", "batch": batch, "tasks": count}
        | {kind: times[f"{kind} {count}"] / times["plain"] for kind in ("heads", "layers")}
        for count in LAYER_TASK_COUNTS
    ]


def show_layers(rows: list[dict[str, object]]) -> Table:
    table = Table(title="Over one HF forward")
    for column in ("shape", "batch", "tasks", "heads", "layers"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for row in rows:
        cells = [f"{one:.3f}" if isinstance(one, float) else str(one) for one in row.values()]
        table.add_row(*cells)
    return table


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
    parser.add_argument("--layers", action="store_true", help="only tasks that read layers")
    args = parser.parse_args()
    quick: bool = args.quick
    batches = (8,) if quick else BATCHES
    seconds = 15.0 if quick else 30.0
    console = Console()
    if args.precisions:
        forms = [row for patch in PRECISION_BATCHES for row in measure_precisions(patch, seconds)]
        forms += measure_warm(seconds)
        console.print(show_precisions(forms))
        console.print(f"written to {write_results('precisions', forms).name}")
        return
    if args.layers:
        layers = measure_layers(seconds)
        console.print(show_layers(layers))
        console.print(f"written to {write_results('layers', layers).name}")
        return
    rows = [row for patch in (32, 16) for row in measure_shape(patch, batches, seconds)]
    console.print(show(rows))
    console.print(f"written to {write_results('one_pass', rows).name}")


if __name__ == "__main__":
    main()
