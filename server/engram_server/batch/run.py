"""Set up and run a batch: source, tasks, output and pipeline."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from engram_store import TaskStore

from engram_server.batch.pipeline import (
    Answerer,
    Destination,
    LocalAnswerer,
    Predictor,
    Progress,
    run_parts,
)
from engram_server.batch.ray_data import Job, RayAnswerer
from engram_server.batch.rows import all_columns
from engram_server.batch.setup import (
    BatchOptions,
    Model,
    batch_images,
    check_kept,
    load_model,
    open_corpus,
    open_images,
)
from engram_server.batch.sources import Source
from engram_server.batch.summary import Summary
from engram_server.batch.tasks import ChosenTask, choose_tasks, keep_references
from engram_server.engine.types import EngineConfig, short_name
from engram_server.model.backbone import Backbone
from engram_server.parts.keeping import KeptWriter
from engram_server.parts.kept import KeptFolder, kept_facts, tensor_shapes
from engram_server.parts.output import Json, Output, read_manifest


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
    earlier = read_manifest(options.out) if options.out and not options.restart else None
    chosen = keep_references(chosen, (earlier or {}).get("tasks", {}))
    source = open_corpus(options, lines := list(lines))
    placed = config if options.ray is None else replace(config, devices=("cpu",))
    # The slow part last: a wrong name fails before it.
    backbone = open_backbone()
    model = load_model(options, placed, backbone, chosen)
    if isinstance(source, KeptFolder):
        check_kept(source, model)
    answerer: Answerer
    if options.ray is None:
        answerer = LocalAnswerer(
            open_images(source, model.backbone, config),
            Predictor(model.passes, model.tasks),
            devices=len(model.passes),
            threads=config.decode_threads,
        )
    else:
        answerer = RayAnswerer(Job(options, config, backbone, chosen, lines, source.digest))
    summary = Summary(model.tasks)
    with ExitStack() as files:
        run_parts(
            len(source),
            answerer,
            _open_destination(options, config, source, chosen.tasks, model, files),
            summary,
            part_images=options.images_per_part,
            batch_images=batch_images(source, model, config),
            progress=progress or Progress(),
        )
    return summary


def _open_destination(
    options: BatchOptions,
    config: EngineConfig,
    source: Source | KeptFolder,
    tasks: Sequence[ChosenTask],
    model: Model,
    files: ExitStack,
) -> Destination:
    """Open all folders that the run writes to, and close them with `files`."""
    images = _image_facts(options, config, source)
    output = keeper = None
    if options.out is not None:
        columns = all_columns(model.tasks)
        output = files.enter_context(closing(Output(options.out, options.file_format, columns)))
        manifest = _manifest(options, images, tasks, model.backbone)
        manifest["columns"] = [column.name for column in columns]
        output.open(manifest, restart=options.restart)
    if options.keep is not None:
        folder, level = options.keep.folder, options.keep.level
        keeper = files.enter_context(closing(KeptWriter(folder, level, model.backbone)))
        shapes = tensor_shapes(model.backbone, level)
        kept = {
            "level": level,
            "part_images": options.images_per_part,
            "embedding_width": model.backbone.width,
            "tensors": {name: list(size) for name, size in shapes.items()},
        }
        facts = {"name": short_name(model.backbone.name), **kept_facts(model.backbone)}
        keeper.open({**images, "backbone": facts, "kept": kept}, restart=options.restart)
    return Destination(output, keeper)


def _image_facts(options: BatchOptions, config: EngineConfig, source: Source | KeptFolder) -> Json:
    """What determines the images of a run."""
    return {
        "source": {
            "name": source.name,
            "column": options.column,
            "images": len(source),
            "listing": source.digest,
        },
        "limits": {"max_pixels": config.max_pixels, "decoded_bytes": config.decoded_bytes},
    }


def _manifest(
    options: BatchOptions, images: Json, tasks: Sequence[ChosenTask], backbone: Backbone
) -> dict[str, Any]:
    """What determines the rows. A run is continued only if all of it is the same."""
    return {
        **images,
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
            "part_images": options.images_per_part,
        },
    }
