import shutil
from dataclasses import replace

import pytest
import torch

from server.model.masked_pass import masked_pass
from server.model.multitask import weights_of
from server.model.tasks import StackCache, base_task, prepare
from tests.bundles import bundle


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_a_compiled_pass_answers_as_a_plain_one(backbone_of):
    backbone = backbone_of("vit")
    made = [bundle(seed, backbone=backbone, memory=seed) for seed in range(3)]
    tasks = [prepare(backbone, weights_of(each)) for each in made]
    wanted = [tasks, [tasks[0], base_task(backbone)], []]
    for images in (3, 2):  # the second batch has another shape and must not need another start
        pixels = torch.randn(images, 3, *backbone.image_size)
        with torch.no_grad():
            plain = masked_pass(backbone, pixels, None, wanted[:images], StackCache())
            compiled = masked_pass(
                replace(backbone, compiled=True), pixels, None, wanted[:images], StackCache()
            )
        for expected, got in zip(plain.logits, compiled.logits, strict=True):
            assert got.images == expected.images
            assert (got.values - expected.values).abs().max() < 1e-4
