"""What a user of KServe's client writes. `test_kserve` runs it in an environment of its own.

    python kserve_program.py http://127.0.0.1:8000 photo.jpg pixel_values.npy

It prints what the client made of the answers as one JSON object. It imports nothing from here.
"""

import asyncio
import json
import sys
from pathlib import Path

import httpx
import numpy as np
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
from kserve.protocol.infer_type import RequestedOutput


def image_input(photo: bytes) -> InferInput:
    tensor = InferInput("image", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[photo]], dtype=np.object_))
    return tensor


def pixel_input(values: np.ndarray, binary: bool) -> InferInput:
    tensor = InferInput("pixel_values", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values, binary_data=binary)
    return tensor


async def main(url: str, photo: bytes, values: np.ndarray) -> dict:
    async with InferenceRESTClient(RESTConfig(protocol="v2")) as client:

        async def infer(model, tensor, outputs=(), **options):
            requested_outputs = [RequestedOutput(name, parameters) for name, parameters in outputs]
            request = InferRequest(model, [tensor], request_outputs=requested_outputs, **options)
            return await client.infer(url, request, model_name=model)

        async def scores(model, tensor, output="scores", **options):
            answer = await infer(model, tensor, **options)
            found = next(each for each in answer.outputs if each.name == output)
            return found.as_numpy().tolist()

        async def complaint(model, tensor, **options):
            try:
                await infer(model, tensor, **options)
            except httpx.HTTPStatusError as error:
                return [error.response.status_code, str(error)]
            return None

        image = image_input(photo)
        binary = {"binary_data_output": True}
        best = [("scores", {"classification": 2, "binary_data": True})]
        several = [("flowers", {"binary_data": True}), ("cifar10@1", None), ("base", None)]
        identified = await infer("cifar10", image, request_id="seven")
        together = await infer("multitask", image, several)
        labels = await infer("cifar10", image, best)
        return {
            "live": await client.is_server_live(url),
            "ready": await client.is_server_ready(url),
            "models": {
                name: await client.is_model_ready(url, name)
                for name in ("cifar10", "cifar10@1", "base", "multitask", "nothing")
            },
            "identified": [identified.id, identified.model_name],
            "image": await scores("cifar10", image),
            "image_binary_output": await scores("cifar10", image, parameters=binary),
            "pixel_values": await scores("cifar10", pixel_input(values, True), parameters=binary),
            "pixel_values_json": await scores("cifar10", pixel_input(values, False)),
            "version": await scores("cifar10@1", image),
            "classification": labels.outputs[0].as_numpy().tolist(),
            "several": {each.name: each.as_numpy().tolist() for each in together.outputs},
            "unknown_model": await complaint("cifar11", image),
            "unknown_task": await complaint("multitask", image, outputs=[("cifar11", None)]),
            "unknown_output": await complaint("cifar10", image, outputs=[("logits", None)]),
            "no_image": await complaint("cifar10", image_input(b"no image")),
            "wrong_shape": await complaint("cifar10", pixel_input(values[:, :, :8], True)),
        }


if __name__ == "__main__":
    address, photo_file, values_file = sys.argv[1:]
    found = asyncio.run(main(address, Path(photo_file).read_bytes(), np.load(values_file)))
    print(json.dumps(found))
