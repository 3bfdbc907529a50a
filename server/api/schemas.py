"""What requests may say and what answers look like, as the OpenAPI document shows it."""

from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    RootModel,
    field_validator,
    model_validator,
)

TOP_K = 5
THRESHOLD = 0.5

Returned = Literal["scores", "logits", "embedding"]
Explanation = Literal["attention"]
TopK = Annotated[int, Field(ge=1, le=65536)]
Threshold = Annotated[float, Field(ge=0, le=1)]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
# As wide as the store's own grammar: a longer reference is no reference to anything.
Reference = Annotated[str, Field(min_length=1, max_length=256)]

_TOP_K = "How many predictions of each task to give, best first."
_THRESHOLD = "For multi-label tasks: give only labels with at least this score."
_RETURN = "`scores`, the raw `logits`, or the `embedding` that each head reads."
_EXPLAIN = "`attention`: also tell where in the image each task looked."


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PredictQuery(_Strict):
    """Options of a prediction in the query."""

    tasks: list[str] | None = Field(
        None,
        description="Task references, separated by commas or repeated: `cifar,places@3`, "
        "`cifar:canary`. Without it every ready task answers.",
        examples=[["pets,scene"]],
    )
    top_k: TopK = Field(TOP_K, description=_TOP_K)
    threshold: Threshold = Field(THRESHOLD, description=_THRESHOLD)
    returned: Returned = Field("scores", alias="return", description=_RETURN)
    explain: Explanation | None = Field(None, description=_EXPLAIN)

    @field_validator("tasks")
    @classmethod
    def _split(cls, given: list[str] | None) -> list[str] | None:
        if given is None:
            return None
        parts = [part.strip() for each in given for part in each.split(",")]
        names = [part for part in parts if part]
        if not names:
            raise ValueError("names no task: leave it out to ask every ready task")
        if any(len(name) > 256 for name in names):
            raise ValueError("a task reference has at most 256 characters")
        return names


class ImageInput(_Strict):
    """One image of a JSON request: its bytes in base64, or the digest of one sent before."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"oneOf": [{"required": ["b64"]}, {"required": ["digest"]}]},
    )

    b64: str = Field("", description="The image's bytes in base64.")
    digest: Digest | None = Field(
        None, description="`digest` of an image in an earlier answer, while it is cached."
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("an image has either b64 or digest")
        if self.digest is None and "digest" in self.model_fields_set:
            raise ValueError("a digest is 'sha256:' and 64 hexadecimal digits")
        return self


class PredictBody(_Strict):
    """A prediction request as JSON. What it says goes before what the query says."""

    images: list[ImageInput] = Field(min_length=1)
    tasks: Annotated[list[Reference], Field(min_length=1)] | None = Field(
        None, description="Task references; without it every ready task answers."
    )
    top_k: TopK | None = Field(None, description=_TOP_K)
    threshold: Threshold | None = Field(None, description=_THRESHOLD)
    returned: Returned | None = Field(None, alias="return", description=_RETURN)
    explain: Explanation | None = Field(None, description=_EXPLAIN)


# Answers. They are built as plain dictionaries, which is quicker; tests hold them to these models.


class Prediction(_Strict):
    label: str
    index: int
    score: float


class Attention(_Strict):
    """Where a task looked: what its class token gives each patch, in the last layer.

    Softmax weights, mean over heads, as they are.
    """

    on_patches: float = Field(
        description="Their sum. The rest lies on class tokens, register tokens and memory."
    )
    grid: list[list[float]] = Field(description="Rows of patches, from the top; see `view`.")


class TaskResult(_Strict):
    """The answer of one task. Which member it has depends on the task and on `return`."""

    version: int | None = Field(description="Null for `base`, the backbone's own head.")
    predictions: list[Prediction] | None = Field(None, description="Of classification tasks.")
    values: list[float] | None = Field(None, description="Of regression tasks.")
    logits: list[float] | None = Field(None, description="With `return=logits`.")
    embedding: list[float] | None = Field(
        None, description="Of embedding tasks, and of every task with `return=embedding`."
    )
    attention: Attention | None = Field(None, description="With `explain=attention`.")


class ImageResult(_Strict):
    digest: Digest = Field(description="Names the image in later requests.")
    cache: Literal["hit", "miss", "off"] = Field(description="Whether its context was cached.")
    tasks: dict[str, TaskResult] = Field(description="By the reference that was asked for.")


class TimingsMs(_Strict):
    queue: float
    decode: float
    forward: float
    total: float


class View(_Strict):
    """How an upright image becomes the patches of a grid."""

    resize: int | list[int] | None = Field(
        description="Its shortest edge, or height and width, are first brought to this."
    )
    crop: list[int] | None = Field(description="Height and width then cut out of the middle.")
    patch: list[int] = Field(
        description="Height and width of a patch, from the top left; a rim may be left over."
    )


class PredictResult(_Strict):
    generation: int = Field(description="Of the catalog that all answers come from.")
    backbone: str
    images: list[ImageResult] = Field(description="In the order they were sent.")
    view: View | None = Field(None, description="With `explain=attention`.")
    timings_ms: TimingsMs


Status = Literal["ready", "failed", "on_demand", "unloaded"]


class VersionResult(_Strict):
    """One published version of a task."""

    version: int
    digest: Digest
    size_bytes: int
    labels: list[str] = Field(description="The labels that point to it.")
    status: Status = Field(description="`on_demand` is loaded when it is first asked for.")
    reason: str | None = Field(description="Why it cannot be asked.")
    resident: bool = Field(description="Whether it is on the device now.")
    problem: str
    classes: int
    memory_tokens: int
    description: str
    extends: list[Digest]
    backbone: str
    generation: int
    published: str
    actor: str


class TaskSummary(_Strict):
    """A task as the list shows it: what its default version is."""

    task: str
    version: int | None = Field(description="The version `default` points to; null for `base`.")
    status: Status
    reason: str | None
    problem: str
    classes: int
    description: str
    labels: dict[str, int]
    versions: list[int] = Field(description="Live versions.")


class TaskList(_Strict):
    generation: int
    backbone: str
    tasks: list[TaskSummary]


class TaskDetail(TaskSummary):
    """A task with its versions and the names of its classes, where they are loaded."""

    generation: int
    class_labels: list[str] | None
    version_details: list[VersionResult] = Field(description="Live versions, oldest first.")


class VersionList(_Strict):
    task: str
    generation: int
    versions: list[VersionResult]


class WaitResult(_Strict):
    """Who serves a change, after `wait=all`."""

    serving: list[str] = Field(description="Ids of the live replicas that do.")
    behind: list[str] = Field(description="Of those that did not when the time was over.")
    error: str | None = Field(description="Why that is not known: the store was away.")


class PublishResult(_Strict):
    """A bundle that is being served now."""

    task: str
    version: int
    digest: Digest
    generation: int
    created: bool = Field(description="False when the task had these bytes already.")
    labels: list[str] = Field(description="The labels that point to the version now.")
    replicas: WaitResult | None = Field(None, description="With `wait=all`.")


class ChangeResult(_Strict):
    """The state of a task after a change that is being served now."""

    task: str
    generation: int
    labels: dict[str, int]
    versions: list[int] = Field(description="Live versions; none when the task is retired.")
    replicas: WaitResult | None = Field(None, description="With `wait=all`.")


class LabelTarget(_Strict):
    version: int = Field(ge=1, le=10**18 - 1)


class Verdict(_Strict):
    """What a bundle is, and whether this server could serve it."""

    valid: bool
    digest: Digest | None
    problems: list[str] = Field(description="One sentence per reason against it.")
    manifest: dict[str, JsonValue] | None
    classes: int | None
    memory_tokens: int | None


class ManifestResult(RootModel[dict[str, JsonValue]]):
    """The manifest in a bundle, as docs/reference/bundle-format.md describes it."""


class HistoryEntry(BaseModel):
    """One entry of the store's log about a task; `kind` says which further members it has."""

    model_config = ConfigDict(extra="allow")

    generation: int
    time: str
    actor: str
    kind: Literal["publish", "label", "retire", "restore"]
    task: str


