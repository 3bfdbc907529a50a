"""FastAPI and T image-classification pipelines of transformers: a queue and one thread.

python -m benchmarks.peers.servers.pipelines_server MODEL PORT
"""

import json
import sys

from PIL import Image
from transformers import ImageClassificationPipeline, pipeline

from benchmarks.peers.servers.classifiers import open_photo, own_weights
from benchmarks.peers.servers.waiting import serve


class Pipelines:
    def __init__(self, model: str) -> None:
        self._model = model
        self._loaded: list[ImageClassificationPipeline] = []

    def answer(self, photos: list[Image.Image], tasks: int) -> list[str]:
        while len(self._loaded) < tasks:
            made = pipeline("image-classification", self._model, device="cpu")
            own_weights(made.model)
            self._loaded.append(made)
        predictions = [
            each(photos, batch_size=len(photos), top_k=1) for each in self._loaded[:tasks]
        ]
        return [
            json.dumps([rows[place][0] for rows in predictions]) for place in range(len(photos))
        ]


if __name__ == "__main__":
    serve(open_photo, Pipelines(sys.argv[1]).answer, int(sys.argv[2]))
