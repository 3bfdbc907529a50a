"""`python -m research.adapt_backbone`: a Vision Transformer made to work at a smaller image size.

How the embedded backbone was made. The student starts as the teacher's own tensors with position
embeddings resampled to the smaller grid, and learns to answer at its size what the teacher answers
for the same cut of the same photo at the teacher's size: class token, logits and patch tokens.
Labels of the photos are never read. Photos that look like those of `--exclude` (the test images of
a benchmark, say) are left out. With `--minutes 0` the resampled tensors are written as they are.

One single-threaded process per core: on a CPU that is faster than one process of many threads.
"""

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from engram_server.model.preprocessing import Preprocessing
from engram_server.model.preprocessing.huggingface import from_folder
from engram_training.errors import DataError, TrainingError
from PIL import Image
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from transformers import ViTForImageClassification

from research.label_names import readable

PHOTO_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
HELD_OUT = 256  # photos that only measure, or a tenth of few
LOOKS = 10  # how often the held-out photos are measured, and the student is written
THUMBNAIL = 16  # photos are compared by thumbnails of this size
ALIKE = 0.985  # correlation of thumbnails from which two photos count as the same


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the result, written beside the weights."""

    pixels: int
    minutes: float
    learning_rate: float
    batch: int = 32  # over all processes
    weight_decay: float = 0.01
    warmup: float = 0.05  # of the time
    smallest_cut: float = 0.5  # of a photo's area
    class_weight: float = 1.0
    patch_weight: float = 0.25
    logit_weight: float = 1.0
    seed: int = 0


# --- Photos --------------------------------------------------------------------------------------


def find_photos(folder: Path, limit: int | None, rng: np.random.Generator) -> list[Path]:
    """The photos anywhere below a folder, or so many of them drawn at random."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PHOTO_SUFFIXES)
    if not found:
        raise DataError(f"There is no photo (jpg, png, webp) in {folder}.")
    if limit is None or limit >= len(found):
        return found
    return [found[place] for place in sorted(rng.permutation(len(found))[:limit])]


def leave_out(photos: Sequence[Path], excluded: Sequence[Path]) -> list[Path]:
    """The photos that look like none of the excluded ones."""
    if not excluded:
        return list(photos)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        taboo = np.stack(list(pool.map(_thumbnail, excluded)))
        kept = []
        for start in range(0, len(photos), 4096):
            some = photos[start : start + 4096]
            alike = (np.stack(list(pool.map(_thumbnail, some))) @ taboo.T).max(axis=1)
            kept += [path for path, score in zip(some, alike, strict=True) if score < ALIKE]
    return kept


def _thumbnail(path: Path) -> npt.NDArray[np.float32]:
    """A small grey picture with mean 0 and length 1, so that a product is a correlation."""
    with Image.open(path) as photo:
        photo.draft("L", (THUMBNAIL * 4, THUMBNAIL * 4))
        grey = photo.convert("L").resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BILINEAR)
    flat = np.asarray(grey, dtype=np.float32).ravel()
    flat -= flat.mean()
    return flat / max(float(np.linalg.norm(flat)), 1e-6)


def cut_view(
    path: Path, rng: np.random.Generator, sizes: Sequence[int], smallest: float
) -> list[npt.NDArray[np.uint8]]:
    """One random cut of a photo, mirrored or not, in each of the sizes: (size, size, 3)."""
    with Image.open(path) as opened:
        photo = opened.convert("RGB")
    width, height = photo.size
    area = rng.uniform(smallest, 1.0) * width * height
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    cut_width = min(width, max(1, round(math.sqrt(area * ratio))))
    cut_height = min(height, max(1, round(math.sqrt(area / ratio))))
    left = int(rng.integers(0, width - cut_width + 1))
    top = int(rng.integers(0, height - cut_height + 1))
    box = (left, top, left + cut_width, top + cut_height)
    step = -1 if rng.random() < 0.5 else 1
    cuts = [photo.resize((size, size), Image.Resampling.BICUBIC, box=box) for size in sizes]
    return [np.asarray(cut)[:, ::step].copy() for cut in cuts]


# --- Teacher and student -------------------------------------------------------------------------


class Answer(NamedTuple):
    class_token: Tensor  # (B, D), after the final norm
    logits: Tensor  # (B, K)
    patches: Tensor  # (B, D, rows, columns), after the final norm


def answer(model: ViTForImageClassification, pixels: Tensor) -> Answer:
    last = model.vit(pixels).last_hidden_state
    side = math.isqrt(last.shape[1] - 1)
    return Answer(last[:, 0], model.classifier(last[:, 0]), _as_grid(last[:, 1:], side))


