"""Costs, against counts by hand and by the formulas of the paper's Table 5."""

from dataclasses import replace

import pytest
import torch
from engram_server.model import TaskWeights, load_backbone
from engram_server.model.lora import LORA_TARGETS, LoraWeight, target_sizes
from engram_training.judging.metrics import cost_of
from transformers import ViTConfig, ViTModel


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


def test_lora_adds_its_values_and_two_flops_for_each(small):
    sizes, rank = target_sizes(small), 8
    lora = {
        name: LoraWeight(torch.zeros(2, sizes[name][0], rank), torch.zeros(2, rank, sizes[name][1]))
        for name in LORA_TARGETS
    }
    values = 2 * rank * (4 * 192 + 2 * (192 + 768))
    plain = weights(2, 192, 100, 5)
    before, after = cost_of(small, plain), cost_of(small, replace(plain, lora=lora))
    assert after.parameters - before.parameters == values
    assert after.task_flops - before.task_flops == 2 * values
    assert after.backbone_flops == before.backbone_flops
