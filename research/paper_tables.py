"""The paper's tables on an available backbone: accuracy and cost of every regime.

    python -m research.paper_tables

Table A is of the regimes that are served, trained together in one pass over kept contexts. Table B
has full fine-tuning and full attention too, which need gradients through the whole sequence, so it
is of fewer images. All rows of a table learn from, validate on and are tested on the same images,
without augmentation. After every stage the results are written; started again with the same
options, the program goes on where it was interrupted. At the end it writes
docs/explanation/reproduction.md.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from engram_server.model import Backbone, load_backbone
from engram_server.model.tasks import prepare
from engram_training.bundles import write_whole
from engram_training.data.contexts import KeptContexts
from engram_training.fitting.loop import Loop, Plan
from engram_training.fitting.parts import Part
from engram_training.fitting.variants import Variant, Variants, sweep
from engram_training.judging.evaluation import predict
from engram_training.judging.metrics import Cost, cost_of
from torch import Tensor

from research import comparison
from research.comparison import (
    Candidate,
    Recipe,
    cost_of_candidate,
    full_attention,
    full_fine_tuning,
)
from research.paper_images import (
    Images,
    Selection,
    digest,
    find_data,
    list_images,
    read_images,
    select,
)
from research.paper_page import NAMES, render

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = REPOSITORY.parent / "shared"
BACKBONE = SHARED / "backbones" / "vit-tiny-patch16-224"
RESULTS = REPOSITORY / "research" / "results" / "paper_tables.json"
PAGE = REPOSITORY / "docs" / "explanation" / "reproduction.md"

# What a ViT-Ti/16 does on two cores, for the plan that is printed: images a second forward, and
# forward and backward with the backbone frozen and learned; seconds of a variant's row.
FORWARD, THROUGH_FROZEN, THROUGH_LEARNED = 45.0, 20.0, 14.0
VARIANT_ROW = 0.0004

Run = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a table is. Classes and images are limits; a smaller data set is used whole."""

    classes: int
    train: int  # of a class
    test: int  # in all
    epochs: int
    batch: int
    seeds: int  # starts of the memory


