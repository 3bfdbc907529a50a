"""The bundle format: schema, manifest, tensors, codec, limits and names.

Depends on NumPy and pydantic only, so that the model, the store, the server and training can all
use it.
"""

from engram_bundle.bundle import GOLDEN_TOLERANCE as GOLDEN_TOLERANCE
from engram_bundle.bundle import TaskBundle as TaskBundle
from engram_bundle.bundle import check_compatible as check_compatible
from engram_bundle.errors import *  # noqa: F403 (the whole tree)
from engram_bundle.limits import BundleLimits as BundleLimits
from engram_bundle.manifest import BackboneRef as BackboneRef
from engram_bundle.manifest import DriftSpec as DriftSpec
from engram_bundle.manifest import LoraSpec as LoraSpec
from engram_bundle.manifest import Manifest as Manifest
from engram_bundle.manifest import OodSpec as OodSpec
from engram_bundle.manifest import TaughtSpec as TaughtSpec
from engram_bundle.names import BASE_TASK as BASE_TASK
from engram_bundle.names import Digest as Digest
from engram_bundle.names import TaskRef as TaskRef
from engram_bundle.names import check_alias as check_alias
from engram_bundle.names import check_task_name as check_task_name
from engram_bundle.names import digest_of as digest_of
from engram_bundle.names import parse_ref as parse_ref
from engram_bundle.preprocessing import PreprocessingSpec as PreprocessingSpec
from engram_bundle.schema import LoraTarget as LoraTarget
