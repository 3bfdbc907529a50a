"""The embedded backbone and demo tasks, served by default."""

from pathlib import Path
from typing import Final

from engram_store import TaskStore

BACKBONE: Final = Path(__file__).parent / "engram-mini"
TASKS: Final = Path(__file__).parent / "tasks"


def publish_demo_tasks(store: TaskStore) -> None:
    """Publish the demo tasks to an empty store."""
    if store.catalog(refresh=False).generation > 0:
        return
    for bundle in sorted(TASKS.glob("*.safetensors")):
        store.publish(bundle.stem, bundle, actor="engram")