DEFAULTS: Final[Mapping[str, Scale]] = {
    "a": Scale(classes=1000, train=30, test=1000, epochs=8, batch=32, seeds=2),
    "b": Scale(classes=20, train=10, test=300, epochs=5, batch=8, seeds=1),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """All that a result depends on but the backbone and the data."""

    tables: dict[str, Scale]
    rates: tuple[float, ...]
    memory: tuple[int, ...]
    full_memory: tuple[int, ...]  # memory tokens of the full-attention rows
    seed: int


@dataclass(frozen=True, slots=True)
class Stage:
    """What is trained and written at once; `servable` is all such regimes, rates and starts."""

    table: str
    data: str
    regime: str
    memory: int = 0
    rate: float = 0.0
    seed: int = 0

    @property
    def name(self) -> str:
        start = f"Table {self.table.upper()}, {NAMES[self.data]}, {self.regime}"
        if self.regime == "servable":
            return start
        tokens = f" of {self.memory} memory tokens, seed {self.seed}" if self.memory else ""
        return f"{start}{tokens}, rate {self.rate:g}"


def stages_of(settings: Settings, data: Sequence[str]) -> list[Stage]:
    found = [Stage("a", name, "servable") for name in data]
    seeds = range(settings.seed, settings.seed + settings.tables["b"].seeds)
    for name in data:
        found.append(Stage("b", name, "servable"))
        for rate in settings.rates:
            found += [
                Stage("b", name, "full attention", memory, rate, seed)
                for memory in settings.full_memory
                for seed in seeds
            ]
            # Nothing of it is drawn, so one seed is enough.
            found.append(Stage("b", name, "full fine-tuning", rate=rate, seed=settings.seed))
    return found


# --- training -------------------------------------------------------------------------------------


def train_servable(
    backbone: Backbone, images: Images, scale: Scale, settings: Settings
) -> list[Run]:
    """Every servable regime, rate and start in one pass over kept contexts."""
    seeds = range(settings.seed, settings.seed + scale.seeds)
    chosen = servable(settings, list(seeds))
    variants = Variants(backbone, chosen, images.classes)
    train = images.sets["train"]
    kept = KeptContexts(backbone, train, images.scratch, rows=True)
    kept.fill(scale.batch, Ticker("encoded"))
    steps = scale.epochs * -(-len(train) // scale.batch)
    plan = Plan("single_label", steps, scale.batch, settings.seed, "none")
    part = Part(train, images.targets["train"], kept)
    ticker = Ticker("steps")
    loop = Loop(backbone, variants, part, None, plan, images.pool)
    loop.run(on_step=lambda tick: ticker(tick.step, tick.steps))
    tasks = [prepare(backbone, variants.weights(place)) for place in range(len(chosen))]
    val, test = (
        predict(backbone, images.sets[split], tasks, scale.batch, images.pool)
        for split in ("val", "test")
    )
    return [
        {
            "regime": variant.regime,
            "memory": variant.memory,
            "rate": variant.rate,
            "seed": variant.seed,
            **_judged(images, val[place], test[place]),
        }
        for place, variant in enumerate(chosen)
    ]


def train_alone(
    backbone: Backbone, images: Images, scale: Scale, settings: Settings, stage: Stage
) -> list[Run]:
    """One candidate of a regime that shares no pass."""
    candidate = _candidate(backbone, images.classes, stage.regime, stage.memory, stage.seed)
    recipe = Recipe(scale.epochs, scale.batch, stage.rate, settings.seed)
    sets, targets = images.sets, images.targets
    comparison.train(candidate, sets["train"], targets["train"], recipe, Ticker("steps"))
    val, test = (comparison.predict(candidate, sets[split], 32) for split in ("val", "test"))
    about = {"regime": stage.regime, "memory": stage.memory, "rate": stage.rate, "seed": stage.seed}
    return [{**about, **_judged(images, val, test)}]


def _candidate(backbone: Backbone, classes: int, regime: str, memory: int, seed: int) -> Candidate:
    if regime == "full attention":
        return full_attention(backbone, classes, memory, seed)
    return full_fine_tuning(backbone, classes)


def _judged(images: Images, val: Tensor, test: Tensor) -> Run:
    """Validation figures, and of every test image whether it was right."""
    right = val.argmax(dim=1) == images.targets["val"]
    tested = test.argmax(dim=1) == images.targets["test"]
    return {
        "val_accuracy": round(float(right.double().mean()), 6),
        "val_loss": round(float(F.cross_entropy(val, images.targets["val"])), 6),
        "test": "".join("1" if one else "0" for one in tested.tolist()),
    }


class Ticker:
    """Says how far a stage is, now and then."""

    def __init__(self, what: str, seconds: float = 30.0) -> None:
        self._what = what
        self._seconds = seconds
        self._last = time.perf_counter()

    def __call__(self, done: int, of: int) -> None:
        if time.perf_counter() - self._last > self._seconds:
            self._last = time.perf_counter()
            print(f"    {self._what} {done:,} of {of:,}", flush=True)


# --- costs and plan -------------------------------------------------------------------------------


def servable(settings: Settings, seeds: Sequence[int]) -> list[Variant]:
    """The regimes that are served, trained with SGD as in the paper. (`engram train` differs.)"""
    swept = sweep(["head", "class", "memory"], settings.memory, settings.rates, list(seeds))
    return [replace(variant, optimiser="SGD") for variant in swept]


def costs_of(backbone: Backbone, settings: Settings, outputs: int) -> list[dict[str, Any]]:
    """Parameters and FLOPs of one task in every regime."""
    rates, seeds = settings.rates[:1], [settings.seed]
    variants = Variants(
        backbone, sweep(["head", "class", "memory"], settings.memory, rates, seeds), outputs
    )
    found: list[tuple[str, int, Cost]] = [
        (variant.regime, variant.memory, cost_of(backbone, variants.weights(place)))
        for place, variant in enumerate(variants.variants)
    ]
    alone = [("full fine-tuning", 0)]
    alone += [("full attention", memory) for memory in settings.full_memory]
    for regime, memory in alone:
        candidate = _candidate(backbone, outputs, regime, memory, settings.seed)
        found.append((regime, memory, cost_of_candidate(candidate)))
    return [
        {
            "regime": regime,
            "memory": memory,
            "parameters": cost.parameters,
            "flops": cost.task_flops,
        }
        for regime, memory, cost in found
    ]


def about_backbone(backbone: Backbone) -> dict[str, Any]:
    cost = cost_of_candidate(full_fine_tuning(backbone, 1))
    return {
        "name": backbone.name,
        "fingerprint": backbone.fingerprint,
        "layers": backbone.layers,
        "width": backbone.width,
        "parameters": cost.parameters - backbone.width,  # without the head
        "flops": cost.backbone_flops,
    }


def planned_seconds(stage: Stage, settings: Settings, counts: Mapping[str, int]) -> float:
    """About how long a stage takes with a ViT-Ti/16 on two cores."""
    scale = settings.tables[stage.table]
    seen, judged = scale.epochs * counts["train"], (counts["val"] + counts["test"]) / FORWARD
    if stage.regime == "full attention":
        return seen / THROUGH_FROZEN + judged
    if stage.regime == "full fine-tuning":
        return seen / THROUGH_LEARNED + judged
    variants = len(settings.rates) * (2 + len(settings.memory) * scale.seeds)
    rows = VARIANT_ROW * variants * (seen + counts["val"] + counts["test"])
    return counts["train"] / FORWARD + judged + rows


# --- results --------------------------------------------------------------------------------------


def begin(path: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """The results so far of this very run, or new ones."""
    fresh = {**json.loads(json.dumps(about)), "stages": {}}
    if not path.exists():
        return fresh
    found: dict[str, Any] = json.loads(path.read_text())
    for name in ("settings", "backbone", "data"):
        if found.get(name) != fresh[name]:
            raise SystemExit(
                f"the results in '{path}' are of other {name}; give the same options to go on, "
                "another --results, or remove the file to start anew"
            )
    return found


def run_stages(
    stages: Sequence[Stage],
    results: dict[str, Any],
    train: Callable[[Stage], list[Run]],
    save: Callable[[], None],
) -> None:
    """Trains what is missing, one stage after the other, and saves after each."""
    for number, stage in enumerate(stages, start=1):
        label = f"[{number}/{len(stages)}] {stage.name}"
        if stage.name in results["stages"]:
            print(f"{label}: done before", flush=True)
            continue
        print(label, flush=True)
        started = time.perf_counter()
        runs = train(stage)
        seconds = round(time.perf_counter() - started, 1)
        done = {"table": stage.table, "data": stage.data, "seconds": seconds, "runs": runs}
        results["stages"][stage.name] = done
        save()
        best = max(run["val_accuracy"] for run in runs)
        print(f"    {seconds:.0f} s, {100 * best:.1f} % of validation at best", flush=True)


class Trainer:
    """Trains stages; keeps the images of the table and data set it is at."""

    def __init__(
        self,
        backbone: Backbone,
        settings: Settings,
        archives: Mapping[str, Path],
        selections: Mapping[tuple[str, str], Selection],
    ) -> None:
        self._backbone = backbone
        self._settings = settings
        self._archives = archives
        self._selections = selections
        self._open = ExitStack()
        self._at: tuple[str, str] | None = None
        self._images: Images | None = None

    def __call__(self, stage: Stage) -> list[Run]:
        images, scale = self._images_of(stage), self._settings.tables[stage.table]
        if stage.regime == "servable":
            return train_servable(self._backbone, images, scale, self._settings)
        return train_alone(self._backbone, images, scale, self._settings, stage)

    def close(self) -> None:
        self._open.close()

    def _images_of(self, stage: Stage) -> Images:
        selected = stage.table, stage.data
        if self._images is None or self._at != selected:
            self._open.close()
            archive, selection = self._archives[stage.data], self._selections[selected]
            self._images = read_images(archive, selection, self._backbone, self._open)
            self._at = selected
        return self._images


# --- the program ----------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m research.paper_tables",
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for name, kind, default, text in _options():
        parser.add_argument(f"--{name}", type=kind, default=default, help=text)
    for name, path, text in _paths():
        parser.add_argument(f"--{name}", type=Path, default=path, help=text)
    parser.add_argument("--backbone", default=BACKBONE, help="folder or hub name of the backbone")
    return parser.parse_args(arguments)


def _options() -> Iterator[tuple[str, Callable[[str], object], str | int, str]]:
    for table, scale in DEFAULTS.items():
        for field in fields(Scale):
            text = f"Table {table.upper()}: {_HELP[field.name]}"
            yield f"{table}-{field.name}", int, getattr(scale, field.name), text
    yield "rates", str, "0.003,0.01,0.03", "learning rates, of which validation chooses"
    yield "memory", str, "1,5,10,20", "memory tokens of the masked rows"
    yield (
        "full-memory",
        str,
        "10",
        "memory tokens of the full-attention rows, among those of --memory",
    )
    yield "seed", int, 0, "of the choice and order of images and the first start of memory"


_HELP: Final = {
    "classes": "classes at most",
    "train": "training images of a class at most",
    "test": "test images in all, about, at most",
    "epochs": "epochs",
    "batch": "images of a step",
    "seeds": "starts of the memory",
}


def _paths() -> Iterator[tuple[str, Path, str]]:
    yield "data", SHARED / "datasets", "folder of the data sets of research/DATA.md"
    yield "results", RESULTS, "where results are kept"
    yield "page", PAGE, "the page to write"


def settings_of(options: argparse.Namespace) -> Settings:
    values = vars(options)
    tables = {
        table: Scale(**{field.name: values[f"{table}_{field.name}"] for field in fields(Scale)})
        for table in DEFAULTS
    }
    settings = Settings(
        tables=tables,
        rates=tuple(float(rate) for rate in options.rates.split(",")),
        memory=tuple(int(size) for size in options.memory.split(",")),
        full_memory=tuple(int(size) for size in options.full_memory.split(",")),
        seed=options.seed,
    )
    if not set(settings.full_memory) <= set(settings.memory):
        raise SystemExit("--full-memory must be among --memory, to be compared with it")
    return settings


def command_of(options: argparse.Namespace) -> str:
    """What to type for the same figures; where files lie is left out."""
    values = vars(options)
    changed = [
        f"--{name} {values[name.replace('-', '_')]}"
        for name, _, default, _ in _options()
        if values[name.replace("-", "_")] != default
    ]
    return " ".join(["python -m research.paper_tables", *changed])


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    settings = settings_of(options)
    archives = {name: find_data(options.data, name) for name in NAMES}
    backbone = load_backbone(options.backbone)
    selections = {
        (table, name): select(listing, scale.classes, scale.train, scale.test, settings.seed)
        for name, listing in ((name, list_images(path)) for name, path in archives.items())
        for table, scale in settings.tables.items()
    }
    about = {"command": command_of(options), "machine": _machine()}
    results = begin(
        options.results, {**about, **describe(backbone, settings, archives, selections)}
    )
    stages = stages_of(settings, list(archives))
    _print_plan(stages, settings, results)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with closing(Trainer(backbone, settings, archives, selections)) as trainer:
        run_stages(stages, results, trainer, lambda: _save(options.results, results))
    write_whole(options.page, render(results).encode())
    print(f"written: {options.results} and {options.page}")


def describe(
    backbone: Backbone,
    settings: Settings,
    archives: Mapping[str, Path],
    selections: Mapping[tuple[str, str], Selection],
) -> dict[str, Any]:
    """What is measured on what: all of the results but the stages."""
    data = {
        name: {
            "sha256": digest(archive),
            "tables": {table: selections[table, name].counts() for table in settings.tables},
        }
        for name, archive in archives.items()
    }
    outputs = len(selections["a", "cifar100"].labels)
    return {
        "settings": asdict(settings),
        "backbone": about_backbone(backbone),
        "data": data,
        "costs": {"outputs": outputs, "rows": costs_of(backbone, settings, outputs)},
    }


def _print_plan(
    stages: Sequence[Stage],
    settings: Settings,
    results: Mapping[str, Any],
) -> None:
    data = results["data"]
    for name, about in data.items():
        for table, counts in about["tables"].items():
            sizes = ", ".join(f"{count:,} {what}" for what, count in counts.items())
            print(f"Table {table.upper()}, {NAMES[name]}: {sizes}")
    seconds = sum(
        planned_seconds(stage, settings, data[stage.data]["tables"][stage.table])
        for stage in stages
        if stage.name not in results["stages"]
    )
    print(f"{len(stages)} stages, about {seconds / 60:.0f} minutes for a ViT-Ti/16 on two cores")


def _save(path: Path, results: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(results, indent=1) + "\n").encode())


def _machine() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
    }


if __name__ == "__main__":
    main()
