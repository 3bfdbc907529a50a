"""Set up and run a batch: source, tasks, output and pipeline."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_store import TaskStore

from engram_server.batch.decoding import Decoder
from engram_server.batch.output import Format, Output, read_manifest
from engram_server.batch.passing import DevicePass
from engram_server.batch.pipeline import Predictor, Progress, run_parts
from engram_server.batch.rows import THRESHOLD, TaskColumns, all_columns
from engram_server.batch.rows import Output as OutputKind
from engram_server.batch.sources import Source, open_source
from engram_server.batch.summary import Summary
from engram_server.batch.tasks import ChosenTask, TaskBinder, choose_tasks, keep_references
from engram_server.engine.engine import device_named, place_backbone
from engram_server.engine.types import EngineConfig, short_name
from engram_server.model.backbone import Backbone

PART_IMAGES = 5000


@dataclass(frozen=True, slots=True)
class BatchOptions:
    source: str
    out: Path
    tasks: Sequence[str] = ()  # references to tasks of the store
    bundles: Sequence[Path] = ()
    column: str | None = None
    file_format: Format = "parquet"
    output: OutputKind = "scores"
    threshold: float = THRESHOLD
    part_images: int = PART_IMAGES
    restart: bool = False


def run_batch(
    options: BatchOptions,
    config: EngineConfig,
    open_backbone: Callable[[], Backbone],
    store: TaskStore | None,
    lines: Iterable[str] = (),
    progress: Progress | None = None,
) -> Summary:
    """Predict all images of a source and write the rows. Continues a run that was stopped.

    `store` may be None if no task is from a store; `lines` are those of standard input.
    """
    chosen = choose_tasks(options.tasks, store, options.bundles)
    earlier = None if options.restart else read_manifest(options.out)
    named = keep_references(chosen.tasks, (earlier or {}).get("tasks", {}))
    source = open_source(options.source, options.column, lines)
    # The slow part last: a wrong name fails before it.
    backbones = place_backbone(open_backbone(), config)
    names = [device_named(name) for name in config.devices]
    features = options.output == "embedding"
    passes = [DevicePass(backbones[name], config, features=features) for name in names]
    binder = TaskBinder(backbones, dict(zip(names, passes, strict=True)), chosen.parents)
    tasks = [
        TaskColumns(task.reference, binder.bind(task), options.output, options.threshold)
        for task in named
    ]
    backbone = backbones[names[0]]
    columns = all_columns(tasks)
    output = Output(options.out, options.file_format, columns)
    manifest = _manifest(options, config, source, named, backbone)
    manifest["columns"] = [column.name for column in columns]
    summary = Summary(tasks)
    rows = sum(task.task.rows for task in tasks)
    with closing(output):
        output.open(manifest, restart=options.restart)
        run_parts(
            source,
            Decoder(backbone.preprocessing, config),
            Predictor(passes, tasks),
            output,
            summary,
            part_images=options.part_images,
            batch_images=max(1, config.budget_rows // (backbone.geometry.tokens + rows)),
            devices=len(passes),
            threads=config.decode_threads,
            progress=progress or Progress(),
        )
    return summary


def _manifest(
    options: BatchOptions,
    config: EngineConfig,
    source: Source,
    tasks: Sequence[ChosenTask],
    backbone: Backbone,
) -> dict[str, Any]:
    """What determines the rows. A run is continued only if all of it is the same."""
    return {
        "source": {
            "name": source.name,
            "column": options.column,
            "images": len(source),
            "listing": source.digest,
        },
        "tasks": {
            task.reference: {
                "task": task.name,
                "version": task.version,
                "digest": None if task.bundle is None else task.bundle.digest,
            }
            for task in tasks
        },
        "backbone": {
            "name": short_name(backbone.name),
            "fingerprint": backbone.fingerprint,
            "precision": backbone.precision,
            "image_size": list(backbone.image_size),
        },
        "options": {
            "format": options.file_format,
            "output": options.output,
            "threshold": options.threshold,
            "part_images": options.part_images,
            "max_pixels": config.max_pixels,
            "decoded_bytes": config.decoded_bytes,
        },
    }
