"""`engram teach --kept`: a taught bundle from what `engram batch --keep` kept, without photos.

The command itself is the client's; it finds this function by its entry point.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

from engram_bundle import TaskBundle
from engram_bundle.media import Media
from engram_bundle.schema import LabelledTaskType
from engram_vit.errors import UsageError

from engram_server.app import engine_config
from engram_server.engine.engine import device_named, place_backbone
from engram_server.engine.taught_bundle import examples_of, is_taught, taught_bundle, text_of
from engram_server.engine.teaching import ExampleUpdate
from engram_server.errors import UnteachableExamples
from engram_server.model import Backbone, load_backbone
from engram_server.model.heads.examples import Example
from engram_server.parts.kept import KeptFolder
from engram_server.settings import load_settings


def teach_kept(
    folder: str,
    table: str,
    name: str,
    *,
    task_type: LabelledTaskType | None = None,
    description: str | None = None,
    names: bool = True,
    before: bytes | None = None,
) -> bytes:
    """Return the bundle of a task with the examples of a table, added to those of `before`."""
    kept = KeptFolder.open(Path(folder))
    if kept.level == "embeddings":
        raise UnteachableExamples(
            f"'{folder}' has embeddings, but taught tasks read summaries. Keep summaries or "
            f"contexts: engram batch PHOTOS --keep summaries DIR."
        )
    settings = load_settings()
    config = engine_config(settings)
    loaded = load_backbone(settings.backbone, image_size=settings.image_size)
    backbone = place_backbone(loaded, config)[device_named(config.devices[0])]
    kept.check_backbone(backbone)
    earlier = None if before is None else TaskBundle.from_bytes(before)
    if earlier is not None and not is_taught(earlier):
        raise UnteachableExamples(
            f"Task '{name}' is trained, and examples cannot be added to it. Choose another --name."
        )
    added = list(_examples(kept, Path(table), backbone, names=names))
    update = ExampleUpdate(name, added, task_type=task_type)
    text = None if earlier is None else text_of(earlier)
    examples = update.apply(None if earlier is None else examples_of(earlier))
    if description is None:
        description = "" if earlier is None else earlier.manifest.description
    bundle, _ = taught_bundle(examples, backbone, name=name, text=text, description=description)
    return bundle.to_bytes()


def _examples(
    kept: KeptFolder, table: Path, backbone: Backbone, *, names: bool
) -> Iterator[Example]:
    """Read `path,label`, with further labels after a semicolon. Names the first bad line."""
    for line, path, labels in _labels(table):
        place = kept.find(path, table.parent)
        image = None if place is None else kept.image(place)
        if place is None or image is None or image["error"] is not None:
            reason = f"not in '{kept.name}'" if image is None else str(image["error"])
            raise UsageError(f"Line {line} of '{table}', '{path}': {reason}. Remove the line.")
        features = backbone.features_of(kept.readouts([place])[0])
        media = Media(Path(path).name) if names else Media()
        digest = bytes.fromhex(image["digest"].removeprefix("sha256:"))
        yield Example(digest, features, labels, media)


def _labels(table: Path) -> Iterator[tuple[int, str, frozenset[str]]]:
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if not {"path", "label"} <= set(rows.fieldnames or ()):
                raise UsageError(f"'{table}' has no columns 'path' and 'label'.")
            for row in rows:
                labels = (label.strip() for label in (row["label"] or "").split(";"))
                yield rows.line_num, row["path"] or "", frozenset(filter(None, labels))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"Cannot read '{table}' as CSV: {error}.") from error
