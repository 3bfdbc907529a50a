"""Tasks on every device, and golden examples answered as they should be."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engram_bundle import GOLDEN_TOLERANCE
from engram_server.engine.tasks.loader import HALF_PRECISION_TOLERANCE, INT8_TOLERANCE, check_golden
from engram_server.errors import TaskMismatch
from engram_server.model.lora import target_sizes

from tests.bundles import with_tensors
from tests.engine.bundles import expected_logits, make_bundle, random_pixels
from tests.engine.tasks.lab import CPU, SECOND, Lab


def test_every_device_gets_its_own_tensors(lab, backbone):
    it = lab(devices=(CPU, SECOND))
    parent = it.publish("parent", 1, golden=1)
    child = it.publish("child", 2, parents=[parent])
    it.sync()
    tasks = it.resident("parent", "child", "base")
    for task in tasks.values():
        assert list(task.on) == [CPU, SECOND]
        assert task.on[CPU] is not task.on[SECOND]
    assert tasks["child"].on[SECOND].ancestors == (tasks["parent"].on[SECOND],)
    pixels = random_pixels(backbone, 2)
    expected = expected_logits(backbone, child, pixels, [parent])
    for device in (CPU, SECOND):
        got = it.runner.run(tasks["child"], pixels, device)
        np.testing.assert_allclose(got, expected, atol=1e-4)
    assert it.residency.nbytes == 2 * it.size_of_one(), "the budget counts one device"


def test_golden_mismatch_fails_and_says_by_how_much(lab, backbone):
    it = lab()
    good = make_bundle(backbone, 1, golden=2)
    swapped = good.manifest.model_copy(update={"placement": "post_norm"})
    it.store.publish("wrong", replace(good, manifest=swapped))
    it.store.publish("right", good)
    assert it.sync().ready_names == ("base", "right")
    reason = it.state("wrong@1").reason
    assert "golden answers differ by" in reason
    assert "preprocessing" in reason


def test_an_adapter_is_served_and_its_golden_answers_are_replayed(lab, backbone):
    it = lab()
    targets = target_sizes(backbone)
    parent = make_bundle(backbone, 1, golden=2, targets=targets, rank=3)
    child = make_bundle(backbone, 2, golden=2, parents=[parent], targets={"up": targets["up"]})
    wrong = with_tensors(parent, {"lora.down.b": -parent.lora["down"][1]})
    for name, bundle in (("parent", parent), ("child", child), ("wrong", wrong)):
        it.store.publish(name, bundle)
    assert it.sync().ready_names == ("base", "child", "parent")
    assert "golden answers differ by" in it.state("wrong@1").reason
    pixels = random_pixels(backbone, 2)
    for name, bundle, parents in (("parent", parent, []), ("child", child, [parent])):
        got = it.runner.run(it.resident(name)[name], pixels, CPU)
        np.testing.assert_allclose(
            got, expected_logits(backbone, bundle, pixels, parents), atol=1e-4
        )


@pytest.mark.parametrize(
    ("error", "scale", "tolerance", "fits"),
    [
        (0.9e-3, 1.0, GOLDEN_TOLERANCE, True),
        (1.1e-3, 1.0, GOLDEN_TOLERANCE, False),
        (0.9e-3, 0.01, GOLDEN_TOLERANCE, True),
        (9e-3, 10.0, GOLDEN_TOLERANCE, True),
        (4e-2, 1.0, HALF_PRECISION_TOLERANCE, True),
        (6e-2, 1.0, HALF_PRECISION_TOLERANCE, False),
        (float("nan"), 1.0, HALF_PRECISION_TOLERANCE, False),
        (0.19, 1.0, INT8_TOLERANCE, True),
        (0.21, 1.0, INT8_TOLERANCE, False),
    ],
)
def test_golden_tolerance_is_relative_to_the_largest_logit(error, scale, tolerance, fits):
    expected = np.array([[scale, -scale / 2]], dtype=np.float32)
    got = expected + np.array([[0, error]], dtype=np.float32)
    if fits:
        check_golden(got, expected, tolerance)
        return
    with pytest.raises(TaskMismatch):
        check_golden(got, expected, tolerance)


def test_half_precision_devices_get_the_wider_tolerance(backbone, store):
    it = Lab(backbone.to(dtype=torch.bfloat16), store)
    it.store.publish("half", make_bundle(backbone, 1, golden=2))
    assert it.sync().ready_names == ("base", "half")
