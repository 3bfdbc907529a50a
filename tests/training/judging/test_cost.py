"""Costs, against counts by hand and by the formulas of the paper's Table 5."""

import pytest
import torch
from transformers import ViTConfig, ViTModel

from server.model import TaskWeights, load_backbone
from training.judging.cost import cost_of, task_parameters


def weights(layers, width, outputs, memory, token=True):
    return TaskWeights(
        torch.zeros(outputs, width),
        torch.zeros(outputs),
        torch.zeros(width) if token else None,
        torch.zeros(layers, memory, width) if memory else None,
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The proportions of a ViT-B/16 at 224 px, in two layers and a quarter of its width."""
    config = ViTConfig(
        hidden_size=192, num_hidden_layers=2, num_attention_heads=3, intermediate_size=768
    )
    folder = tmp_path_factory.mktemp("vit")
    ViTModel(config).save_pretrained(folder)
    return load_backbone(folder)


def test_parameters_are_memory_token_and_head(small):
    assert cost_of(small, weights(2, 192, 100, 5)).parameters == 192 * 2 * 5 + 192 + 192 * 100
    assert cost_of(small, weights(2, 192, 100, 0)).parameters == 192 + 192 * 100
    assert cost_of(small, weights(2, 192, 100, 0, token=False)).parameters == 192 * 100


def test_flops_are_two_for_each_product_of_every_matrix(small):
    tokens, width = 197, 192
    row = 12 * width * width  # qkv, out and the two of the MLP
    attention = 2 * tokens * width  # scores and sums
    expected = 2 * (196 * 768 * width + 2 * tokens * (row + attention))
    cost = cost_of(small, weights(2, 192, 100, 5))
    assert cost.backbone_flops == expected
    own = 2 * 2 * (row + 2 * (tokens + 1 + 5) * width) + 2 * width * 100
    assert cost.task_flops == own
    assert cost.share == pytest.approx(1 / 197, rel=0.2)


def test_a_head_alone_adds_its_product_only(small):
    assert cost_of(small, weights(2, 192, 10, 0, token=False)).task_flops == 2 * 192 * 10


def test_parameters_are_counted_as_the_paper_does():
    assert task_parameters(12, 768, 5, 100, row=True) == 768 * 12 * 5 + 768 + 768 * 100
    assert task_parameters(12, 768, 0, 100, row=False) == 768 * 100
