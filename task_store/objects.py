"""Named objects in a folder, a bucket or memory: the few operations the store is built on.

Everything goes through obstore, except writing to a local folder. There object_store neither
syncs nor can be made to, so we stage, sync and link the file ourselves, under names that its
listings hide.

obstore's errors end here: callers see StoreUnavailable, None for what is not there, or False for
what is there already.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import LocalStore, MemoryStore, from_url

from task_store.errors import StoreUnavailable
from task_store.files import make_directories, write_whole
from task_store.layout import CLOCK, Place

if TYPE_CHECKING:
    from obstore.store import ObjectStore

REMOTE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
# Long enough for a hiccup, short enough that a publish fails while somebody is still watching.
DEFAULT_RETRY: Mapping[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}

# S3, Azure and Google all answer in this form when something is wrong.
_ANSWER = re.compile(
    r"status code: (?P<status>\d{3} [^:]+):.*?<Code>(?P<code>[^<]+)</Code>"
    r"\s*<Message>(?P<message>[^<\n]{1,300})",
    re.DOTALL,
)
_READERS = 16

# obstore runs one thread pool per process, which a fork copies without its threads: the child's
# first call would wait for ever. Remember who started it and refuse instead.
_pool_owner: int | None = None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as a listing shows it."""

    path: str
    size: int
    modified: datetime


