"""The task store: versions, aliases and the log of published bundles.

from engram_bundle import TaskBundle
from engram_store import open_store

store = open_store("./tasks")
store.publish("cifar", TaskBundle.load("cifar.safetensors"))
bundle = store.read_bundle(store.catalog().resolve("cifar").digest)
"""

from engram_store.bundle_cache import BundleCache as BundleCache
from engram_store.catalog import Canary as Canary
from engram_store.catalog import Catalog as Catalog
from engram_store.catalog import TaskInfo as TaskInfo
from engram_store.catalog import VersionInfo as VersionInfo
from engram_store.changes import Change as Change
from engram_store.changes import Condition as Condition
from engram_store.changes import MoveAlias as MoveAlias
from engram_store.changes import Publish as Publish
from engram_store.changes import Purge as Purge
from engram_store.changes import RemoveAlias as RemoveAlias
from engram_store.changes import Restore as Restore
from engram_store.changes import Retire as Retire
from engram_store.changes import RollBack as RollBack
from engram_store.changes import SetCanary as SetCanary
from engram_store.changes import only_if_absent as only_if_absent
from engram_store.corrections import Correction as Correction
from engram_store.corrections import CorrectionLimits as CorrectionLimits
from engram_store.corrections import newest_of as newest_of
from engram_store.drafts import Draft as Draft
from engram_store.drafts import DraftLimits as DraftLimits
from engram_store.drafts import unknown_upload as unknown_upload
from engram_store.errors import *  # noqa: F403 (the whole tree)
from engram_store.events import Entry as Entry
from engram_store.events import VersionFacts as VersionFacts
from engram_store.replicas.evidence import Evidence as Evidence
from engram_store.replicas.evidence import PairEvidence as PairEvidence
from engram_store.replicas.evidence import TaskEvidence as TaskEvidence
from engram_store.replicas.heartbeats import Heartbeat as Heartbeat
from engram_store.replicas.heartbeats import HeartbeatInfo as HeartbeatInfo
from engram_store.replicas.heartbeats import Heartbeats as Heartbeats
from engram_store.replicas.heartbeats import replica_id as replica_id
from engram_store.store import CommitResult as CommitResult
from engram_store.store import TaskStore as TaskStore
from engram_store.store import open_store as open_store
