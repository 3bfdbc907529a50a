"""The masked pass: one frozen Vision Transformer, any number of tasks. No store, no HTTP."""

from server.model.backbone import Backbone
from server.model.context import Context, ContextBatch
from server.model.families import load_backbone
from server.model.multitask import MultiTaskViT
from server.model.preprocessing import Preprocessing
from server.model.tasks import TaskWeights

__all__ = [
    "Backbone",
    "Context",
    "ContextBatch",
    "MultiTaskViT",
    "Preprocessing",
    "TaskWeights",
    "load_backbone",
]
