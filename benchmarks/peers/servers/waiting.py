"""FastAPI, a queue, and one thread that answers what waits, in batches.

What a FastAPI user writes around a model: the way of transformers' documentation for web servers.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import uvicorn
from fastapi import FastAPI, Request, Response

from benchmarks.peers.servers.classifiers import BATCH

Photo = TypeVar("Photo")


class Batches(Generic[Photo]):
    """`run` gets all photos that wait, BATCH at most, and for how many tasks."""

    def __init__(self, run: Callable[[list[Photo], int], list[str]]) -> None:
        self._run = run
        self._waiting: queue.SimpleQueue[tuple[Photo, int, asyncio.Future[str]]]
        self._waiting = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    async def answer(self, photo: Photo, tasks: int) -> str:
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.put((photo, tasks, done))
        return await done

    def _serve(self) -> None:
        while True:
            batch = [self._waiting.get()]
            while len(batch) < BATCH and not self._waiting.empty():
                batch.append(self._waiting.get())
            photos, tasks = [photo for photo, _, _ in batch], max(count for _, count, _ in batch)
            try:
                answers = self._run(photos, tasks)
            except Exception as error:  # noqa: BLE001 - every waiting request gets it
                for _, _, done in batch:
                    done.get_loop().call_soon_threadsafe(done.set_exception, error)
                continue
            for (_, _, done), answer in zip(batch, answers, strict=True):
                done.get_loop().call_soon_threadsafe(done.set_result, answer)


def serve(
    read: Callable[[bytes], Photo], run: Callable[[list[Photo], int], list[str]], port: int
) -> None:
    """`read` takes a photo's bytes, in a thread; `run` answers photos, in one thread."""
    app = FastAPI()
    batches = Batches(run)

    @app.post("/predict")
    async def predict(request: Request, tasks: int) -> Response:
        photo = await asyncio.to_thread(read, await request.body())
        return Response(await batches.answer(photo, tasks), media_type="application/json")

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
