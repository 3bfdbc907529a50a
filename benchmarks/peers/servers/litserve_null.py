"""LitServe with a null model: `python -m benchmarks.peers.servers.litserve_null PROCESSES PORT`.

It answers JSON requests as `benchmarks.null_device` does: an image by digest in, predictions out.
"""

import sys
from typing import Any

import litserve

ANSWER = {
    "images": [
        {
            "digest": "sha256:0",
            "tasks": {
                "task0": {
                    "version": 1,
                    "predictions": [
                        {"label": f"class {number}", "index": number, "score": 0.01}
                        for number in range(5)
                    ],
                }
            },
        }
    ]
}


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:
        pass

    def decode_request(self, request: dict[str, Any]) -> str:
        digest: str = request["images"][0]["digest"]
        return digest

    def predict(self, inputs: str) -> dict[str, Any]:
        return ANSWER

    def encode_response(self, output: dict[str, Any]) -> dict[str, Any]:
        return output


if __name__ == "__main__":
    server = litserve.LitServer(Api(), accelerator="cpu", workers_per_device=1, timeout=300)
    server.run(
        host="127.0.0.1",
        port=int(sys.argv[2]),
        num_api_servers=int(sys.argv[1]),
        log_level="warning",
        generate_client_file=False,
    )
