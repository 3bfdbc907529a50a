"""MLServer: a custom runtime that holds T networks, with adaptive batching.

python -m benchmarks.peers.servers.mlserver_server MODEL PORT
"""

import asyncio
import base64
import json
import os
import sys
import tempfile
from pathlib import Path

from mlserver import MLModel
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput

from benchmarks.peers.servers.classifiers import BATCH, WAIT_SECONDS, Classifiers, read_photo


class Runtime(MLModel):
    async def load(self) -> bool:
        self.classifiers = Classifiers(Path(self.settings.parameters.uri))
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        images, tasks = (list(tensor.data.root) for tensor in payload.inputs)
        answers = await asyncio.to_thread(self._answer, images, max(tasks))
        output = ResponseOutput(
            name="answers", shape=[len(answers), 1], datatype="BYTES", data=answers
        )
        return InferenceResponse(model_name=self.name, outputs=[output])

    def _answer(self, images: list[str], tasks: int) -> list[str]:
        photos = [read_photo(base64.b64decode(image)) for image in images]
        return self.classifiers.answer(photos, tasks)


def write_settings(folder: Path, model: str, port: int) -> None:
    server = {
        "host": "127.0.0.1",
        "http_port": port,
        "grpc_port": port + 1,
        "metrics_port": port + 2,
        "debug": False,
        "parallel_workers": 1,  # its default; passes of several workers would share the cores
        "metrics_dir": str(folder),
    }
    runtime = {
        "name": "classifiers",
        "implementation": "benchmarks.peers.servers.mlserver_server.Runtime",
        "max_batch_size": BATCH,
        "max_batch_time": WAIT_SECONDS,
        "parameters": {"uri": model},
    }
    (folder / "settings.json").write_text(json.dumps(server))
    (folder / "model-settings.json").write_text(json.dumps(runtime))


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp())
    write_settings(place, sys.argv[1], int(sys.argv[2]))
    program = str(Path(sys.executable).with_name("mlserver"))
    os.execv(program, [program, "start", str(place)])
