"""Contexts and images that are kept: the same answers, however many fit."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import pytest
import torch
from engram_server.model import load_backbone
from engram_training.data.contexts import KeptContexts, encode
from engram_training.data.dataset import read_data
from engram_training.data.images import ImageSet
from engram_training.data.workspace import Scratch
from engram_training.fitting.loop import answers
from engram_training.fitting.variants import Variant, Variants

from tests.training.pictures import class_folders, whole_picture

PLENTY = 2**30


@pytest.fixture(scope="module")
def backbone(folder_of):
    return load_backbone(folder_of("vit"))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    data = read_data(class_folders(tmp_path_factory.mktemp("photos"), each=3))
    return [sample.path for sample in data.samples]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def scratch_of():
    """`scratch_of(budget)`, closed after the test."""
    with ExitStack() as stack:
        yield lambda *args: stack.enter_context(closing(Scratch(*args)))


def images_of(paths, backbone, scratch, pool, **options):
    images = ImageSet(paths, backbone.preprocessing, scratch, **options)
    assert images.read_all(pool) == []
    return images


def logits_of(backbone, contexts):
    variants = [Variant("memory", 2, 0.1, 0), Variant("head", 0, 0.1, 0)]
    torch.manual_seed(0)
    tasks = list(Variants(backbone, variants, 3, head_bias=torch.randn(3)).tasks().values())
    for task in tasks:
        task.head_weight.data.normal_()
    return answers(backbone, contexts, tasks).detach()


# --- contexts -------------------------------------------------------------------------------------


def test_kept_contexts_are_those_made_anew_but_for_rounding(backbone, paths, pool, scratch_of):
    scratch = scratch_of(PLENTY)
    images = images_of(paths, backbone, scratch, pool)
    kept = KeptContexts(backbone, images, scratch, rows=True)
    kept.fill(batch=5)
    assert len(kept) == 12
    contexts, order = kept.batch([7, 0, 3])
    assert order == [0, 1, 2]
    fresh = encode(backbone, images.batch([7, 0, 3]))
    for one, other in zip(contexts.states, fresh.states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        logits_of(backbone, contexts), logits_of(backbone, fresh), rtol=0, atol=0.02
    )


def test_what_does_not_fit_is_made_anew_and_answers_the_same(backbone, paths, pool, scratch_of):
    everything, some = scratch_of(PLENTY), scratch_of(PLENTY)
    images = images_of(paths, backbone, everything, pool)
    whole = KeptContexts(backbone, images, everything, rows=True)
    whole.fill(batch=4)
    record = sum(layer[:, 0].numel() * 2 for layer in encode(backbone, images.batch([0])).states)
    some._budget = 5 * (record + 64)
    part = KeptContexts(backbone, images, some, rows=True)
    part.fill(batch=4)
    assert len(part) == 5
    places = [2, 8, 4, 11]
    contexts, order = part.batch(places)
    assert order == [1, 3, 0, 2], "images made anew come first"
    expected, _ = whole.batch([places[i] for i in order])
    torch.testing.assert_close(
        logits_of(backbone, contexts), logits_of(backbone, expected), rtol=0, atol=1e-3
    )


def test_heads_alone_keep_no_keys(backbone, paths, pool, scratch_of):
    scratch = scratch_of(PLENTY)
    images = images_of(paths, backbone, scratch, pool)
    left = scratch.left
    kept = KeptContexts(backbone, images, scratch, rows=False)
    kept.fill(batch=5)
    assert len(kept) == 12
    assert scratch.left == left
    contexts, _ = kept.batch([1, 2])
    assert contexts.states == ()
    tasks = list(Variants(backbone, [Variant("head", 0, 0.1, 0)], 3).tasks().values())
    assert answers(backbone, contexts, tasks).shape == (1, 2, 3)


# --- images ---------------------------------------------------------------------------------------


def test_kept_pixels_are_the_servers_view(backbone, paths, pool, scratch_of):
    kept = images_of(paths, backbone, scratch_of(PLENTY), pool)
    decoded = images_of(paths, backbone, scratch_of(0), pool)
    for place, path in enumerate(paths):
        expected = backbone.preprocessing(path.read_bytes(), max_pixels=None)
        assert np.array_equal(kept.pixels(place), expected)
        assert np.array_equal(decoded.pixels(place), expected)


def test_views_to_train_on_do_not_depend_on_what_fits(backbone, paths, pool, scratch_of):
    kept = images_of(paths, backbone, scratch_of(PLENTY), pool, sources=True)
    decoded = images_of(paths, backbone, scratch_of(0), pool, sources=True)
    one = kept.augmented_batch([3, 1], "inception", [0, 5])
    assert torch.equal(one, decoded.augmented_batch([3, 1], "inception", [0, 5]))
    assert torch.equal(one[1:], kept.augmented_batch([1], "inception", [0, 5]))
    assert not torch.equal(one, kept.augmented_batch([3, 1], "inception", [0, 6]))


def test_large_images_are_kept_small(backbone, tmp_path, pool, scratch_of):
    whole_picture("red", 0, size=400).save(tmp_path / "large.png")
    scratch = scratch_of(PLENTY)
    images = images_of([tmp_path / "large.png"], backbone, scratch, pool, sources=True)
    assert PLENTY - scratch.left < 60 * 60 * 3
    assert images.augmented_batch([0], "clip", [0]).shape == (1, 32, 32, 3)


def test_unreadable_images_are_removed_and_named(backbone, paths, tmp_path, pool, scratch_of):
    (tmp_path / "text.png").write_text("no image")
    cut = tmp_path / "cut.png"
    cut.write_bytes(paths[0].read_bytes()[:100])
    files = [paths[0], tmp_path / "text.png", paths[1], cut, tmp_path / "gone.png", tmp_path]
    images = ImageSet(files, backbone.preprocessing, scratch_of(PLENTY))
    reported = []
    bad = images.read_all(pool, lambda done, total: reported.append((done, total)))
    assert [one.path for one in bad] == [files[1], cut, tmp_path / "gone.png", tmp_path]
    assert "text" in bad[0].reason
    assert bad[2].reason == "the file does not exist"
    assert reported[-1] == (6, 6)
    assert images.paths == paths[:2]
    expected = backbone.preprocessing(paths[1].read_bytes(), max_pixels=None)
    assert np.array_equal(images.pixels(1), expected)


# --- scratch --------------------------------------------------------------------------------------


def test_arrays_come_back_whole_and_the_file_has_no_name(tmp_path, scratch_of):
    scratch = scratch_of(PLENTY, tmp_path)
    arrays = [np.arange(n, dtype=np.float16).reshape(-1, 1) for n in (3, 1000, 70)]
    slots = [scratch.put(array) for array in arrays]
    assert list(tmp_path.iterdir()) == []
    for slot, array in zip(slots, arrays, strict=True):
        assert np.array_equal(scratch.get(slot), array)
    more = scratch.put(np.ones(10**6, dtype=np.uint8))
    assert scratch.get(more).sum() == 10**6
    assert np.array_equal(scratch.get(slots[1]), arrays[1])


def test_a_budget_holds(scratch_of):
    scratch = scratch_of(1000)
    assert scratch.put(np.zeros(800, dtype=np.uint8)) is not None
    assert scratch.put(np.zeros(800, dtype=np.uint8)) is None


def test_a_full_disk_keeps_what_was_kept(monkeypatch, scratch_of):
    scratch = scratch_of(PLENTY)
    slot = scratch.put(np.ones(10, dtype=np.uint8))

    def full(data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scratch, "_write", full)
    assert scratch.put(np.ones(10, dtype=np.uint8)) is None
    monkeypatch.undo()
    assert scratch.put(np.ones(10, dtype=np.uint8)) is None, "not tried again"
    assert scratch.get(slot).tolist() == [1] * 10
