"""`engram search`: photos that look alike, by the embeddings that `engram batch --keep` wrote."""

import csv
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer
from engram_vit.commands.options import AsJson, AsTable
from engram_vit.commands.output import wants_json, write_json, write_list
from engram_vit.errors import UsageError

from engram_server.app import engine_config
from engram_server.batch import tables
from engram_server.batch.decoding import Decoder
from engram_server.batch.images import Photos
from engram_server.batch.passing import DevicePass
from engram_server.batch.sources import open_source
from engram_server.commands.options import BackboneOption, resolve_source
from engram_server.engine.engine import device_named, place_backbone
from engram_server.engine.types import EngineConfig
from engram_server.errors import UnreadableImage
from engram_server.model import Backbone, load_backbone
from engram_server.parts.kept import KeptFolder
from engram_server.parts.search import (
    Floats,
    Match,
    embeddings,
    near_duplicates,
    nearest,
    unit_rows,
)
from engram_server.settings import load_settings

DUPLICATE_SIMILARITY = 0.95
_BATCH = 16  # photos of --like in one pass
COLUMNS = ("path", "similarity", "like")

KeptArgument = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder written by engram batch --keep.")
]
Like = Annotated[
    list[str] | None,
    typer.Option("--like", metavar="PHOTO|DIR", help="Find photos like this one; repeatable."),
]
Labelled = Annotated[
    Path | None,
    typer.Option(
        "--labelled",
        metavar="TABLE",
        help="Leave out the photos of a .csv, .jsonl or .parquet table. Without --like, find "
        "photos like those in it.",
    ),
]
Duplicates = Annotated[
    bool, typer.Option("--duplicates", help="Find pairs of photos that are nearly the same.")
]
Top = Annotated[int, typer.Option("--top", min=1, metavar="N", help="Number of results.")]
Least = Annotated[
    float | None,
    typer.Option(
        "--min-similarity",
        min=-1,
        max=1,
        help=f"Lowest cosine (default: none; {DUPLICATE_SIMILARITY} with --duplicates).",
    ),
]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]


class Found(NamedTuple):
    path: str
    similarity: float
    like: str  # the photo that it resembles


def search(
    kept: KeptArgument,
    like: Like = None,
    labelled: Labelled = None,
    duplicates: Duplicates = False,
    top: Top = 20,
    least: Least = None,
    backbone: BackboneOption = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    as_table: AsTable = False,
) -> None:
    """Find photos that look alike in a corpus, by their kept embeddings.

    The comparison is exact: the cosine of every photo's embedding with those of `--like`.
    `--labelled` finds photos that are like the labelled ones and not labelled yet. Photos of the
    corpus are not read.
    """
    if as_csv and (as_json or as_table):
        raise UsageError("--csv cannot be combined with --json or --table.")
    if duplicates and (like or labelled):
        raise UsageError("--duplicates cannot be combined with --like or --labelled.")
    folder = KeptFolder.open(kept)
    if duplicates:
        pairs = near_duplicates(folder, top, DUPLICATE_SIMILARITY if least is None else least)
        found = [_found(folder, pair, folder.image(pair.other)["path"]) for pair in pairs]
    elif like or labelled:
        found = _search(
            folder, like or (), labelled, top, -1.0 if least is None else least, backbone
        )
    else:
        raise UsageError("Nothing to search for. Pass --like, --labelled or --duplicates.")
    _write(found, as_csv=as_csv, in_json=not as_csv and wants_json(as_json, as_table))


def _embed_photos(
    kept: KeptFolder,
    names: Sequence[str],
    open_backbone: Callable[[], Backbone],
    config: EngineConfig,
) -> tuple[list[str], Floats]:
    """Return the paths and embeddings (n, D) of photos, folders or other sources.

    Raises UnreadableImage if a photo cannot be read: the search would go on without it.
    """
    sources = [open_source(name, None, ()) for name in names]
    device = device_named(config.devices[0])
    backbone = place_backbone(open_backbone(), config)[device]
    kept.check_backbone(backbone)
    run = DevicePass(backbone, config, features=False, keep="embeddings")
    decoder, rows = Decoder(backbone.preprocessing, config), []
    for source in sources:
        photos = Photos(source, decoder)
        for start in range(0, len(source), _BATCH):
            batch = photos.load(range(start, min(start + _BATCH, len(source))))
            if bad := next((image for image in batch.images if image.error is not None), None):
                raise UnreadableImage(f"'{bad.path}': {bad.error}")
            tensors = run([], batch.inputs).kept
            assert tensors is not None
            rows.append(tensors["readouts"][:, : backbone.width].astype(np.float32))
    paths = [key for source in sources for key in source.keys]
    return paths, unit_rows(np.concatenate(rows))


def _search(
    folder: KeptFolder,
    like: Sequence[str],
    labelled: Path | None,
    top: int,
    least: float,
    backbone: str | None,
) -> list[Found]:
    known = [] if labelled is None else _labelled(folder, labelled)
    if like:
        source = None if backbone is None else resolve_source(backbone)
        settings = load_settings(backbone=source)
        load = partial(load_backbone, settings.backbone, image_size=settings.image_size)
        names, queries = _embed_photos(folder, like, load, engine_config(settings))
    else:
        names = [folder.image(index)["path"] for index in known]
        queries = embeddings(folder, known)
    matches = nearest(folder, queries, top, exclude=known, least=least)
    return [_found(folder, match, names[match.other]) for match in matches]


def _labelled(folder: KeptFolder, table: Path) -> list[int]:
    """The indices of the images in a table."""
    names = tables.read_table(table, None).keys
    found = [folder.find(name, table.parent) for name in names]
    known = sorted({index for index in found if index is not None})
    if not known:
        raise UsageError(
            f"No path of '{table}' is in '{folder.name}'. A path is as in the folder's "
            f"part-*.csv files, or relative to its source or to the table."
        )
    if missing := found.count(None):
        typer.echo(f"{missing} of {len(names)} paths of '{table}' are not in the folder.", err=True)
    return known


def _found(folder: KeptFolder, match: Match, like: str) -> Found:
    return Found(folder.image(match.image)["path"], round(match.similarity, 4), like)


def _write(found: Sequence[Found], *, as_csv: bool, in_json: bool) -> None:
    if as_csv:
        table = csv.writer(sys.stdout, lineterminator="\n")
        table.writerows([COLUMNS, *found])
    elif in_json:
        write_json([one._asdict() for one in found])
    else:
        write_list(found, False, " ".join(COLUMNS), lambda one: one)
