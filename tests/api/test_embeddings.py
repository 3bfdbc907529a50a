"""`/v1/embeddings`: OpenAI's shape, with images."""

import base64

import numpy as np
import pytest
import torch
from engram_server.api.routes.embeddings import EmbeddingList
from engram_server.model.masked_pass import encode

from tests.api.conftest import assert_problem
from tests.serving import photo

BACKBONE = "vit-tiny-random"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def embed(client, *images: bytes, model: str = BACKBONE, **members) -> dict:
    body = {"model": model, "input": [b64(image) for image in images], **members}
    response = client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    EmbeddingList.model_validate(response.json())
    return response.json()


def unit(values) -> np.ndarray:
    return np.asarray(values) / np.linalg.norm(values)


def test_the_backbone_embeds_images_by_its_feature(client, world, cat):
    answer = embed(client, cat, photo(3))
    pixels = np.stack(
        [world.backbone.preprocessing(each, max_pixels=None) for each in (cat, photo(3))]
    )
    expected = encode(world.backbone, torch.from_numpy(pixels)).readout[:, : world.backbone.width]
    assert [each["index"] for each in answer["data"]] == [0, 1]
    for each, feature in zip(answer["data"], expected.numpy(), strict=True):
        assert each["embedding"] == pytest.approx(unit(feature).tolist(), abs=2e-3)
    tokens = 2 * world.backbone.geometry.tokens
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize("task", ["pets", "face"])
def test_a_task_embeds_images_as_predictions_do(client, cat, task):
    response = client.post(f"/predict?tasks={task}&return=embedding", content=cat)
    if task == "face":  # its output is an embedding
        response = client.post(f"/predict?tasks={task}", content=cat)
    expected = unit(response.json()["images"][0]["tasks"][task]["embedding"])
    (found,) = embed(client, cat, model=f"{task}@1")["data"]
    assert found["embedding"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_embeddings_in_base64_are_the_same_numbers(client, cat):
    (as_list,) = embed(client, cat)["data"]
    (as_text,) = embed(client, cat, encoding_format="base64")["data"]
    values = np.frombuffer(base64.b64decode(as_text["embedding"]), "<f4")
    assert values.tolist() == pytest.approx(as_list["embedding"], abs=1e-4)


def test_one_image_may_be_a_data_url(client, cat):
    body = {"model": BACKBONE, "input": f"data:image/jpeg;base64,{b64(cat)}", "user": "ada"}
    assert len(client.post("/v1/embeddings", json=body).json()["data"]) == 1


@pytest.mark.parametrize(
    ("members", "status", "name", "words"),
    [
        ({"input": "a cat"}, 422, "invalid-request", "does not embed text"),
        ({"input": "data:image/jpeg,abc"}, 422, "invalid-request", "must be in base64"),
        ({"input": [""]}, 422, "invalid-request", "Input 0 is empty"),
        ({"input": []}, 422, "invalid-request", "input"),
        ({"input": [b64(b"no image")]}, 422, "unreadable-image", "Input 0"),
        ({"model": "nothing"}, 404, "unknown-task", "nothing"),
        ({"dimensions": 3}, 422, "invalid-request", "does not support 3"),
        ({"encoding_format": "int8"}, 422, "invalid-request", "encoding_format"),
    ],
    ids=str,
)
def test_mistakes_are_explained(client, cat, members, status, name, words):
    body = {"model": BACKBONE, "input": [b64(cat)], **members}
    problem = assert_problem(client.post("/v1/embeddings", json=body), status, name)
    assert words in problem["detail"]


def test_too_many_images_are_rejected(client, cat):
    body = {"model": BACKBONE, "input": [b64(photo(seed)) for seed in range(5)]}
    assert client.post("/v1/embeddings", json=body).status_code in (413, 422)
