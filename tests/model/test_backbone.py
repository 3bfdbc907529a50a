"""Reading Hugging Face folders: what loads, what it is named by, and what is refused and why."""

import json
import shutil
import tarfile

import pytest
import torch
from engram_server.errors import BackboneError, BrokenCheckpoint, NotAVisionTransformer
from engram_server.model import MultiTaskViT, TaskWeights, load_backbone
from engram_server.model.families.registry import FAMILIES as SUPPORTED
from engram_server.model.families.registry import UNSUPPORTED
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    ResNetConfig,
    ResNetModel,
    Siglip2VisionConfig,
    Siglip2VisionModel,
    ViTForImageClassification,
)

from tests.conftest import PHOTOS
from tests.families import (
    CLASSES,
    CLASSIFIERS,
    FAMILIES,
    FAMILIES_WITH_HEAD,
    PROJECTION,
    image_batch,
    interpolating,
    save,
    trunk_of,
    unmodified_base,
    unmodified_feature,
    vision_config,
)
from tests.model.tasks import assert_same

TOLERANCE = 1e-4


@pytest.fixture
def folder(folder_of, tmp_path):
    """A copy of a saved `vit` that a test may damage."""
    return shutil.copytree(folder_of("vit"), tmp_path / "damaged-vit")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def assert_names(error, folder, *causes):
    """A message is for people: which folder, and what is wrong with it."""
    message = str(error.value)
    assert str(folder) in message
    for cause in causes:
        assert cause in message


# ---------------------------------------------------------------------------------------------
# What loads


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads(hugging_face, backbone_of, family):
    config, backbone = vision_config(hugging_face(family)), backbone_of(family)
    assert backbone.image_size == (32, 32)
    assert backbone.width == config.hidden_size
    assert backbone.layers == config.num_hidden_layers
    assert backbone.dtype == torch.float32
    assert backbone.fingerprint.startswith("sha256:")
    assert (backbone.base is not None) == (family in FAMILIES_WITH_HEAD)


@pytest.mark.parametrize("family", FAMILIES_WITH_HEAD)
def test_base_says_what_its_outputs_are(backbone_of, family):
    base = backbone_of(family).base
    if family in CLASSIFIERS:
        assert base.task_type == "single_label"
        assert base.labels == tuple(f"LABEL_{index}" for index in range(CLASSES))
    else:
        assert base.task_type == "embedding"
        width = backbone_of(family).width
        assert base.weight.shape[0] == (PROJECTION if "clip" in family else width)


def test_a_folder_without_preprocessing_loads_with_its_familys_defaults(folder_of, tmp_path):
    for family in FAMILIES:
        folder = shutil.copytree(folder_of(family), tmp_path / family)
        (folder / "preprocessor_config.json").unlink()
        assert load_backbone(folder).image_size == (32, 32)


def test_a_preprocessing_file_without_a_class_name_is_read_as_its_familys(folder_of, tmp_path):
    """As files of the first years are."""
    folder = shutil.copytree(folder_of("dinov2"), tmp_path / "unnamed")
    file = folder / "preprocessor_config.json"
    config = json.loads(file.read_text())
    assert config.pop("image_processor_type") == "BitImageProcessor"
    del config["crop_size"]  # BiT's default is 224, ViT has none
    file.write_text(json.dumps(config))
    assert load_backbone(folder).image_size == (224, 224)


@pytest.mark.parametrize("size", [48, 40, 24])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_size_interpolates_as_hugging_face_does(
    hugging_face, folder_of, family, size
):
    model = hugging_face(family)
    pixels = image_batch(model, 2, size=size)
    options = interpolating(model)
    backbone = load_backbone(folder_of(family), image_size=size)
    assert backbone.image_size == (size, size)
    fast = MultiTaskViT(backbone)
    fast.add("feature", TaskWeights(torch.eye(backbone.width)))
    got = fast(pixels)
    expected = {"feature": unmodified_feature(model, pixels, **options)}
    if family in FAMILIES_WITH_HEAD:
        expected["base"] = unmodified_base(model, pixels, **options)
    assert_same(got, expected, TOLERANCE)


