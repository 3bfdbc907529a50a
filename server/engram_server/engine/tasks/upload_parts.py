"""Parts of an upload as bytes, to be kept in the task store until the upload is published."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import engram_store
import numpy as np
from engram_bundle import MalformedBundle, codec
from engram_bundle.limits import DEFAULT_LIMITS
from engram_bundle.media import NO_MEDIA, pack_media, unpack_media
from engram_store.events import Record

from engram_server.model.heads.examples import DIGEST_BYTES, Example

_KEY = "part"
Relabelled = tuple[bytes, frozenset[str]]


class _Contents(Record):
    format: int = 1
    fingerprint: str  # of the backbone
    labels: tuple[tuple[str, ...], ...]  # of each example with features
    relabelled: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class UploadPart:
    """The photos of one request: with features, or already examples of the task."""

    added: list[Example]
    relabelled: list[Relabelled]

    @property
    def name(self) -> str:
        """Equal for equal photos with equal labels, so that a repeated part is kept once."""
        pairs = [(each.digest, each.labels) for each in self.added] + self.relabelled
        listed = sorted([digest.hex(), *sorted(labels)] for digest, labels in pairs)
        return hashlib.sha256(json.dumps(listed).encode()).hexdigest()

    def to_bytes(self, fingerprint: str) -> bytes:
        contents = _Contents(
            fingerprint=fingerprint,
            labels=tuple(tuple(sorted(each.labels)) for each in self.added),
            relabelled=tuple((digest.hex(), tuple(sorted(e))) for digest, e in self.relabelled),
        )
        tensors: dict[str, Any] = {}
        if self.added:
            digests = b"".join(each.digest for each in self.added)
            tensors["examples.features"] = np.array([each.feature for each in self.added], "f2")
            tensors["examples.digests"] = np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES)
            tensors |= pack_media([each.media for each in self.added])
        return codec.encode(tensors, {_KEY: contents.model_dump_json()})

    @classmethod
    def from_bytes(cls, data: bytes, fingerprint: str) -> "UploadPart":
        """Read what `to_bytes` wrote; raise CorruptStore or Conflict if it cannot be used."""
        try:
            metadata, stored = codec.read_header(data, DEFAULT_LIMITS)
        except MalformedBundle as error:
            raise engram_store.CorruptStore(f"A part of an upload is damaged: {error}") from error
        contents = _Contents.read(metadata[_KEY].encode())
        if contents is None or contents.fingerprint != fingerprint:
            raise engram_store.Conflict(
                "The photos were read by a server with another backbone or version: abort the "
                "upload, and send the photos again."
            )
        tensors = {name: codec.decode(data, entry) for name, entry in stored.items()}
        media = unpack_media(tensors)
        added = [
            Example(
                tensors["examples.digests"][row].tobytes(),
                tensors["examples.features"][row],
                frozenset(labels),
                media[row] if media else NO_MEDIA,
            )
            for row, labels in enumerate(contents.labels)
        ]
        relabelled = [(bytes.fromhex(each), frozenset(e)) for each, e in contents.relabelled]
        return cls(added, relabelled)
