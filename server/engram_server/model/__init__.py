"""The model: one frozen Vision Transformer, any number of tasks, one pass. No store, no HTTP."""

from engram_server.model.backbone import Backbone
from engram_server.model.context import Context, ContextBatch
from engram_server.model.families import load_backbone
from engram_server.model.multitask import MultiTaskViT
from engram_server.model.preprocessing import Preprocessing
from engram_server.model.tasks import TaskWeights

__all__ = [
    "Backbone",
    "Context",
    "ContextBatch",
    "MultiTaskViT",
    "Preprocessing",
    "TaskWeights",
    "load_backbone",
]