@pytest.mark.parametrize("size", [(24, 48), (40, 16)])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_oblong_image_size_interpolates_too(hugging_face, folder_of, family, size):
    model = hugging_face(family)
    pixels = image_batch(model, 2, size=size)
    fast = MultiTaskViT(load_backbone(folder_of(family), image_size=size))
    fast.add("feature", TaskWeights(torch.eye(fast.backbone.width)))
    got = fast(pixels, tasks=["feature"])
    expected = unmodified_feature(model, pixels, **interpolating(model))
    assert_same(got, {"feature": expected}, TOLERANCE)


def test_an_image_smaller_than_a_patch_is_refused(folder_of):
    with pytest.raises(BackboneError) as error:
        load_backbone(folder_of("vit"), image_size=4)
    assert_names(error, folder_of("vit"), "4", "patch")


# ---------------------------------------------------------------------------------------------
# The fingerprint names what tasks depend on


# Of the models of tests/families.py, by the code that served them before other families came
# (commit 366781e): a bundle of then must still find its backbone.
FIRST_FINGERPRINTS = {
    "clip": "3f879d53abaf1952414b5cff76caa5ee1eba1c1bb3581378f8cb91bc15a37c0c",
    "clip-projection": "9acdf62af46e3c04ac2406cc7dc5cc9e7ebda87e881f039f285d08efbd23a5d0",
    "clip-vision": "9acdf62af46e3c04ac2406cc7dc5cc9e7ebda87e881f039f285d08efbd23a5d0",
    "deit": "9959020ae1a5be9488557c275332eeb4b6d4f1f15dff769cf0670b64d8c8c7d6",
    "deit-teacher": "12722fe31c2e4bc27bde9a8c380607a48a43c07193d91f171dbf6b9db90363fc",
    "dinov2": "cf666b051922a28aa19be7605c9ac4930df2ce01a9c13ddfa8ca1afb56371cc7",
    "dinov2-headless": "cf666b051922a28aa19be7605c9ac4930df2ce01a9c13ddfa8ca1afb56371cc7",
    "dinov2-registers": "986da9236c0e84d5c8bad2483a98ced7ce106f45b709091dda9dc12ed1f37e3b",
    "dinov2-swiglu": "fa8ada117450630b82a06804985551b8c07854960c89ab5dff3501c158683553",
    "vit": "5678803be677a8c9de3697e5ecacbc1f3fb622854371bca37c90fa9496c81f45",
    "vit-headless": "5678803be677a8c9de3697e5ecacbc1f3fb622854371bca37c90fa9496c81f45",
    "vit-no-qkv-bias": "ccb19b5a12198d2f7dfe85b084b242bec7fb18d871e4b00633244959cd45ec85",
}


@pytest.mark.parametrize("family", FIRST_FINGERPRINTS)
def test_fingerprints_are_what_they_were_when_there_were_four_families(backbone_of, family):
    assert backbone_of(family).fingerprint == f"sha256:{FIRST_FINGERPRINTS[family]}"


def test_fingerprints_of_different_models_differ(backbone_of):
    apart = ["vit", "vit-no-qkv-bias", "deit", "deit-teacher", "dinov2", "dinov2-swiglu"]
    apart += ["dinov2-registers", "clip", "dinov3", "siglip", "siglip-mean", "tips", "ijepa"]
    apart += ["radio"]
    prints = {backbone_of(family).fingerprint for family in apart}
    prints.add(backbone_of("vit", seed=1).fingerprint)
    assert len(prints) == len(apart) + 1


def test_fingerprint_does_not_depend_on_the_file_format(folder_of, tmp_path):
    folder = shutil.copytree(folder_of("vit"), tmp_path / "as-pickle")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert load_backbone(folder).fingerprint == load_backbone(folder_of("vit")).fingerprint


