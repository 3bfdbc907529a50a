"""What a run is made of: its options, its source, and the model with its tasks."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engram_server.batch.decoding import Decoder
from engram_server.batch.images import Images, KeptImages, Photos
from engram_server.batch.passing import DevicePass
from engram_server.batch.rows import THRESHOLD, TaskColumns
from engram_server.batch.rows import Output as OutputKind
from engram_server.batch.sources import Source, open_source
from engram_server.batch.tasks import ChosenTasks, TaskBinder
from engram_server.engine.engine import device_named, place_backbone
from engram_server.engine.types import EngineConfig
from engram_server.errors import SettingsError, TaskMismatch
from engram_server.model.backbone import Backbone
from engram_server.parts.kept import LEVELS, KeptFolder, Level, is_kept, needed_level
from engram_server.parts.output import Format

PART_IMAGES = 5000
PART_CONTEXTS = 500  # images of a part with kept contexts, which are large
_KEPT_BATCH = 512  # images of a batch without task rows and without base rows


@dataclass(frozen=True, slots=True)
class Keep:
    level: Level
    folder: Path


@dataclass(frozen=True, slots=True)
class RayCluster:
    address: str  # as `ray.init` takes it; `local` starts a cluster on this machine
    actors: int | None = None  # that run passes; None: one per GPU, or half of the CPUs


@dataclass(frozen=True, slots=True)
class BatchOptions:
    source: str
    out: Path | None = None  # None: only keep
    tasks: Sequence[str] = ()  # references to tasks of the store
    bundles: Sequence[Path] = ()
    column: str | None = None
    file_format: Format = "parquet"
    output: OutputKind = "scores"
    threshold: float = THRESHOLD
    part_images: int | None = None
    keep: Keep | None = None
    ray: RayCluster | None = None  # None: on the devices of this machine
    restart: bool = False

    def __post_init__(self) -> None:
        if self.out is not None and not (self.tasks or self.bundles):
            raise SettingsError("No task. Pass --tasks, --bundle or both.")
        if self.out is None and (self.tasks or self.bundles or self.keep is None):
            raise SettingsError("No folder for the rows. Pass --out.")
        if self.keep is not None and self.keep.folder == self.out:
            raise SettingsError(f"--out and --keep are both '{self.out}'. Use two folders.")

    @property
    def images_per_part(self) -> int:
        contexts = self.keep is not None and self.keep.level == "contexts"
        return self.part_images or (PART_CONTEXTS if contexts else PART_IMAGES)


@dataclass(frozen=True, slots=True)
class Model:
    """The backbone and the tasks, ready to run on every device."""

    backbone: Backbone
    passes: Sequence[DevicePass]
    tasks: Sequence[TaskColumns]


def load_model(
    options: BatchOptions, config: EngineConfig, backbone: Backbone, chosen: ChosenTasks
) -> Model:
    """Bind the tasks to the backbone, and replay their golden examples."""
    backbones = place_backbone(backbone, config)
    names = [device_named(name) for name in config.devices]
    keep = None if options.keep is None else options.keep.level
    features = options.output == "embedding"
    passes = [DevicePass(backbones[name], config, features=features, keep=keep) for name in names]
    binder = TaskBinder(backbones, dict(zip(names, passes, strict=True)), chosen.parents)
    tasks = [
        TaskColumns(task.reference, binder.bind(task), options.output, options.threshold)
        for task in chosen.tasks
    ]
    return Model(backbones[names[0]], passes, tasks)


def open_corpus(options: BatchOptions, lines: Iterable[str]) -> Source | KeptFolder:
    """List the images of the source, or open what was kept of them."""
    folder = Path(options.source).expanduser()
    if not is_kept(folder):
        return open_source(options.source, options.column, lines)
    if options.keep is not None:
        raise SettingsError(f"'{folder}' has kept tensors already. Pass the photos to --keep them.")
    return KeptFolder.open(folder)


def open_images(source: Source | KeptFolder, backbone: Backbone, config: EngineConfig) -> Images:
    if isinstance(source, KeptFolder):
        return KeptImages(source, backbone.dtype)
    return Photos(source, Decoder(backbone.preprocessing, config))


def check_kept(kept: KeptFolder, model: Model) -> None:
    """Raise TaskMismatch if the backbone is another, or if a task needs more than is kept."""
    kept.check_backbone(model.backbone)
    needed = {task.reference: _needed_level(task) for task in model.tasks}
    lacking = {
        reference: level
        for reference, level in needed.items()
        if LEVELS.index(level) > LEVELS.index(kept.level)
    }
    if lacking:
        listed = ", ".join(f"'{reference}' needs {level}" for reference, level in lacking.items())
        most = max(lacking.values(), key=LEVELS.index)
        raise TaskMismatch(
            f"'{kept.name}' has {kept.level}, but {listed}. Run these tasks over the photos, and "
            f"keep {most} for the next ones: engram batch PHOTOS --keep {most} DIR."
        )


def _needed_level(task: TaskColumns) -> Level:
    return needed_level(next(iter(task.task.on.values())))


def batch_images(source: Source | KeptFolder, model: Model, config: EngineConfig) -> int:
    if isinstance(source, KeptFolder) and source.level != "contexts":
        return _KEPT_BATCH
    rows = sum(task.task.rows for task in model.tasks)
    return max(1, config.budget_rows // (model.backbone.geometry.tokens + rows))