class Objects:
    """Objects of any backend; safe to share between threads."""

    def __init__(self, store: "ObjectStore", url: str, *, remote: bool = True) -> None:
        self._store = store
        self.url = url
        # Whether other processes write here through a protocol that might ignore conditions.
        self.remote = remote

    def get(self, path: str) -> bytes | None:
        """The object's bytes, or None when there is no such object."""
        with self._outage("read", path), contextlib.suppress(FileNotFoundError):
            return bytes(obstore.get(self._store, path).bytes())
        return None

    def get_many(self, paths: Sequence[str]) -> list[bytes | None]:
        """The bytes of several objects, in order; a bucket is read in parallel."""
        if not self.remote or len(paths) < 4:
            return [self.get(path) for path in paths]
        with ThreadPoolExecutor(max_workers=_READERS) as pool:
            return list(pool.map(self.get, paths))

    def stat(self, path: str) -> ObjectInfo | None:
        """Size and age, or None when there is no such object."""
        with self._outage("read", path), contextlib.suppress(FileNotFoundError):
            meta = obstore.head(self._store, path)
            return ObjectInfo(path, meta["size"], meta["last_modified"])
        return None

    def listing(self, prefix: str, *, after: str | None = None) -> list[ObjectInfo]:
        """Objects under a folder whose path sorts after `after`, in order."""
        with self._outage("list", prefix or "the store"):
            metas = obstore.list(self._store, prefix or None, offset=after).collect()
        infos = (ObjectInfo(m["path"], m["size"], m["last_modified"]) for m in metas)
        # Some servers pass over where to begin: Azurite always lists from the start.
        later = (info for info in infos if after is None or info.path > after)
        return sorted(later, key=lambda info: info.path)

    def named(self, place: Place, *, after: str | None = None) -> dict[str, ObjectInfo]:
        """Objects of one kind by name, in order; what else lies in their folder is passed over."""
        infos = ((place.name_at(o.path), o) for o in self.listing(place.folder, after=after))
        return {name: info for name, info in infos if name}

    def create(self, path: str, data: bytes) -> bool:
        """Write unless something is there; False when something is."""
        with self._outage("write", path):
            try:
                obstore.put(self._store, path, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                # Both say so: Azure answers 409 or 412, and what obstore makes of 412 has changed.
                return False
        return True

    def put(self, path: str, data: bytes) -> None:
        """Write, replacing what is there."""
        with self._outage("write", path):
            obstore.put(self._store, path, data)

    def delete(self, path: str) -> None:
        """Remove; it is fine when nothing is there."""
        with self._outage("delete", path), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._store, path)

    def now(self) -> datetime:
        """The time by the store's own clock, as it dates what is written now."""
        path = CLOCK.path(secrets.token_hex(16))
        self.put(path, b"{}\n")
        info = self.stat(path)
        self.delete(path)
        if info is None:
            raise StoreUnavailable(f"The task store {self.url} lost '{path}' at once: try again.")
        return info.modified

    def staged(self) -> Sequence[ObjectInfo]:
        """Files that writers had begun; object stores keep such things to themselves."""
        return ()

    @contextlib.contextmanager
    def _outage(self, action: str, path: str) -> Iterator[None]:
        _refuse_after_fork()
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            raise self._unavailable(action, path, error) from error

    def _unavailable(self, action: str, path: str, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(
            f"The task store {self.url} could not {action} '{path}': {_cause(error)}.", names=[path]
        )


class LocalObjects(Objects):
    """A folder, where a write that returned survives power loss."""

    def __init__(self, root: Path, *, create: bool) -> None:
        # Set first: a folder that cannot be made is reported with it.
        self.url = str(root)
        try:
            if create:
                make_directories(root)
            elif not root.is_dir():
                raise StoreUnavailable(f"There is no task store at '{root}'.", names=[str(root)])
            store = LocalStore(root)
        except (BaseError, OSError) as error:
            raise self._unavailable("open", str(root), error) from error
        super().__init__(store, str(root), remote=False)
        self._root = root

    def create(self, path: str, data: bytes) -> bool:
        with self._outage("write", path):
            return not os.path.lexists(self._root / path) and self._write(path, data, replace=False)

    def put(self, path: str, data: bytes) -> None:
        with self._outage("write", path):
            self._write(path, data, replace=True)

    def staged(self) -> list[ObjectInfo]:
        infos: list[ObjectInfo] = []
        with self._outage("list", "staged files"):
            for folder, _, files in os.walk(self._root):
                for name in files:
                    if re.fullmatch(r".+#\d+", name):
                        # Its writer may finish while we look.
                        with contextlib.suppress(FileNotFoundError):
                            infos.append(self._info(Path(folder) / name))
        return sorted(infos, key=lambda info: info.path)

    def delete(self, path: str) -> None:
        # Not with obstore, which hides staged files from us here too.
        with self._outage("delete", path), contextlib.suppress(FileNotFoundError):
            os.unlink(self._root / path)

    def _info(self, path: Path) -> ObjectInfo:
        status = path.stat()
        modified = datetime.fromtimestamp(status.st_mtime, UTC)
        return ObjectInfo(path.relative_to(self._root).as_posix(), status.st_size, modified)

    def _write(self, path: str, data: bytes, *, replace: bool) -> bool:
        target = self._root / path
        if not self._root.is_dir():
            # Not begun anew while a disk is not mounted: it would hide what is written meanwhile.
            raise FileNotFoundError("its folder is not there")
        make_directories(target.parent)
        # As object_store names a file while it is written.
        staged = target.with_name(f"{target.name}#{secrets.randbelow(10**18)}")
        return write_whole(target, data, staged=staged, replace=replace)


def open_objects(
    location: str | Path,
    *,
    create: bool,
    config: Mapping[str, Any] | None,
    client_options: Mapping[str, Any] | None,
    retry_config: Mapping[str, Any] | None,
) -> Objects:
    """The objects at a folder or URL, or StoreUnavailable."""
    text = str(location)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if isinstance(location, Path) or not scheme:
        return LocalObjects(Path(location).absolute(), create=create)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise StoreUnavailable(
                f"'{text}' is no absolute file URL: write file:///absolute/folder.", names=[text]
            )
        return LocalObjects(Path(unquote(parts.path)), create=create)
    if scheme == "memory":
        return Objects(MemoryStore(), text, remote=False)
    if scheme not in REMOTE_SCHEMES:
        known = ", ".join(f"{name}://" for name in ("file", "memory", *REMOTE_SCHEMES))
        raise StoreUnavailable(
            f"'{scheme}://' is no kind of task store: use a folder or {known}.", names=[text]
        )
    options: dict[str, Any] = {"config": config, "client_options": client_options}
    options["retry_config"] = retry_config or DEFAULT_RETRY
    try:
        return Objects(from_url(text, **options), text)
    except (BaseError, ValueError, TypeError) as error:
        raise StoreUnavailable(
            f"The task store {text} cannot be opened: {_cause(error)}.", names=[text]
        ) from error


def _cause(error: Exception) -> str:
    """What went wrong, without the pages that obstore appends for its developers."""
    text = str(error).strip()
    if answer := _ANSWER.search(text):
        status, code = answer["status"], answer["code"]
        if status.startswith(("401", "403")):
            return f"{status}, {code}: check the credentials and what they permit"
        return f"{answer['message'].rstrip('. ')} ({status}, {code})"
    if "BadScheme" in text:
        return "plain http is not allowed: use https, or set AWS_ALLOW_HTTP or AZURE_ALLOW_HTTP"
    lines = text.splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".:")


def _refuse_after_fork() -> None:
    global _pool_owner
    if _pool_owner is None:
        _pool_owner = os.getpid()
    elif _pool_owner != os.getpid():
        raise StoreUnavailable(
            "The task store was used before this process was forked, and its threads did not come "
            "along: start the process with 'spawn', or fork before the store is first used."
        )