def test_fingerprint_does_not_depend_on_sharding(hugging_face, folder_of, tmp_path):
    hugging_face("vit").save_pretrained(tmp_path, max_shard_size="20KB")
    shutil.copy(folder_of("vit") / "preprocessor_config.json", tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert load_backbone(tmp_path).fingerprint == load_backbone(folder_of("vit")).fingerprint


@pytest.mark.parametrize("family", ["vit", "dinov2-registers", "clip"])
def test_fingerprint_does_not_depend_on_the_storage_dtype(folder_of, tmp_path, family):
    """Values that bfloat16 can hold, stored as bfloat16 and as float32."""
    half = shutil.copytree(folder_of(family), tmp_path / "half")
    full = shutil.copytree(folder_of(family), tmp_path / "full")
    tensors = load_file(half / "model.safetensors")
    small = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(small, half / "model.safetensors", metadata={"format": "pt"})
    large = {name: tensor.float() for name, tensor in small.items()}
    save_file(large, full / "model.safetensors", metadata={"format": "pt"})
    edit_config(half, dtype="bfloat16")
    edit_config(full, dtype="float32")
    assert load_backbone(half).dtype == torch.float32
    assert load_backbone(half).fingerprint == load_backbone(full).fingerprint
    assert load_backbone(half).fingerprint != load_backbone(folder_of(family)).fingerprint


def test_fingerprint_stays_when_the_backbone_is_moved_to_half_precision(backbone_of):
    backbone = backbone_of("vit")
    half = backbone.to(dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert half.fingerprint == backbone.fingerprint


@pytest.mark.parametrize(
    "family", [*FAMILIES_WITH_HEAD, "mae-decoder", "dinov3", "tips-vision", "radio"]
)
def test_fingerprint_is_that_of_the_trunk_alone(hugging_face, folder_of, tmp_path, family):
    headless = load_backbone(save(trunk_of(hugging_face(family)), tmp_path))
    # A SigLIP trunk pools its own embedding.
    assert (headless.base is None) != family.startswith("siglip")
    assert headless.fingerprint == load_backbone(folder_of(family)).fingerprint


def test_fingerprint_changes_with_any_weight_of_the_trunk(folder_of, folder):
    original = load_backbone(folder_of("vit")).fingerprint
    tensors = load_file(folder / "model.safetensors")
    seen = {original}
    for name in [name for name in tensors if not name.startswith("classifier")]:
        changed = {**tensors, name: tensors[name].clone()}
        changed[name].view(-1)[-1] += 0.01
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        seen.add(load_backbone(folder).fingerprint)
    assert len(seen) == len(tensors) - 2 + 1  # every change gave a new one


def test_fingerprint_changes_with_the_image_size(folder_of):
    prints = {load_backbone(folder_of("vit"), image_size=size).fingerprint for size in (32, 40, 48)}
    assert len(prints) == 3
    assert load_backbone(folder_of("vit")).fingerprint in prints


def test_fingerprint_changes_with_the_base_of_rotary_positions(backbone_of):
    other = backbone_of("dinov3", rope_theta=50.0)
    assert other.fingerprint != backbone_of("dinov3").fingerprint


@pytest.mark.parametrize("change", [{"num_attention_heads": 2}, {"layer_norm_eps": 1e-3}])
def test_fingerprint_changes_with_the_arithmetic(folder_of, folder, change):
    edit_config(folder, **change)
    assert load_backbone(folder).fingerprint != load_backbone(folder_of("vit")).fingerprint


# ---------------------------------------------------------------------------------------------
# What is refused


def test_a_missing_folder(tmp_path):
    folder = tmp_path / "nowhere"
    with pytest.raises(BackboneError) as error:
        load_backbone(folder)
    assert_names(error, folder, "does not exist")


def test_a_folder_without_a_configuration(tmp_path):
    with pytest.raises(BackboneError) as error:
        load_backbone(tmp_path)
    assert_names(error, tmp_path, "config")


def test_a_configuration_that_is_not_json(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(BackboneError) as error:
        load_backbone(folder)
    assert_names(error, folder)


def test_an_unknown_model_type_is_rejected(folder):
    edit_config(folder, model_type="perceptron-9000")
    with pytest.raises(BackboneError) as error:
        load_backbone(folder)
    assert_names(error, folder, "perceptron-9000")


def test_a_text_model_is_not_a_vision_transformer(tmp_path):
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(NotAVisionTransformer) as error:
        load_backbone(tmp_path)
    assert_names(error, tmp_path, "bert")


def test_a_convolutional_network_is_not_a_vision_transformer(tmp_path):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    ResNetModel(config).save_pretrained(tmp_path)
    with pytest.raises(NotAVisionTransformer) as error:
        load_backbone(tmp_path)
    assert_names(error, tmp_path, "resnet")


def test_a_transformer_of_images_of_any_shape(tmp_path):
    config = Siglip2VisionConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    Siglip2VisionModel(config).save_pretrained(tmp_path)
    with pytest.raises(NotAVisionTransformer) as error:
        load_backbone(tmp_path)
    assert_names(error, tmp_path, "siglip2_vision_model", "any shape", "fixed resolution")


@pytest.mark.parametrize("model_type", UNSUPPORTED)
def test_near_relatives_are_refused_by_what_is_missing(tmp_path, model_type):
    assert model_type not in SUPPORTED
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(NotAVisionTransformer) as error:
        load_backbone(tmp_path)
    assert_names(error, tmp_path, f"'{model_type}'", UNSUPPORTED[model_type])


def test_a_checkpoint_without_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(BrokenCheckpoint) as error:
        load_backbone(folder)
    assert_names(error, folder)


@pytest.mark.parametrize("part", ["layernorm.weight", "query.weight", "cls_token", "classifier"])
def test_a_checkpoint_with_a_missing_tensor(folder, part):
    def drop(tensors):
        victim = next(name for name in tensors if part in name)
        del tensors[victim]

    edit_weights(folder, drop)
    with pytest.raises(BrokenCheckpoint) as error:
        load_backbone(folder)
    assert_names(error, folder, "lacks")


def test_a_truncated_weight_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(BrokenCheckpoint) as error:
        load_backbone(folder)
    assert_names(error, folder)


def test_a_head_that_does_not_fit_the_trunk(folder):
    def narrow(tensors):
        tensors["classifier.weight"] = torch.ones(CLASSES, 31)

    edit_weights(folder, narrow)
    with pytest.raises(BrokenCheckpoint) as error:
        load_backbone(folder)
    assert_names(error, folder, "classifier", "31")


def test_a_head_with_more_rows_than_labels(folder):
    def extend(tensors):
        tensors["classifier.weight"] = torch.ones(CLASSES + 2, 32)
        tensors["classifier.bias"] = torch.ones(CLASSES + 2)

    edit_weights(folder, extend)
    with pytest.raises(BrokenCheckpoint) as error:
        load_backbone(folder)
    assert_names(error, folder, "classifier", str(CLASSES + 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "part", ["output.dense.weight", "position_embeddings", "layernorm.bias", "classifier.weight"]
)
def test_weights_that_are_not_finite(folder, part, value):
    def poison(tensors):
        victim = next(name for name in tensors if part in name)
        tensors[victim].view(-1)[0] = value

    edit_weights(folder, poison)
    with pytest.raises(BrokenCheckpoint) as error:
        load_backbone(folder)
    assert_names(error, folder, "finite")


# ---------------------------------------------------------------------------------------------
# A real model names real photos

CATS = {"Egyptian cat", "tabby", "tiger cat", "Persian cat", "Siamese cat", "lynx"}


@pytest.fixture(scope="module")
def real(shared):
    return MultiTaskViT(load_backbone(shared / "backbones" / "vit-tiny-patch16-224"))


def named(model, *photos):
    """Return the label of `base` for each image file."""
    preprocess = model.backbone.preprocessing
    pixels = [torch.as_tensor(preprocess(photo, max_pixels=None)) for photo in photos]
    top = model(torch.stack(pixels), tasks=["base"])["base"].argmax(dim=1)
    return [model.backbone.base.labels[index] for index in top.tolist()]


def test_a_cat_is_a_cat_and_coffee_is_coffee(real):
    files = [PHOTOS / name for name in ("cat.jpg", "coffee.jpg")]
    cat, coffee = named(real, *(file.read_bytes() for file in files))
    assert any(name in CATS for name in cat.split(", ")), cat
    assert coffee == "espresso"


def test_flowers_that_imagenet_knows_are_named(real, shared):
    # An artichoke in bloom looks like the cardoon it was bred from.
    expected = {"oxeye_daisy": {"daisy"}, "artichoke": {"artichoke", "cardoon"}}
    with tarfile.open(shared / "datasets" / "flowers102.tar") as tar:
        for flower, labels in expected.items():
            names = [n for n in tar.getnames() if f"test/{flower}/" in n and n.endswith(".jpg")][:4]
            photos = [tar.extractfile(name).read() for name in names]
            found = named(real, *photos)
            assert sum(label in labels for label in found) >= 3, found


def test_the_real_model_equals_hugging_face(real, shared):
    model = ViTForImageClassification.from_pretrained(
        shared / "backbones" / "vit-tiny-patch16-224"
    ).eval()
    pixels = image_batch(model, 2)
    expected = unmodified_base(model, pixels)
    assert_same(real(pixels), {"base": expected}, TOLERANCE * expected.abs().max().item())
