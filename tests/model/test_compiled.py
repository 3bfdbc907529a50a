import shutil
from dataclasses import replace

import pytest
import torch
from engram_server.model.masked_pass import masked_pass
from engram_server.model.tasks import StackCache, TaskWeights, base_task, prepare

from tests.bundles import bundle


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns about itself
def test_a_compiled_pass_answers_as_a_plain_one(backbone_of):
    backbone = backbone_of("vit")
    made = [bundle(seed, backbone=backbone, memory=seed) for seed in range(3)]
    tasks = [prepare(backbone, TaskWeights.from_bundle(each)) for each in made]
    requested = [tasks, [tasks[0], base_task(backbone)], []]
    for images in (3, 2):  # the second batch has another shape and must not need another start
        pixels = torch.randn(images, 3, *backbone.image_size)
        with torch.no_grad():
            plain = masked_pass(backbone, pixels, None, requested[:images], StackCache())
            compiled = masked_pass(
                replace(backbone, compiled=True), pixels, None, requested[:images], StackCache()
            )
        for expected, got in zip(plain.logits, compiled.logits, strict=True):
            assert got.images == expected.images
            assert (got.values - expected.values).abs().max() < 1e-4
