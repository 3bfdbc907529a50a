"""Ray Serve: one replica of two CPUs that holds T networks, with its batching.

python -m benchmarks.peers.servers.ray_server MODEL PORT
"""

import asyncio
import logging
import signal
import sys
import tempfile
from pathlib import Path

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from benchmarks.peers.servers.classifiers import BATCH, WAIT_SECONDS, Classifiers, read_photo

Item = tuple[Tensor, int]


class Served:
    def __init__(self, model: str) -> None:
        self.classifiers = Classifiers(Path(model))

    @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=WAIT_SECONDS)
    async def answer(self, items: list[Item]) -> list[str]:
        photos = [photo for photo, _ in items]
        tasks = max(count for _, count in items)
        return await asyncio.to_thread(self.classifiers.answer, photos, tasks)

    async def __call__(self, request: Request) -> Response:
        photo = await asyncio.to_thread(read_photo, await request.body())
        answer: str = await self.answer((photo, int(request.query_params["tasks"])))
        return Response(answer, media_type="application/json")


def main(model: str, port: int) -> None:
    ray.init(
        num_cpus=2,
        object_store_memory=200 * 1024**2,
        include_dashboard=False,
        logging_level=logging.WARNING,
        _temp_dir=tempfile.mkdtemp(),
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    deployed = serve.deployment(max_ongoing_requests=8 * BATCH, ray_actor_options={"num_cpus": 2})
    serve.run(deployed(Served).bind(model), route_prefix="/predict")
    signal.pause()  # until SIGTERM; the parent process ends Ray's processes too


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
