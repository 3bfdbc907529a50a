"""Bundles of trained tasks, and the store that versions and publishes them.

from task_store import TaskBundle, open_store

store = open_store("./tasks")
store.publish("cifar", TaskBundle.load("cifar.safetensors"))
bundle = store.read_bundle(store.catalog().resolve("cifar").digest)
"""

from task_store.bundle import GOLDEN_TOLERANCE as GOLDEN_TOLERANCE
from task_store.bundle import TaskBundle as TaskBundle
from task_store.bundle import check_compatible as check_compatible
from task_store.bundle_cache import BundleCache as BundleCache
from task_store.catalog import Catalog as Catalog
from task_store.catalog import Damage as Damage
from task_store.catalog import TaskInfo as TaskInfo
from task_store.catalog import VersionInfo as VersionInfo
from task_store.changes import Change as Change
from task_store.changes import Condition as Condition
from task_store.changes import MoveLabel as MoveLabel
from task_store.changes import Publish as Publish
from task_store.changes import RemoveLabel as RemoveLabel
from task_store.changes import Restore as Restore
from task_store.changes import Retire as Retire
from task_store.changes import RollBack as RollBack
from task_store.changes import only_if_absent as only_if_absent
from task_store.corrections import Correction as Correction
from task_store.corrections import CorrectionRecord as CorrectionRecord
from task_store.corrections import newest_of as newest_of
from task_store.errors import *  # noqa: F403 (all of the tree)
from task_store.events import Entry as Entry
from task_store.events import VersionFacts as VersionFacts
from task_store.heartbeats import Heartbeat as Heartbeat
from task_store.heartbeats import Heartbeats as Heartbeats
from task_store.heartbeats import Sighting as Sighting
from task_store.heartbeats import replica_id as replica_id
from task_store.limits import Limits as Limits
from task_store.manifest import BackboneRef as BackboneRef
from task_store.manifest import KnownSpec as KnownSpec
from task_store.manifest import Manifest as Manifest
from task_store.manifest import PreprocessingSpec as PreprocessingSpec
from task_store.names import TaskRef as TaskRef
from task_store.names import check_label as check_label
from task_store.names import check_task_name as check_task_name
from task_store.names import parse_ref as parse_ref
from task_store.store import Commit as Commit
from task_store.store import TaskStore as TaskStore
from task_store.store import open_store as open_store
