"""The probe that judges backbones."""

import torch

from research import measure_backbone as measure


def test_a_probe_tells_separated_classes_apart_and_guesses_at_noise() -> None:
    torch.manual_seed(0)
    labels = torch.arange(4).repeat_interleave(30)
    centres = 6 * torch.eye(4, 16)
    tokens, test_tokens = (centres[labels] + torch.randn(120, 16) for _ in range(2))
    assert measure.probe(tokens, labels, test_tokens, labels) > 0.95
    assert measure.probe(torch.randn(120, 16), labels, torch.randn(120, 16), labels) < 0.5


def test_a_probe_works_with_one_image_of_each_class() -> None:
    torch.manual_seed(0)
    labels = torch.arange(4)
    tokens = 6 * torch.eye(4, 16)
    assert measure.probe(tokens, labels, tokens + 0.5 * torch.randn(4, 16), labels) == 1.0
