"""`serve run <config>` on a small Ray of its own, until SIGTERM.

python -m tests.deploy.ray_program <folder of Ray's files> <config>
"""

import signal
import sys

import ray
from ray.serve.scripts import cli


def main(folder: str, config: str) -> None:
    ray.init(
        # Two CPUs are enough for the replicas; the GPU is declared to Ray but never used.
        num_cpus=2,
        num_gpus=1,
        object_store_memory=100 * 1024**2,
        include_dashboard=False,
        namespace="serve",
        _temp_dir=folder,
    )
    # As Ctrl-C, for which `serve run` lets its replicas leave in order.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cli(["run", config])


if __name__ == "__main__":
    main(*sys.argv[1:])
