"""Class names as heads, against Hugging Face's own image-text logits."""

import json
import shutil

import numpy as np
import pytest
import torch
import transformers
from engram_server.errors import BrokenCheckpoint, NoTextTower, UnteachableExamples
from engram_server.model import MultiTaskViT, TaskWeights, load_backbone
from engram_server.model.families.text_tower import TEXT_FAMILIES, open_text_tower
from transformers import CLIPModel

from tests.families import build, image_batch, save
from tests.texts import text_folder

BUILT = {"clip": "clip", "metaclip_2": "metaclip2", "siglip": "siglip"}  # as in tests.families
CLASSES = ["a photo of a beach", "a forest", "snow"]


@pytest.fixture(params=sorted(TEXT_FAMILIES))
def folder(request, tmp_path):
    return text_folder(BUILT[request.param], tmp_path / request.param)


@pytest.fixture
def clip(tmp_path):
    return text_folder("clip", tmp_path / "clip")


def weights_of(head):
    def tensor(array):
        return None if array is None else torch.from_numpy(array)

    return TaskWeights(
        tensor(head.weight),
        tensor(head.bias),
        normalised=True,
        head_projection=tensor(head.projection),
    )


def unmodified_logits(folder, texts, pixels):
    """What the model itself says of images and texts, (images, texts)."""
    family = TEXT_FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]]
    model = getattr(transformers, family.model).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    most = model.config.text_config.max_position_embeddings
    tokens = tokenizer(texts, padding=family.padding, max_length=most, return_tensors="pt")
    with torch.no_grad():
        return model(pixel_values=pixels, **tokens).logits_per_image


def answers(folder, head, pixels):
    model = MultiTaskViT(load_backbone(folder))
    model.add("scene", weights_of(head))
    return model(pixels, tasks=["scene"])["scene"]


def test_logits_are_the_models_own(folder):
    pixels = image_batch(build("clip"), 5)
    head = open_text_tower(folder).read(CLASSES)
    expected = unmodified_logits(folder, CLASSES, pixels)
    torch.testing.assert_close(answers(folder, head, pixels), expected, rtol=1e-4, atol=1e-4)
    assert head.labels == tuple(CLASSES)


def test_templates_are_averaged_as_unit_vectors(clip):
    pixels = image_batch(build("clip"), 3)
    templates = ["a photo of the {} .", "a painting of a {}"]
    head = open_text_tower(clip).read(["beach", "snow"], templates)
    model = CLIPModel.from_pretrained(clip).eval()
    scale = model.logit_scale.exp()
    cosines = [
        unmodified_logits(clip, [one.replace("{}", name) for name in head.labels], pixels) / scale
        for one in templates
    ]
    units = [
        unit_texts(clip, model, [one.replace("{}", name) for one in templates])
        for name in head.labels
    ]
    lengths = torch.stack([unit.mean(dim=0).norm() for unit in units])
    expected = scale * torch.stack(cosines).mean(dim=0) / lengths
    torch.testing.assert_close(answers(clip, head, pixels), expected.detach(), rtol=1e-4, atol=1e-4)


def unit_texts(folder, model, texts):
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        texts, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        embedded = model.get_text_features(**tokens).pooler_output
    return embedded / embedded.norm(dim=-1, keepdim=True)


def test_one_template_is_the_same_as_the_whole_texts(clip):
    tower = open_text_tower(clip)
    by_template = tower.read(["beach", "snow"], ["a photo of a {}"])
    by_text = tower.read(["a photo of a beach", "a photo of a snow"])
    assert by_template.labels == ("beach", "snow")
    assert np.allclose(by_template.weight, by_text.weight, rtol=1e-6)


def test_a_vision_tower_alone_reads_no_names(folder_of):
    for family in ("vit", "clip-vision", "clip-projection"):
        assert open_text_tower(folder_of(family)) is None
    assert open_text_tower("no/such-model") is None


@pytest.mark.parametrize(
    ("classes", "templates", "says"),
    [
        (["beach", "beach"], [], "'beach' is listed twice"),
        (["beach", " "], [], "name is empty"),
        (["beach", "snow"], ["a photo"], "'a photo' has no place"),
        (["beach", "a a a a a a a a a"], [], "11 tokens; the text tower reads at most 8"),
    ],
)
def test_names_that_cannot_be_read_are_refused(clip, classes, templates, says):
    with pytest.raises(UnteachableExamples, match=says):
        open_text_tower(clip).read(classes, templates)


def test_a_folder_without_a_tokenizer_says_so(tmp_path):
    folder = save(build("clip"), tmp_path / "clip")
    with pytest.raises(NoTextTower, match="tokenizer"):
        open_text_tower(folder).read(CLASSES)


def test_a_checkpoint_without_the_text_towers_weights_is_refused(clip, folder_of):
    shutil.copy(folder_of("clip-vision") / "model.safetensors", clip / "model.safetensors")
    with pytest.raises(BrokenCheckpoint, match="text"):
        open_text_tower(clip).read(CLASSES)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_names_are_read_in_float32_whatever_the_file_keeps(clip, tmp_path, dtype):
    model = CLIPModel.from_pretrained(clip).to(dtype)
    folders = [shutil.copytree(clip, tmp_path / name) for name in ("half", "widened")]
    model.save_pretrained(folders[0])
    model.float().save_pretrained(folders[1])
    half, widened = (open_text_tower(folder).read(CLASSES) for folder in folders)
    assert np.array_equal(half.weight, widened.weight)
    assert np.array_equal(half.projection, widened.projection)
