"""Where the images of a batch run come from.

| source | keys |
|---|---|
| folder, `file://` URL | paths of the images below it, without hidden files |
| glob pattern | paths of the files that match; if all are tar files, their images |
| `s3://`, `gs://` or `az://` prefix | URLs of the images below it |
| `.csv`, `.jsonl` or `.parquet` file | paths or URLs in a column; or rows, if it has bytes |
| `.tar` file | names of the images in it |
| any other file | that image |
| `-` | paths or URLs, one per line of standard input |
"""

import glob
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from engram_store.objects import DEFAULT_RETRY, REMOTE_SCHEMES, describe_error
from engram_vit.images import is_photo_name, walk
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from engram_server.batch import tables, tars
from engram_server.errors import UnreadableSource

STDIN = "-"


@dataclass(frozen=True, slots=True)
class Source:
    """Images by index. `read` may be called from any thread.

    `read` raises OSError if one image cannot be read, and UnreadableSource if none can.
    """

    name: str
    keys: Sequence[str]
    read: Callable[[int], bytes]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def digest(self) -> str:
        """A hash of all keys in order."""
        listing = hashlib.sha256()
        for key in self.keys:
            listing.update(key.encode("utf-8", "surrogateescape") + b"\0")
        return f"sha256:{listing.hexdigest()}"


def open_source(name: str, column: str | None, lines: Iterable[str]) -> Source:
    """List the images of a source; `lines` are those of standard input. Raises UnreadableSource."""
    source = _open(name, column, lines)
    if not len(source):
        raise UnreadableSource(f"No images found in '{name}'.")
    return source


def _open(name: str, column: str | None, lines: Iterable[str]) -> Source:
    if name == STDIN:
        return _listed(name, [line for line in map(str.strip, lines) if line], Path())
    scheme, separator, _ = name.partition("://")
    if separator and scheme == "file":
        name = unquote(urlsplit(name).path)
    elif separator:
        return _prefix(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return _folder(name, path)
    if not path.exists():
        return _matches(name, path)
    if path.name.endswith(tars.SUFFIXES):
        return Source(name, *tars.read_tars([path]))
    if path.suffix in tables.SUFFIXES:
        table = tables.read_table(path, column)
        if table.read is not None:
            return Source(name, table.keys, table.read)
        return _listed(name, table.keys, path.parent)
    return _listed(name, [str(path)], Path())


def _folder(name: str, folder: Path) -> Source:
    keys = list(walk(str(folder)))

    def read(index: int) -> bytes:
        try:
            return Path(keys[index]).read_bytes()
        except FileNotFoundError:
            if not folder.is_dir():
                raise UnreadableSource(f"The folder '{name}' does not exist any more.") from None
            raise

    return Source(name, keys, read)


def _matches(name: str, path: Path) -> Source:
    if not glob.has_magic(name):
        raise UnreadableSource(f"'{name}' does not exist. Pass a folder, a file, a glob or a URL.")
    found = sorted(glob.glob(str(path), recursive=True))
    files = [each for each in found if Path(each).is_file()]
    if files and all(each.endswith(tars.SUFFIXES) for each in files):
        return Source(name, *tars.read_tars([Path(each) for each in files]))
    return _listed(name, files, Path())


def _listed(name: str, keys: Sequence[str], folder: Path) -> Source:
    """Paths, relative ones below `folder`, or URLs."""
    buckets = Buckets()

    def read(index: int) -> bytes:
        key = keys[index]
        if not key:
            raise OSError("the path is empty")
        return buckets.read(key) if "://" in key else (folder / key).read_bytes()

    return Source(name, keys, read)


def _prefix(url: str) -> Source:
    buckets = Buckets()
    keys = [key for key in buckets.listing(url) if is_photo_name(key)]
    return Source(url, keys, lambda index: buckets.read(keys[index]))


class Buckets:
    """Objects by URL, in any bucket. Credentials come from the environment, as for a task store."""

    def __init__(self) -> None:
        self._stores: dict[str, ObjectStore] = {}

    def listing(self, url: str) -> list[str]:
        """Return the URLs of all objects below a prefix, in order."""
        bucket, path = _split(url)
        store = self._store(bucket)
        try:
            chunks = obstore.list(store, path.strip("/") or None, chunk_size=1000)
            return sorted(f"{bucket}/{one['path']}" for chunk in chunks for one in chunk)
        except (BaseError, OSError, ValueError) as error:
            raise UnreadableSource(f"Cannot list '{url}': {describe_error(error)}.") from error

    def read(self, url: str) -> bytes:
        bucket, path = _split(url)
        store = self._store(bucket)
        try:
            return bytes(obstore.get(store, path).bytes())
        except FileNotFoundError:
            raise
        except (BaseError, OSError, ValueError) as error:
            raise UnreadableSource(f"Cannot read '{url}': {describe_error(error)}.") from error

    def _store(self, bucket: str) -> ObjectStore:
        store = self._stores.get(bucket)
        if store is not None:
            return store
        scheme = bucket.partition("://")[0]
        if scheme not in REMOTE_SCHEMES:
            known = ", ".join(f"{each}://" for each in ("file", *REMOTE_SCHEMES))
            raise UnreadableSource(
                f"Unknown scheme '{scheme}://' of '{bucket}'. Use a path or {known}."
            )
        try:
            options: dict[str, Any] = {"retry_config": DEFAULT_RETRY}
            store = from_url(bucket, **options)
        except (BaseError, ValueError, TypeError) as error:
            raise UnreadableSource(f"Cannot open '{bucket}': {describe_error(error)}.") from error
        return self._stores.setdefault(bucket, store)


def _split(url: str) -> tuple[str, str]:
    """Split a URL into its bucket and the path in it. Object names may contain `?` and `#`."""
    scheme, _, rest = url.partition("://")
    bucket, _, path = rest.partition("/")
    return f"{scheme}://{bucket}", path
