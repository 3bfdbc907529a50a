"""LitServe: one worker that holds T networks, with its batching.

python -m benchmarks.peers.servers.litserve_server MODEL PORT
"""

import base64
import json
import sys
from pathlib import Path
from typing import Any

import litserve
from torch import Tensor

from benchmarks.peers.servers.classifiers import BATCH, WAIT_SECONDS, Classifiers, read_photo

Item = tuple[Tensor, int]


class Api(litserve.LitAPI):
    def __init__(self, model: Path) -> None:
        super().__init__(max_batch_size=BATCH, batch_timeout=WAIT_SECONDS)
        self.model = model

    def setup(self, device: str) -> None:
        self.classifiers = Classifiers(self.model)

    def decode_request(self, request: dict[str, Any]) -> Item:
        return read_photo(base64.b64decode(request["image"])), request["tasks"]

    def batch(self, inputs: list[Item]) -> list[Item]:
        return inputs

    def predict(self, batch: list[Item]) -> list[str]:
        photos = [photo for photo, _ in batch]
        return self.classifiers.answer(photos, max(tasks for _, tasks in batch))

    def unbatch(self, output: list[str]) -> list[str]:
        return output

    def encode_response(self, output: str) -> dict[str, Any]:
        return {"answers": json.loads(output)}


if __name__ == "__main__":
    server = litserve.LitServer(
        Api(Path(sys.argv[1])), accelerator="cpu", workers_per_device=1, timeout=300
    )
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", generate_client_file=False
    )
