"""FastAPI and OpenVINO: one backbone and T heads, in fp32 or int8.

    python -m benchmarks.peers.servers.openvino_server MODEL.xml HEADS.npy PORT

The backbone takes bytes: normalising is part of the compiled model. What waits is a batch, as in
the other servers.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import openvino
from openvino import properties

from benchmarks.peers.servers.classifiers import best, square
from benchmarks.peers.servers.waiting import serve


class OneBackbone:
    def __init__(self, model: Path, heads: Path) -> None:
        self._heads = np.load(heads)  # (T, classes, width)
        core = openvino.Core()
        options = {
            properties.hint.performance_mode(): properties.hint.PerformanceMode.LATENCY,
            # Else it would compute in bfloat16 where the processor can, and not say so.
            properties.hint.inference_precision(): openvino.Type.f32,
            properties.inference_num_threads(): os.cpu_count(),
            properties.hint.enable_hyper_threading(): True,
        }
        self._compiled = core.compile_model(str(model), "CPU", options)

    def answer(self, photos: list[np.ndarray], tasks: int) -> list[str]:
        features = self._compiled(np.stack(photos))[0]
        logits = np.einsum("bd,tkd->btk", features, self._heads[:tasks], optimize=True)
        return [json.dumps([best(rows) for rows in of_photo]) for of_photo in logits]


def read_bytes(data: bytes) -> np.ndarray:
    return np.asarray(square(data))


if __name__ == "__main__":
    backbone = OneBackbone(Path(sys.argv[1]), Path(sys.argv[2]))
    serve(read_bytes, backbone.answer, int(sys.argv[3]))
