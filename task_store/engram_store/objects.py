"""Named objects in a folder, a bucket or memory: the operations that the store is built on.

Everything goes through obstore, except writes to a local folder: obstore does not sync files, so
this module stages, syncs and links them, under names that obstore's listings hide.

obstore's errors end here. Callers see StoreUnavailable, None for a missing object, or False for an
existing one.
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
from engram_bundle.files import make_directories, write_whole
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import LocalStore, MemoryStore, from_url

from engram_store.errors import StoreUnavailable
from engram_store.layout import CLOCK, ObjectKind

if TYPE_CHECKING:
    from obstore.store import ObjectStore

REMOTE_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
# Long enough for a short outage, short enough that a publish fails while its user waits.
DEFAULT_RETRY: Mapping[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}

# The form of error responses of S3, Azure and Google.
_ERROR_RESPONSE = re.compile(
    r"status code: (?P<status>\d{3} [^:]+):.*?<Code>(?P<code>[^<]+)</Code>"
    r"\s*<Message>(?P<message>[^<\n]{1,300})",
    re.DOTALL,
)
_READERS = 16

# obstore runs one thread pool per process. A fork copies it without its threads, so the child's
# first call would never return. Remember the process that started the pool, and reject others.
_pool_owner: int | None = None


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    path: str
    size: int
    modified: datetime


class Objects:
    """The objects of a backend; safe to share between threads."""

    def __init__(self, store: "ObjectStore", url: str, *, remote: bool = True) -> None:
        self.backend = store
        self.url = url
        # A remote backend is read in parallel, and may ignore conditional writes.
        self.remote = remote

    def get(self, path: str) -> bytes | None:
        """Return an object's bytes, or None if there is no such object."""
        with self._convert_errors("read", path), contextlib.suppress(FileNotFoundError):
            return bytes(obstore.get(self.backend, path).bytes())
        return None

    def get_many(self, paths: Sequence[str]) -> list[bytes | None]:
        if not self.remote or len(paths) < 4:
            return [self.get(path) for path in paths]
        with ThreadPoolExecutor(max_workers=_READERS) as pool:
            return list(pool.map(self.get, paths))

    def stat(self, path: str) -> ObjectInfo | None:
        """Return size and modification time, or None if there is no such object."""
        with self._convert_errors("read", path), contextlib.suppress(FileNotFoundError):
            meta = obstore.head(self.backend, path)
            return ObjectInfo(path, meta["size"], meta["last_modified"])
        return None

    def listing(self, prefix: str, *, after: str | None = None) -> list[ObjectInfo]:
        """List objects under a prefix whose path sorts after `after`, in order."""
        with self._convert_errors("list", prefix or "the store"):
            metas = obstore.list(self.backend, prefix or None, offset=after).collect()
        infos = (ObjectInfo(m["path"], m["size"], m["last_modified"]) for m in metas)
        # Some servers ignore the offset: Azurite always lists from the start.
        later = (info for info in infos if after is None or info.path > after)
        return sorted(later, key=lambda info: info.path)

    def named(self, kind: ObjectKind, *, after: str | None = None) -> dict[str, ObjectInfo]:
        """List objects of one kind by name, in order, without foreign objects in their folder."""
        infos = ((kind.name_at(o.path), o) for o in self.listing(kind.folder, after=after))
        return {name: info for name, info in infos if name}

    def create(self, path: str, data: bytes) -> bool:
        """Write an object only if it is absent; False if it exists."""
        with self._convert_errors("write", path):
            try:
                obstore.put(self.backend, path, data, mode="create")
            except (AlreadyExistsError, PreconditionError):
                # Azure responds with 409 or 412, and versions of obstore map 412 differently.
                return False
        return True

    def put(self, path: str, data: bytes) -> None:
        with self._convert_errors("write", path):
            obstore.put(self.backend, path, data)

    def delete(self, path: str) -> None:
        with self._convert_errors("delete", path), contextlib.suppress(FileNotFoundError):
            obstore.delete(self.backend, path)

    def now(self) -> datetime:
        """Return the time of the store's clock, by writing an object."""
        path = CLOCK.path(secrets.token_hex(16))
        self.put(path, b"{}\n")
        info = self.stat(path)
        self.delete(path)
        if info is None:
            raise StoreUnavailable(
                f"The task store {self.url} lost '{path}' right after writing it: try again."
            )
        return info.modified

    def staged(self) -> Sequence[ObjectInfo]:
        """List files that are being written; only local folders have any."""
        return ()

    @contextlib.contextmanager
    def _convert_errors(self, action: str, path: str) -> Iterator[None]:
        _check_not_forked()
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            raise StoreUnavailable(
                f"The task store {self.url} could not {action} '{path}': {describe_error(error)}.",
                names=[path],
            ) from error


