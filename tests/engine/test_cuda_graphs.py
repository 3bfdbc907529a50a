"""Base passes in a few sizes: padded to the next one, with a capture that is a plain call."""

import pytest
import torch
from engram_server.engine.cuda_graphs import CapturedEncoder, batch_sizes, capture_on
from engram_server.model.masked_pass import encode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGEST = 5


class PlainCalls:
    """A capture without a graph: one size, and the same tensors for every result."""

    def __init__(self):
        self.captured = []
        self.replayed = []

    def __call__(self, run, example):
        size = len(example)
        self.captured.append(size)

        def replay(pixels):
            assert pixels.shape == example.shape
            self.replayed.append(size)
            return run(pixels)

        return replay


@pytest.fixture
def calls():
    return PlainCalls()


@pytest.fixture
def encoder(backbone_of, calls):
    return CapturedEncoder(backbone_of("vit"), LARGEST, calls)


def photos(backbone, count):
    shape = (count, *backbone.image_size, 3)
    random = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)


def test_sizes_are_few_and_padding_is_a_third_at_most():
    assert batch_sizes(1) == [1]
    assert batch_sizes(20) == [1, 2, 3, 4, 6, 8, 12, 16, 20]
    sizes = batch_sizes(1000)
    assert len(sizes) == 20
    for images in range(1, 1001):
        size = next(size for size in sizes if size >= images)
        assert (size - images) / size <= 1 / 3


def test_the_largest_is_captured_first(encoder, calls):
    assert calls.captured == [5, 4, 3, 2, 1]


@pytest.mark.parametrize(("images", "size"), [(1, 1), (2, 2), (5, 6), (7, 8), (8, 8), (9, 9)])
def test_a_padded_batch_gives_the_contexts_of_a_plain_one(backbone_of, calls, images, size):
    backbone = backbone_of("vit")
    encoder = CapturedEncoder(backbone, 9, calls)
    pixels = photos(backbone, images)
    got, expected = encoder(pixels), encode(backbone, pixels)
    assert calls.replayed == [size]
    assert len(got) == images
    for ours, plain in zip(tree_of(got), tree_of(expected), strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-5)


def tree_of(contexts):
    return [*contexts.states, contexts.readout, contexts.patch_attention]


def test_what_cannot_be_replayed_runs_plainly(backbone_of, encoder, calls):
    backbone = backbone_of("vit")
    too_many = photos(backbone, LARGEST + 1)
    values = torch.randn(2, 3, *backbone.image_size)  # pixel values, not bytes
    for pixels in (too_many, values):
        got, expected = encoder(pixels), encode(backbone, pixels)
        assert torch.equal(got.readout, expected.readout)
    assert calls.replayed == []


def test_nothing_is_captured_on_a_cpu():
    assert capture_on(torch.device("cpu")) is None


class HostTensors(TorchDispatchMode):
    """Counts operations that touch the memory of the host."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, result)) if torch.is_tensor(one)]
        self.found += [func for one in tensors if one.device.type == "cpu"]
        return result


@pytest.mark.parametrize("family", ["vit", "dinov3", "siglip", "clip-projection"])
def test_a_base_pass_never_waits_for_the_host(backbone_of, family):
    """A graph cannot have a copy from or to the host. A device without memory shows them all."""
    backbone = backbone_of(family).to("meta")
    pixels = photos(backbone, 2).to("meta")
    encode(backbone, pixels)  # what is set up once is there
    with HostTensors() as host:
        encode(backbone, pixels)
    assert host.found == []