class History(_Strict):
    task: str
    entries: list[HistoryEntry] = Field(description="Newest first.")


class ReplicaResult(_Strict):
    """One server of the store, as its last heartbeat tells it."""

    id: str = Field(description="Of this run of the server; another after a restart.")
    this: bool = Field(description="Whether it is the one that answers.")
    generation: int = Field(description="Of the catalog it serves.")
    age_seconds: float = Field(description="Since it last said so.")
    hostname: str
    address: str | None
    started: str
    version: str
    backbone: str
    fingerprint: str


class ReplicaList(_Strict):
    generation: int = Field(description="Newest generation that this server has seen.")
    heartbeats: bool = Field(description="False: this server does not look for others.")
    error: str | None = Field(description="Why the others are not known: the store is away.")
    replicas: list[ReplicaResult] = Field(description="The live ones, by id.")


class StoreHealth(_Strict):
    generation_seen: int
    seconds_since_read: float | None = Field(description="Grows while the store is away.")
    error: str | None


class TaskCounts(_Strict):
    ready: int
    failed: int


class InputSize(_Strict):
    """What happens first to an image; whoever does it before sending gets the same answer."""

    resize: int | list[int] | None = Field(
        description="Its shortest edge, or height and width, are brought to this."
    )
    resample: str = Field(description="By this filter of Pillow.")


class Readiness(_Strict):
    ready: bool
    reasons: list[str] = Field(description="Why not; empty when ready.")
    backbone: str | None
    input: InputSize | None
    generation: int | None = Field(description="Of the catalog being served.")
    store: StoreHealth | None
    tasks: TaskCounts | None
    pending_images: int | None


class Liveness(_Strict):
    alive: Literal[True]


class ProblemDocument(BaseModel):
    """RFC 9457."""

    model_config = ConfigDict(extra="allow")

    type: str
    title: str
    status: int
    detail: str
    request_id: str | None
    names: list[str] | None = Field(None, description="The offending names.")
    suggestions: dict[str, str] | None = Field(None, description="What each may have meant.")
    errors: list[dict[str, str]] | None = Field(None, description="The parts that were wrong.")