class LocalObjects(Objects):
    """A local folder, in which completed writes survive power loss."""

    def __init__(self, root: Path, *, create: bool) -> None:
        # Set first, because the error for a folder that cannot be created includes it.
        self.url = str(root)
        with self._convert_errors("open", self.url):
            if create:
                make_directories(root)
            elif not root.is_dir():
                raise StoreUnavailable(f"There is no task store at '{root}'.", names=[self.url])
            store = LocalStore(root)
        super().__init__(store, self.url, remote=False)
        self._root = root

    def create(self, path: str, data: bytes) -> bool:
        with self._convert_errors("write", path):
            return not os.path.lexists(self._root / path) and self._write(path, data, replace=False)

    def put(self, path: str, data: bytes) -> None:
        with self._convert_errors("write", path):
            self._write(path, data, replace=True)

    def staged(self) -> list[ObjectInfo]:
        infos: list[ObjectInfo] = []
        with self._convert_errors("list", "staged files"):
            walked = os.walk(self._root)
            paths = (Path(folder, name) for folder, _, files in walked for name in files)
            for path in paths:
                if re.fullmatch(r".+#\d+", path.name):
                    # Its writer may finish meanwhile.
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        modified = datetime.fromtimestamp(status.st_mtime, UTC)
                        relative = path.relative_to(self._root).as_posix()
                        infos.append(ObjectInfo(relative, status.st_size, modified))
        return sorted(infos, key=lambda info: info.path)

    def delete(self, path: str) -> None:
        # Not with obstore, which cannot see staged files.
        with self._convert_errors("delete", path), contextlib.suppress(FileNotFoundError):
            os.unlink(self._root / path)

    def _write(self, path: str, data: bytes, *, replace: bool) -> bool:
        target = self._root / path
        # The root is not created again: the disk may just not be mounted.
        make_directories(target.parent, within=self._root)
        # The name that object_store gives to staged files.
        staged = target.with_name(f"{target.name}#{secrets.randbelow(10**18)}")
        return write_whole(target, data, staged=staged, replace=replace)


def open_objects(
    location: str | Path,
    *,
    create: bool = True,
    **options: Any,  # noqa: ANN401 - those of obstore
) -> Objects:
    """Open the objects at a folder or URL, or raise StoreUnavailable."""
    text = str(location)
    scheme = urlsplit(text).scheme if "://" in text else ""
    if isinstance(location, Path) or not scheme:
        return LocalObjects(Path(location).absolute(), create=create)
    if scheme == "file":
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise StoreUnavailable(
                f"'{text}' is not an absolute file URL: write file:///absolute/folder.",
                names=[text],
            )
        return LocalObjects(Path(unquote(parts.path)), create=create)
    if scheme == "memory":
        return Objects(MemoryStore(), text, remote=False)
    if scheme not in REMOTE_SCHEMES:
        known = ", ".join(f"{name}://" for name in ("file", "memory", *REMOTE_SCHEMES))
        raise StoreUnavailable(
            f"Unknown scheme '{scheme}://' of a task store. Use a folder or {known}.", names=[text]
        )
    try:
        return Objects(from_url(text, **{"retry_config": DEFAULT_RETRY, **options}), text)
    except (BaseError, ValueError, TypeError) as error:
        raise StoreUnavailable(
            f"The task store {text} cannot be opened: {describe_error(error)}.", names=[text]
        ) from error


def describe_error(error: Exception) -> str:
    """Describe an error in one line, without obstore's debugging output."""
    text = str(error).strip()
    if response := _ERROR_RESPONSE.search(text):
        status, code = response["status"], response["code"]
        if status.startswith(("401", "403")):
            return f"{status}, {code}: check the credentials and their permissions"
        return f"{response['message'].rstrip('. ')} ({status}, {code})"
    if "BadScheme" in text:
        return "plain http is not allowed: use https, or set AWS_ALLOW_HTTP or AZURE_ALLOW_HTTP"
    lines = text.splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".:")


def _check_not_forked() -> None:
    global _pool_owner
    if _pool_owner is None:
        _pool_owner = os.getpid()
    elif _pool_owner != os.getpid():
        raise StoreUnavailable(
            "The task store was used before this process was forked, and its threads do not "
            "survive a fork: start processes with 'spawn', or fork before the first use."
        )