def _as_grid(rows: Tensor, side: int) -> Tensor:
    return rows.transpose(1, 2).reshape(len(rows), -1, side, side)


def _edge(size: int | list[int] | tuple[int, int]) -> int:
    """The edge of a square, which a configuration may also give as a pair."""
    return size if isinstance(size, int) else size[0]


def resampled(teacher: ViTForImageClassification, pixels: int) -> ViTForImageClassification:
    """The same tensors for another image size, positions resampled as transformers does it."""
    config = deepcopy(teacher.config)
    config.image_size = pixels
    labels = readable({int(number): name for number, name in (config.id2label or {}).items()})
    config.id2label, config.label2id = labels, {name: number for number, name in labels.items()}
    student = ViTForImageClassification(config)
    tensors = dict(teacher.state_dict())
    name = "vit.embeddings.position_embeddings"
    patches = (pixels // _edge(config.patch_size)) ** 2
    rows = torch.zeros(1, 1 + patches, config.hidden_size)
    with torch.no_grad():
        tensors[name] = teacher.vit.embeddings.interpolate_pos_encoding(rows, pixels, pixels)
    student.load_state_dict(tensors)
    return student


def save(
    student: ViTForImageClassification, out: Path, view: Preprocessing, recipe: Recipe
) -> None:
    """The weights in half precision, with how photos are shown to it and how all was made."""
    half = deepcopy(student)
    nn.Module.half(half)
    half.save_pretrained(out)
    prepared = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": view.resize},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": recipe.pixels, "width": recipe.pixels},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": view.mean,
        "image_std": view.std,
    }
    (out / "preprocessor_config.json").write_text(json.dumps(prepared, indent=1) + "\n")
    (out / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n")


# --- Learning ------------------------------------------------------------------------------------


class DistillationBatch(NamedTuple):
    pixels: Tensor  # (B, 3, size, size), as the student sees them
    targets: Answer


class DistillationBatches:
    """Random cuts of photos, with the teacher's outputs as targets."""

    def __init__(
        self, teacher: ViTForImageClassification, view: Preprocessing, recipe: Recipe
    ) -> None:
        self._teacher = teacher.train(False).requires_grad_(False)
        self._view = view
        self._recipe = recipe
        self._sizes = (_edge(teacher.config.image_size), recipe.pixels)
        self._side = recipe.pixels // _edge(teacher.config.patch_size)

    @torch.no_grad()
    def of(self, photos: Sequence[Path], rng: np.random.Generator) -> DistillationBatch:
        cuts = [cut_view(path, rng, self._sizes, self._recipe.smallest_cut) for path in photos]
        large, small = (
            self._view.normalise(torch.from_numpy(np.stack(some)))
            for some in zip(*cuts, strict=True)
        )
        outputs = answer(self._teacher, large)
        size = (self._side, self._side)
        patches = F.interpolate(outputs.patches, size, mode="bilinear", antialias=True)
        return DistillationBatch(small, outputs._replace(patches=patches))


def loss_parts(outputs: Answer, targets: Answer) -> Tensor:
    """How far the student is off: class token and patches (1 is no relation at all), and logits."""
    return torch.stack(
        [
            F.mse_loss(outputs.class_token, targets.class_token) / targets.class_token.var(),
            F.mse_loss(outputs.patches, targets.patches) / targets.patches.var(),
            F.kl_div(
                outputs.logits.log_softmax(-1),
                targets.logits.log_softmax(-1),
                reduction="batchmean",
                log_target=True,
            ),
        ]
    )


def learn(
    rank: int,
    world: int,
    port: int,
    teacher_name: str,
    photos: list[Path],
    out: Path,
    recipe: Recipe,
) -> None:
    """One of `world` processes that teach the same student with different photos."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    teacher = ViTForImageClassification.from_pretrained(teacher_name, dtype=torch.float32)
    view = read_view(teacher_name)
    student, batches = resampled(teacher, recipe.pixels), DistillationBatches(teacher, view, recipe)
    own_view = view.with_size(recipe.pixels)
    weights = torch.tensor([recipe.class_weight, recipe.patch_weight, recipe.logit_weight])
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=recipe.weight_decay
    )
    count = min(HELD_OUT, len(photos) // 10)
    measuring, photos = photos[:count], photos[count:]
    held_out_batch = (
        batches.of(measuring, np.random.default_rng(recipe.seed)) if rank == 0 else None
    )
    started, looks = time.monotonic(), 0
    for step, batch in enumerate(
        _endless_batches(batches, photos[rank::world], recipe, rank, world)
    ):
        progress = _from_first((time.monotonic() - started) / max(60 * recipe.minutes, 1e-9))
        if progress * LOOKS >= looks or progress >= 1:
            looks += 1
            if held_out_batch is not None:
                typer.echo(
                    _progress_line(step, min(progress, 1.0), held_out(student, held_out_batch))
                )
                save(student, out, own_view, recipe)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * pace(progress, recipe.warmup)
        loss = loss_parts(answer(student.train(), batch.pixels), batch.targets) @ weights
        torch.autograd.backward(loss)
        _average_gradients(student, world)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


def read_view(teacher: str) -> Preprocessing:
    view = from_folder(Path(teacher))
    if view is None:
        raise DataError(f"{teacher}: a folder with a preprocessor_config.json is needed.")
    return view


def _endless_batches(
    batches: DistillationBatches, photos: Sequence[Path], recipe: Recipe, rank: int, world: int
) -> Iterator[DistillationBatch]:
    """Endless batches of this process's photos; each epoch has a new order and new cuts."""
    rng = np.random.default_rng((recipe.seed, rank))
    size = max(1, min(recipe.batch // world, len(photos)))
    while True:
        order = rng.permutation(len(photos))
        for start in range(0, len(order) - size + 1, size):
            yield batches.of([photos[place] for place in order[start : start + size]], rng)


@torch.no_grad()
def held_out(student: ViTForImageClassification, held_out_batch: DistillationBatch) -> Tensor:
    """The parts of the loss, and how often the student's first answer is the teacher's."""
    student.train(False)
    starts = range(0, len(held_out_batch.pixels), 32)
    chunks = [answer(student, held_out_batch.pixels[start : start + 32]) for start in starts]
    outputs = Answer(*map(torch.cat, zip(*chunks, strict=True)))
    agree = (outputs.logits.argmax(1) == held_out_batch.targets.logits.argmax(1)).float().mean()
    return torch.cat([loss_parts(outputs, held_out_batch.targets), agree[None]])


def _progress_line(step: int, progress: float, values: Tensor) -> str:
    named = zip(("class", "patches", "logits", "agree"), values.tolist(), strict=True)
    parts = " ".join(f"{name} {value:.4f}" for name, value in named)
    return f"{progress:6.1%} step {step:6d} | held out: {parts}"


def pace(progress: float, warmup: float) -> float:
    """Of the learning rate: up in a line, then down a cosine."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def _from_first(value: float) -> float:
    """The value of the first process, so that all of them do the same."""
    shared = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(shared, 0)
    return float(shared)


def _average_gradients(module: nn.Module, world: int) -> None:
    gradients = [each.grad for each in module.parameters() if each.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    parts = torch.split_with_sizes(flat / world, [gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


# --- The command ---------------------------------------------------------------------------------


def main(
    photos: Annotated[
        list[str],
        typer.Argument(metavar="FOLDER[:COUNT]…", help="Photos, or so many of each folder."),
    ],
    teacher: Annotated[Path, typer.Option(help="The folder of a ViT with an ImageNet head.")],
    out: Annotated[Path, typer.Option(help="Where the adapted backbone goes.")],
    pixels: Annotated[int, typer.Option(help="The image size to adapt to.")] = 176,
    minutes: Annotated[float, typer.Option(min=0, help="How long to train.")] = 30,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 3e-5,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="Photos that must not be learnt from.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    seed: int = 0,
) -> None:
    """Adapt a backbone to a smaller image size, by self-distillation."""
    rng = np.random.default_rng(seed)
    found: list[Path] = []
    for text in photos:
        folder, _, limit = text.partition(":")
        found += find_photos(Path(folder), int(limit) if limit else None, rng)
    taboo = [path for folder in exclude or [] for path in find_photos(folder, None, rng)]
    kept = leave_out(found, taboo)
    typer.echo(
        f"{len(kept)} photos; {len(found) - len(kept)} left out: they look like excluded ones."
    )
    order = [kept[place] for place in rng.permutation(len(kept))]
    recipe = Recipe(pixels=pixels, minutes=minutes, learning_rate=rate, seed=seed)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(  # type: ignore[no-untyped-call]
        learn, (processes, port, str(teacher), order, out, recipe), nprocs=processes
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except TrainingError as error:
        raise SystemExit(f"error: {error}") from None
