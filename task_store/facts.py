"""The facts about a version, declared once.

The event that publishes a version contains them, and so does the version in the catalog; the rows
of checkpoints and the API's JSON are made from them. A new fact needs a default, so that the logs
and checkpoints of earlier releases can still be read.
"""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from task_store.bundle import TaskBundle
from task_store.manifest import Digest

Count = Annotated[int, Field(ge=1)]


class VersionFacts(BaseModel):
    """What a reader of the catalog knows of a version without its bundle."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    digest: Digest
    size: Count  # bytes
    extends: tuple[Digest, ...] = ()
    problem: str
    classes: Count
    memory_tokens: int = 0
    description: str = ""
    backbone: str
    fingerprint: Digest  # of the backbone

    @classmethod
    def of(cls, bundle: TaskBundle) -> "VersionFacts":
        return cls(
            digest=bundle.digest,
            size=bundle.size_bytes,
            extends=bundle.extends,
            problem=bundle.problem,
            classes=bundle.classes,
            memory_tokens=bundle.memory_tokens,
            description=bundle.manifest.description,
            backbone=bundle.manifest.backbone.name,
            fingerprint=bundle.backbone_fingerprint,
        )
