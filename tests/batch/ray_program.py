"""A batch run on a Ray cluster, during which one actor is killed.

python -m tests.batch.ray_program <address> <backbone> <photos> <bundle> <out> <kept>

Prints the process that was killed. `tests.batch.test_ray` looks at the files that it writes.
"""

import os
import signal
import sys
from pathlib import Path

from engram_server.batch.pipeline import Progress
from engram_server.batch.run import run_batch
from engram_server.batch.setup import BatchOptions, Keep, RayCluster
from engram_server.engine.types import EngineConfig
from engram_server.model import load_backbone

CONFIG = EngineConfig(decode_threads=2, budget_rows=64)  # a few images per batch


def passers() -> list[int]:
    """The processes of the actors that run passes, on this cluster."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            # Its environment names the cluster: other tests may have one too.
            mine = os.environ["RAY_AUTH_TOKEN"].encode() in (folder / "environ").read_bytes()
        except OSError:
            continue
        if mine and title.startswith(b"ray::") and b"Passer" in title:
            found.append(int(folder.name))
    return found


class KillOne(Progress):
    """Kills an actor after the first batch."""

    def __init__(self) -> None:
        self.killed: int | None = None

    def begin(self, images, finished):
        def on_batch(count):
            if self.killed is None:
                self.killed = min(passers())
                os.kill(self.killed, signal.SIGKILL)

        return on_batch


def main(address: str, backbone: str, photos: str, bundle: str, out: str, kept: str) -> None:
    loaded = load_backbone(backbone)
    options = BatchOptions(
        photos,
        Path(out),
        bundles=[Path(bundle)],
        output="logits",
        part_images=16,
        keep=Keep("summaries", Path(kept)),
        ray=RayCluster(address, 3),
    )
    killing = KillOne()
    run_batch(options, CONFIG, lambda: loaded, None, (), killing)
    assert killing.killed is not None
    assert killing.killed not in passers()
    print("killed", killing.killed, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
