"""Bundles of trained tasks, and the store that versions and publishes them.

from task_store import TaskBundle, open_store

store = open_store("./tasks")
store.publish("cifar", TaskBundle.load("cifar.safetensors"))
bundle = store.read_bundle(store.catalog().resolve("cifar").digest)
"""

from task_store.bundle import GOLDEN_TOLERANCE, TaskBundle, check_compatible
from task_store.bundle_cache import BundleCache
from task_store.catalog import Catalog, Damage, TaskInfo, VersionInfo
from task_store.changes import (
    Change,
    Condition,
    MoveLabel,
    Publish,
    RemoveLabel,
    Restore,
    Retire,
    RollBack,
    only_if_absent,
)
from task_store.errors import (
    AlreadyExists,
    BundleError,
    Conflict,
    CorruptStore,
    IncompatibleBundle,
    InvalidName,
    MalformedBundle,
    MissingParent,
    NotFound,
    NothingToRestore,
    NothingToRollBack,
    PreconditionFailed,
    StillExtended,
    StillLabelled,
    StoreError,
    StoreUnavailable,
    TaskStoreError,
    UnknownLabel,
    UnknownTask,
    UnknownVersion,
    UnreadableBundle,
    UnsupportedFormat,
)
from task_store.events import Entry
from task_store.facts import VersionFacts
from task_store.heartbeats import Heartbeat, Heartbeats, Sighting, replica_id
from task_store.limits import DEFAULT_LIMITS, Limits
from task_store.maintenance import GarbageReport
from task_store.manifest import BackboneRef, Manifest, PreprocessingSpec
from task_store.names import TaskRef, check_label, check_task_name, parse_ref
from task_store.store import Commit, Published, TaskStore, open_store

__all__ = [
    "DEFAULT_LIMITS",
    "GOLDEN_TOLERANCE",
    "AlreadyExists",
    "BackboneRef",
    "BundleCache",
    "BundleError",
    "Catalog",
    "Change",
    "Commit",
    "Condition",
    "Conflict",
    "CorruptStore",
    "Damage",
    "Entry",
    "GarbageReport",
    "Heartbeat",
    "Heartbeats",
    "IncompatibleBundle",
    "InvalidName",
    "Limits",
    "MalformedBundle",
    "Manifest",
    "MissingParent",
    "MoveLabel",
    "NotFound",
    "NothingToRestore",
    "NothingToRollBack",
    "PreconditionFailed",
    "PreprocessingSpec",
    "Publish",
    "Published",
    "RemoveLabel",
    "Restore",
    "Retire",
    "RollBack",
    "Sighting",
    "StillExtended",
    "StillLabelled",
    "StoreError",
    "StoreUnavailable",
    "TaskBundle",
    "TaskInfo",
    "TaskRef",
    "TaskStore",
    "TaskStoreError",
    "UnknownLabel",
    "UnknownTask",
    "UnknownVersion",
    "UnreadableBundle",
    "UnsupportedFormat",
    "VersionFacts",
    "VersionInfo",
    "check_compatible",
    "check_label",
    "check_task_name",
    "only_if_absent",
    "open_store",
    "parse_ref",
    "replica_id",
]
