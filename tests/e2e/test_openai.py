"""OpenAI's own client, as it comes from PyPI, and ours: embeddings of a real server process."""

import asyncio
import base64

import openai
import pytest
from engram_vit import AsyncClient, Client
from engram_vit.errors import ImageError

from tests.conftest import PHOTOS

pytestmark = pytest.mark.slow

PATHS = [PHOTOS / f"{name}.jpg" for name in ("cat", "dog", "castle")]


def data_url(path) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("encoding", [openai.omit, "float", "base64"], ids=str)
def test_openais_client_gets_embeddings(embedded_server, encoding):
    with openai.OpenAI(base_url=f"{embedded_server.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(
            model="engram-mini", input=[data_url(path) for path in PATHS], encoding_format=encoding
        )
    assert [each.index for each in answer.data] == [0, 1, 2]
    if encoding != "base64":  # which it decodes only if it chose it itself
        cat, dog, _ = (each.embedding for each in answer.data)
        assert len(cat) == 192
        assert cosine(cat, cat) == pytest.approx(1, abs=1e-4)
        assert cosine(cat, dog) < 0.9


def test_openais_client_reports_what_is_wrong(embedded_server):
    with openai.OpenAI(base_url=f"{embedded_server.url}/v1", api_key="none") as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.embeddings.create(model="nothing", input=data_url(PATHS[0]))
        with pytest.raises(openai.UnprocessableEntityError) as text:
            client.embeddings.create(model="engram-mini", input="a cat")
    assert "'nothing'" in unknown.value.response.json()["detail"]
    assert "does not embed text" in text.value.response.json()["detail"]


async def embed_async(url: str) -> list[list[float]]:
    async with AsyncClient(url) as client:
        return await client.embed(PATHS)


def test_our_client_embeds_by_backbone_and_by_task(embedded_server):
    with Client(embedded_server.url) as client:
        by_backbone, by_task = client.embed(PATHS), client.embed(PATHS, "cifar10")
        with pytest.raises(ImageError, match="digest"):
            client.embed(f"sha256:{'0' * 64}")
    assert [len(one) for one in by_backbone + by_task] == [192] * 6
    assert cosine(by_backbone[0], by_backbone[0]) == pytest.approx(1, abs=1e-4)
    assert cosine(by_task[0], by_backbone[0]) < 0.99


def test_the_async_client_embeds_too(embedded_server):
    assert len(asyncio.run(embed_async(embedded_server.url))) == 3
