"""Bundles on the Hugging Face hub: `hf://ORG/NAME`. Requires the extra `hub`.

A repository has one task: its bundle, and a model card that is generated from the manifest.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from engram_vit.errors import ClientError, UsageError

SCHEME: Final = "hf://"
BUNDLE_FILE: Final = "task.safetensors"
CARD_FILE: Final = "README.md"

_ADDRESS = re.compile(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.-]*")
_PIPELINES: Final = {
    "single_label": "image-classification",
    "multi_label": "image-classification",
    "embedding": "image-feature-extraction",
}
_MAX_LABELS = 1000  # in a model card


@dataclass(frozen=True)
class HubAddress:
    """`hf://ORG/NAME` or `hf://ORG/NAME@REVISION`: a branch, tag or commit."""

    repository: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> Self:
        found = _ADDRESS.fullmatch(text)
        if found is None:
            raise UsageError(
                f"'{text}' is not the address of a repository. Examples: hf://lab/birds, "
                f"hf://lab/birds@v2."
            )
        return cls(found[1], found[2])

    @property
    def name(self) -> str:
        return self.repository.partition("/")[2]


def manifest_in(bundle: bytes) -> dict[str, Any] | None:
    """The manifest of a bundle; None if these bytes have none."""
    size = int.from_bytes(bundle[:8], "little")
    try:
        manifest = json.loads(json.loads(bundle[8 : 8 + size])["__metadata__"]["engram"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) else None


def upload(address: HubAddress, bundle: bytes, *, public: bool) -> str:
    """Upload a bundle and its model card in one commit; returns the commit.

    A new repository is private unless `public`: a bundle may contain thumbnails of photos.
    """
    if address.revision is not None:
        raise UsageError(f"Leave out '@{address.revision}': a push makes a new commit.")
    manifest = manifest_in(bundle)
    if manifest is None:
        raise ClientError("This file is not an Engram bundle.")
    card = model_card(address, manifest)
    with _hub_errors(address):
        from huggingface_hub import CommitOperationAdd, HfApi

        api = HfApi()
        api.create_repo(address.repository, private=not public, exist_ok=True)
        commit = api.create_commit(
            address.repository,
            [
                CommitOperationAdd(BUNDLE_FILE, bundle),
                CommitOperationAdd(CARD_FILE, card.encode()),
            ],
            commit_message="Publish with engram push",
        )
        oid: str = commit.oid
        return oid


def download(address: HubAddress) -> tuple[bytes, str]:
    """The bundle in a repository, and the commit that it is from."""
    with _hub_errors(address):
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(address.repository, BUNDLE_FILE, revision=address.revision))
    data = path.read_bytes()
    if manifest_in(data) is None:
        raise ClientError(f"{BUNDLE_FILE} of {address.repository} is not an Engram bundle.")
    return data, path.parent.name  # the cache has one folder per commit


@contextmanager
def _hub_errors(address: HubAddress) -> Iterator[None]:
    """Convert the errors of huggingface_hub to sentences."""
    try:
        from huggingface_hub import errors
    except ModuleNotFoundError:
        raise ClientError(
            "hf:// requires huggingface_hub, which is not installed. Run "
            "pip install 'engram-vit[hub]'."
        ) from None
    where = address.repository
    try:
        yield
    except errors.RevisionNotFoundError:
        raise ClientError(f"{where} has no revision '{address.revision}'.") from None
    except errors.LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            raise ClientError(_describe(where, error.__cause__)) from None
        raise ClientError(
            f"{where} is not in the cache, and the hub cannot be reached. Check HF_HUB_OFFLINE "
            f"and HF_ENDPOINT, and try again."
        ) from None
    except errors.EntryNotFoundError:
        raise ClientError(
            f"{where} has no {BUNDLE_FILE}: it was not published with engram push."
        ) from None
    except errors.HfHubHTTPError as error:
        raise ClientError(_describe(where, error)) from None
    except errors.OfflineModeIsEnabled:
        raise ClientError("The hub cannot be reached: HF_HUB_OFFLINE is set.") from None
    except (OSError, ValueError) as error:
        raise ClientError(f"The hub failed for {where}: {error}") from None


def _describe(where: str, error: Any) -> str:  # noqa: ANN401 - an optional package's exception
    status: int = error.response.status_code
    if status in (401, 403):
        return (
            f"The hub denies access to {where} ({status}). Set HF_TOKEN to a token that may read "
            f"it, or write to it for a push."
        )
    if status == 404:
        return f"There is no repository {where} on the hub, or HF_TOKEN may not read it."
    return f"The hub answered {status} for {where}: {error.server_message or error}"


def model_card(address: HubAddress, manifest: Mapping[str, Any]) -> str:
    """The README of a repository: metadata for the hub, and the manifest for people."""
    labels, metrics = manifest.get("labels") or (), manifest.get("metrics") or {}
    name = manifest.get("name") or address.name
    parts = [
        _front_matter(manifest),
        f"# {_line(name)}",
        _text(manifest.get("description")),
        "An [Engram](https://github.com/engram-vit/engram) task: a small file that a server runs "
        "on a frozen Vision Transformer, together with other tasks.",
        _table(("", ""), _facts(manifest)),
        *_section("Classes", ", ".join(f"`{_line(each)}`" for each in labels[:_MAX_LABELS])),
        *_section("Metrics", metrics and _table(("metric", "value"), _metrics(metrics))),
        *_section(
            "Use",
            "```sh\n"
            "pip install 'engram-vit[server,hub]'\n"
            f"engram pull {SCHEME}{address.repository} --out {address.name}.safetensors\n"
            f"engram push {address.name}.safetensors   # to a server with the same backbone\n"
            f"engram predict photo.jpg --tasks {_line(name)}\n"
            "```",
        ),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(manifest: Mapping[str, Any]) -> str:
    lines = ["library_name: engram", "tags:", "- engram", "- vision"]
    if pipeline := _PIPELINES.get(manifest.get("task_type", "")):
        lines.append(f"pipeline_tag: {pipeline}")
    license_id = str(manifest.get("license") or "").lower()
    if _LICENSE_ID.fullmatch(license_id):
        lines.append(f"license: {license_id}")
    return "\n".join(["---", *lines, "---"])


def _facts(manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    backbone = manifest.get("backbone") or {}
    yield "task type", _line(manifest.get("task_type", ""))
    yield "classes", str(len(manifest.get("labels") or ()))
    yield (
        "backbone",
        f"{_line(backbone.get('name', ''))}, `{_line(backbone.get('fingerprint', ''))}`",
    )
    if parents := manifest.get("extends"):
        yield "extends", ", ".join(f"`{_line(each)}`" for each in parents)
    for key in ("license", "created"):
        if value := manifest.get(key):
            yield {"license": "licence"}.get(key, key), _line(value)


def _metrics(metrics: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    return ((_line(name), f"{value:.6g}") for name, value in metrics.items())


def _section(title: str, content: str | Mapping[str, Any]) -> tuple[str, ...]:
    return (f"## {title}", str(content)) if content else ()


def _table(headers: tuple[str, str], rows: Iterator[tuple[str, str]]) -> str:
    lines = [headers, ("---", "---"), *rows]
    return "\n".join(f"| {first} | {second} |" for first, second in lines)


def _line(value: object) -> str:
    """Text in one line that ends no cell of a table and no code."""
    return " ".join(str(value).split()).replace("|", "\\|").replace("`", "'")


def _text(value: object) -> str:
    """Text of several lines that is neither a heading nor HTML."""
    return "\n".join(line.lstrip("#- ") for line in str(value or "").splitlines()).replace(
        "<", "&lt;"
    )
