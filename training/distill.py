"""`python -m training.distill`: a small backbone from a large one, by watching what it answers.

How the embedded backbone was made. Two stages, both on every core, one single-threaded process each
(on a CPU that is faster than one process of many threads, and bears other work beside it):

1. Views: photos are cut at random, once per view; the teacher looks at every view, and what it
   answers is kept: its class token, its logits, and its patch tokens, midway and at the end.
2. Training: the student learns to answer the same for the same view, from half its size upwards,
   because small pictures are cheap and teach most of what there is to learn.

No weight of the teacher is copied. Labels of the photos are never read. Photos that look like those
of `--exclude` (the test images of a benchmark, say) are left out.
"""

import json
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from PIL import Image
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from training.errors import CannotWrite, DataError, SettingsConflict, TrainingError

PHOTO_SUFFIXES = {".jpg", ".jpeg", ".png", ".webp"}
BLOCK = 64  # views that the teacher looks at together, and the unit of resuming
HELD_OUT = 1000  # views that only measure
GRID = 8  # patch tokens are kept as 8 × 8, whatever grid the teacher has
THUMBNAIL = 16  # photos are compared by thumbnails of this size
ALIKE = 0.985  # correlation of thumbnails from which two photos count as the same
TEMPERATURE = 2.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides the result, written beside the weights."""

    views: int
    minutes: float
    learning_rate: float
    # From this share of the time on, train at this share of the student's size.
    stages: tuple[tuple[float, float], ...]
    teacher_pixels: int = 192
    student_pixels: int = 128
    patch: int = 16
    layers: int = 6
    width: int = 192
    heads: int = 3
    batch: int = 64  # over all processes
    weight_decay: float = 0.05
    warmup: float = 0.02  # of the time
    class_weight: float = 2.0
    patch_weight: float = 1.0
    middle_weight: float = 0.5
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
    taboo = np.stack([_thumbnail(path) for path in excluded])
    kept = []
    for start in range(0, len(photos), 4096):
        some = photos[start : start + 4096]
        alike = (np.stack([_thumbnail(path) for path in some]) @ taboo.T).max(axis=1)
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


def cut_view(path: Path, number: int, sizes: Sequence[int], seed: int) -> list[Image.Image]:
    """One random cut of a photo, the same for the same number, in each of the sizes."""
    rng = np.random.default_rng((seed, number))
    with Image.open(path) as opened:
        photo = opened.convert("RGB")
    width, height = photo.size
    area = rng.uniform(0.35, 1.0) * width * height
    ratio = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
    cut_width = min(width, round(math.sqrt(area * ratio)))
    cut_height = min(height, round(math.sqrt(area / ratio)))
    left = int(rng.integers(0, width - cut_width + 1))
    top = int(rng.integers(0, height - cut_height + 1))
    box = (left, top, left + cut_width, top + cut_height)
    return [photo.resize((size, size), Image.Resampling.BICUBIC, box=box) for size in sizes]


# --- Views: what the teacher answers --------------------------------------------------------------


class Views:
    """Pictures and the teacher's answers, as files of a folder that processes share."""

    def __init__(self, folder: Path, recipe: Recipe, width: int, classes: int) -> None:
        pixels, count = recipe.student_pixels, recipe.views
        self.pictures = _shared(folder / "pictures", (count, pixels, pixels, 3), np.uint8)
        self.class_token = _shared(folder / "class", (count, width), np.float16)
        self.logits = _shared(folder / "logits", (count, classes), np.float16)
        self.patches = _shared(folder / "patches", (count, GRID, GRID, width), np.float16)
        self.middle = _shared(folder / "middle", (count, GRID, GRID, width), np.float16)
        self.done = _shared(folder / "done", (-(-count // BLOCK),), np.uint8)


def _shared(path: Path, shape: tuple[int, ...], dtype: type) -> np.memmap[Any, Any]:
    """An array in a file, made when it is not there. Of another shape, it is of another run."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not path.exists():
        with path.open("wb") as file:
            file.truncate(size)
    elif path.stat().st_size != size:
        raise SettingsConflict(
            f"{path} is of another run, with other sizes. Name another --work folder or remove it."
        )
    return np.memmap(path, dtype=dtype, mode="r+", shape=shape)


def teach(
    rank: int, world: int, teacher: str, photos: list[Path], work: Path, recipe: Recipe
) -> None:
    """Every `world`-th block of views that is not done yet."""
    torch.set_num_threads(1)
    processor = AutoImageProcessor.from_pretrained(teacher, backend="pil")  # type: ignore[no-untyped-call]
    model = AutoModelForImageClassification.from_pretrained(teacher).eval()
    mean, std = torch.tensor(processor.image_mean), torch.tensor(processor.image_std)
    views = Views(work, recipe, model.config.hidden_size, model.config.num_labels)
    started, sizes = time.monotonic(), (recipe.teacher_pixels, recipe.student_pixels)
    for block in range(rank, len(views.done), world):
        if views.done[block]:
            continue
        numbers = range(block * BLOCK, min((block + 1) * BLOCK, recipe.views))
        cuts = [cut_view(photos[n % len(photos)], n, sizes, recipe.seed) for n in numbers]
        seen = torch.stack([torch.from_numpy(np.array(large)) for large, _ in cuts])
        pixels = ((seen / 255 - mean) / std).permute(0, 3, 1, 2)
        with torch.inference_mode():
            answer = model(pixels, output_hidden_states=True, interpolate_pos_encoding=True)
            last = model.base_model.layernorm(answer.hidden_states[-1])
        place = slice(numbers.start, numbers.stop)
        views.pictures[place] = np.stack([np.asarray(small) for _, small in cuts])
        views.class_token[place] = last[:, 0].numpy()
        views.logits[place] = answer.logits.numpy()
        views.patches[place] = _as_grid(last)
        views.middle[place] = _as_grid(answer.hidden_states[len(answer.hidden_states) // 2])
        views.done[block] = 1
        if rank == 0 and block // world % 20 == 0:
            count = int(views.done.sum()) * BLOCK
            typer.echo(f"{time.monotonic() - started:6.0f} s  {count} of {recipe.views} views")


def _as_grid(tokens: Tensor) -> npt.NDArray[np.float16]:
    """The patch tokens of a square picture, (B, 1 + n², D), as (B, GRID, GRID, D)."""
    side = math.isqrt(tokens.shape[1] - 1)
    grid = tokens[:, 1:].view(len(tokens), side, side, -1).permute(0, 3, 1, 2)
    resized = F.interpolate(grid, (GRID, GRID), mode="bilinear", antialias=True)
    return resized.permute(0, 2, 3, 1).numpy().astype(np.float16)


# --- Training -------------------------------------------------------------------------------------


class Student(nn.Module):
    """The ViT that is kept, and maps from its tokens into the teacher's that are not."""

    def __init__(self, config: ViTConfig, teacher_width: int) -> None:
        super().__init__()
        self.vit = ViTForImageClassification(config)
        self.to_class = nn.Linear(config.hidden_size, teacher_width)
        self.to_patches = nn.Linear(config.hidden_size, teacher_width)
        self.to_middle = nn.Linear(config.hidden_size, teacher_width)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Class token (B, W), logits (B, K), patches and middle patches (B, n², W)."""
        seen = self.vit(pixels, output_hidden_states=True, interpolate_pos_encoding=True)
        last = self.vit.get_submodule("vit.layernorm")(seen.hidden_states[-1])
        middle = seen.hidden_states[len(seen.hidden_states) // 2]
        return (
            self.to_class(last[:, 0]),
            seen.logits,
            self.to_patches(last[:, 1:]),
            self.to_middle(middle[:, 1:]),
        )


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and spread of the teacher's tokens, channel by channel: targets are told in these."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, tokens: npt.NDArray[np.float16]) -> "Scale":
        flat = torch.from_numpy(tokens.astype(np.float32)).flatten(0, -2)
        return cls(flat.mean(0), flat.std(0).clamp(min=1e-4))

    def __call__(self, tokens: npt.NDArray[np.float16]) -> Tensor:
        return (torch.from_numpy(tokens.astype(np.float32)) - self.mean) / self.std


class Lessons:
    """Batches of views with their targets, resized for the stage that training is in."""

    def __init__(self, views: Views, recipe: Recipe) -> None:
        self._views = views
        self._recipe = recipe
        sample = slice(0, min(2048, recipe.views))
        self._class = Scale.of(views.class_token[sample])
        self._patches = Scale.of(views.patches[sample])
        self._middle = Scale.of(views.middle[sample])

    def loss(
        self, student: nn.Module, numbers: npt.NDArray[np.int64], size: int, *, flip: bool
    ) -> tuple[Tensor, Tensor]:
        """The loss to learn from, and its parts: class, patches, middle, logits, agreement."""
        recipe, views = self._recipe, self._views
        pictures = torch.from_numpy(views.pictures[numbers]).permute(0, 3, 1, 2).float() / 127.5 - 1
        if size != pictures.shape[-1]:
            pictures = F.interpolate(pictures, (size, size), mode="area")
        side = size // recipe.patch
        patches = _resized(self._patches(views.patches[numbers]), side)
        middle = _resized(self._middle(views.middle[numbers]), side)
        if flip:
            pictures, patches, middle = pictures.flip(3), patches.flip(2), middle.flip(2)
        logits = torch.from_numpy(views.logits[numbers].astype(np.float32))
        said_class, said_logits, said_patches, said_middle = student(pictures)
        parts = torch.stack(
            [
                F.smooth_l1_loss(said_class, self._class(views.class_token[numbers])),
                F.smooth_l1_loss(said_patches, patches.flatten(1, 2)),
                F.smooth_l1_loss(said_middle, middle.flatten(1, 2)),
                F.kl_div(
                    F.log_softmax(said_logits / TEMPERATURE, -1),
                    F.log_softmax(logits / TEMPERATURE, -1),
                    reduction="batchmean",
                    log_target=True,
                ),
            ]
        )
        weights = (
            recipe.class_weight,
            recipe.patch_weight,
            recipe.middle_weight,
            recipe.logit_weight,
        )
        agree = (said_logits.argmax(-1) == logits.argmax(-1)).float().mean()
        return parts @ torch.tensor(weights), torch.cat([parts.detach(), agree[None]])


def _resized(grid: Tensor, side: int) -> Tensor:
    """(B, GRID, GRID, W) as (B, side, side, W)."""
    if side == GRID:
        return grid
    moved = F.interpolate(grid.permute(0, 3, 1, 2), (side, side), mode="bilinear", antialias=True)
    return moved.permute(0, 2, 3, 1)


def learn(
    rank: int, world: int, teacher: str, work: Path, out: Path, start: Path | None, recipe: Recipe
) -> None:
    """One of `world` processes that train the same student on different views."""
    torch.set_num_threads(1)
    torch.manual_seed(recipe.seed)
    known = AutoModelForImageClassification.from_pretrained(teacher).config
    lessons = Lessons(Views(work, recipe, known.hidden_size, known.num_labels), recipe)
    student = Student(student_config(recipe, known.id2label), known.hidden_size)
    if start is not None:
        student.vit = ViTForImageClassification.from_pretrained(start, dtype=torch.float32)
    together = Together(student, world)
    optimizer = torch.optim.AdamW(
        _with_decay(student, recipe.weight_decay), lr=0.0, betas=(0.9, 0.98), fused=True
    )
    clock = time.monotonic()
    next_look = 0.0
    heard = torch.zeros(5)
    for step, numbers in enumerate(_batches(rank, world, recipe)):
        progress = together.mean_of((time.monotonic() - clock) / (60 * recipe.minutes))
        if progress >= next_look or progress >= 1:
            next_look = progress + 0.05
            if rank == 0:
                save(student.vit, out, recipe)
                typer.echo(_told(step, progress, heard, _look(student, lessons, recipe)))
        if progress >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _pace(progress, recipe.warmup)
        size = _size(progress, recipe)
        loss, parts = lessons.loss(student, numbers, size, flip=bool(step % 2))
        torch.autograd.backward(loss)
        together.average_gradients()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        heard = parts if step == 0 else heard.lerp(parts, 0.02)


class Together:
    """What the processes agree on at every step."""

    def __init__(self, module: nn.Module, world: int) -> None:
        self._module = module
        self._world = world
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)

    def mean_of(self, value: float) -> float:
        shared = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(shared)
        return float(shared) / self._world

    def average_gradients(self) -> None:
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat /= self._world
        parts = torch.split_with_sizes(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def student_config(recipe: Recipe, names: dict[int, str]) -> ViTConfig:
    return ViTConfig(
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=4 * recipe.width,
        image_size=recipe.student_pixels,
        patch_size=recipe.patch,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        layer_norm_eps=1e-6,
        id2label=names,
        label2id={name: number for number, name in names.items()},
    )


def save(vit: ViTForImageClassification, out: Path, recipe: Recipe) -> None:
    """The weights in half precision, with how pictures are prepared and how all was made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        half = ViTForImageClassification(vit.config)
        half.load_state_dict(vit.state_dict())
        nn.Module.half(half)
        half.save_pretrained(out)
        save_preprocessing(out, recipe.student_pixels)
        (out / "recipe.json").write_text(json.dumps(asdict(recipe), indent=1) + "\n")
    except OSError as error:
        raise CannotWrite(f"The student cannot be written to {out}: {error}.") from error


def save_preprocessing(folder: Path, pixels: int) -> None:
    """Photos are shown as the student saw them: the middle, without a narrow border."""
    prepared = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": pixels * 9 // 8},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": pixels, "width": pixels},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    text = json.dumps(prepared, indent=1)
    (folder / "preprocessor_config.json").write_text(text + "\n")


def _batches(rank: int, world: int, recipe: Recipe) -> Iterator[npt.NDArray[np.int64]]:
    """This process's share of the views, in a new order every time round, for ever."""
    rng = np.random.default_rng((recipe.seed, rank))
    mine = np.arange(rank, recipe.views - _held_out(recipe), world)
    size = max(1, min(recipe.batch // world, len(mine)))
    while True:
        order = rng.permutation(mine)
        for start in range(0, len(order) - size + 1, size):
            yield np.sort(order[start : start + size])


def _held_out(recipe: Recipe) -> int:
    return min(HELD_OUT, recipe.views // 10)


@torch.no_grad()
def _look(student: nn.Module, lessons: Lessons, recipe: Recipe) -> Tensor:
    """The parts of the loss on the views held out, at full size."""
    numbers = np.arange(recipe.views - _held_out(recipe), recipe.views)
    shares = np.array_split(numbers, max(1, len(numbers) // 100))
    heard = [lessons.loss(student, some, recipe.student_pixels, flip=False)[1] for some in shares]
    return torch.stack(heard).mean(0)


def _told(step: int, progress: float, heard: Tensor, held_out: Tensor) -> str:
    def parts(values: Tensor) -> str:
        named = zip(("class", "patches", "middle", "logits", "agree"), values.tolist(), strict=True)
        return " ".join(f"{name} {value:.3f}" for name, value in named)

    return f"{progress:6.1%} step {step:6d} | {parts(heard)} | held out: {parts(held_out)}"


def _pace(progress: float, warmup: float) -> float:
    """Of the learning rate: up in a line, then down a cosine."""
    if progress < warmup:
        return progress / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def _size(progress: float, recipe: Recipe) -> int:
    share = [share for since, share in recipe.stages if progress >= since][-1]
    return round(recipe.student_pixels * share / recipe.patch) * recipe.patch


def _with_decay(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Weight decay for matrices; none for biases, norms, positions and the class token."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in module.named_parameters():
        groups[parameter.ndim >= 2 and "embeddings" not in name].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
    ]


# --- The command ----------------------------------------------------------------------------------


def main(
    photos: Annotated[
        list[str],
        typer.Argument(metavar="FOLDER[:COUNT]…", help="Photos, or so many of each folder."),
    ],
    teacher: Annotated[str, typer.Option(help="A folder, or a model's name on the hub.")],
    out: Annotated[Path, typer.Option(help="Where the student goes.")],
    work: Annotated[Path, typer.Option(help="Where views are kept; a second run finds them.")],
    minutes: Annotated[float, typer.Option(min=0, help="How long to train, after the views.")] = 90,
    views: Annotated[
        int | None, typer.Option(min=20, help="By default one for each photo.")
    ] = None,
    exclude: Annotated[
        list[Path] | None, typer.Option(help="Photos that must not be learnt from.")
    ] = None,
    start: Annotated[Path | None, typer.Option(help="A student of an earlier run.")] = None,
    rate: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-3,
    stages: Annotated[
        str, typer.Option(help="From which share of the time at which share of the full size.")
    ] = "0:0.5,0.4:0.75,0.75:1",
    processes: Annotated[int, typer.Option(min=1)] = os.cpu_count() or 1,
    seed: int = 0,
) -> None:
    """Distil a teacher into the embedded backbone."""
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
    recipe = Recipe(
        views=views or len(order),
        minutes=minutes,
        learning_rate=rate,
        stages=read_stages(stages),
        seed=seed,
    )
    work.mkdir(parents=True, exist_ok=True)
    _on_every_core(teach, processes, teacher, order, work, recipe)
    if minutes:
        _on_every_core(learn, processes, teacher, work, out, start, recipe)


def read_stages(text: str) -> tuple[tuple[float, float], ...]:
    """`0:0.5,0.4:1` is half the size at first, and the whole from 40 % of the time on."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        found = sorted((float(since), float(share)) for since, share in pairs)
    except ValueError:
        found = []
    if not found or found[0][0] != 0 or not all(0 < share <= 1 for _, share in found):
        raise SettingsConflict(
            f"'{text}' are no stages: write since:size pairs from 0 on, as in 0:0.5,0.4:1"
        )
    return tuple(found)


def _on_every_core(stage: Any, processes: int, *args: object) -> None:  # noqa: ANN401
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    spawn(  # type: ignore[no-untyped-call]
        _joined, (processes, port, stage, *args), nprocs=processes
    )


def _joined(rank: int, processes: int, port: int, stage: Any, *args: object) -> None:  # noqa: ANN401
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=processes)
    stage(rank, processes, *args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        typer.run(main)
    except TrainingError as error:
        raise SystemExit(f"error: {error}") from None
