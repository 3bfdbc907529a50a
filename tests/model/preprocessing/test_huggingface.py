import json

import pytest
from engram_server.errors import BackboneError
from engram_server.model.preprocessing.huggingface import from_folder, from_huggingface

from tests.model.preprocessing.configurations import CONFIGS, PROCESSORS, pair


@pytest.mark.parametrize(
    "name",
    [
        "CLIPImageProcessor",
        "CLIPImageProcessorFast",
        "CLIPImageProcessorPil",
        "CLIPFeatureExtractor",
    ],
)
def test_old_and_new_class_names_mean_the_same(name):
    for key in ("image_processor_type", "feature_extractor_type"):
        assert from_huggingface({key: name}) == pair("clip")[0]


def test_null_means_the_default():
    nothing = dict.fromkeys(("size", "resample", "image_mean", "image_std", "rescale_factor"))
    config = {"image_processor_type": "ViTImageProcessor", **nothing}
    assert from_huggingface(config) == pair("vit")[0]


def test_missing_keys_take_the_defaults_of_the_class():
    vit, deit, clip, bit, siglip = (
        from_huggingface({"image_processor_type": name}) for name in PROCESSORS
    )
    assert (vit.resize, vit.crop, vit.resample) == ((224, 224), None, "bilinear")
    assert (deit.resize, deit.crop, deit.resample) == ((256, 256), (224, 224), "bicubic")
    assert (clip.resize, clip.crop, clip.resample) == (224, (224, 224), "bicubic")
    assert (siglip.resize, siglip.crop, siglip.resample) == ((224, 224), None, "bicubic")
    assert bit == clip
    assert vit.mean == deit.std == (0.5, 0.5, 0.5)
    assert clip.rescale == 1 / 255


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"image_processor_type": "ConvNextImageProcessor"}, "ConvNextImageProcessor"),
        ({"image_processor_type": None}, "has no image_processor_type"),
        ({"do_pad": True}, "do_pad"),
        ({"use_square_size": True}, "use_square_size"),
        ({"size": {"longest_edge": 300}}, "longest_edge"),
        ({"size": {"shortest_edge": 200, "longest_edge": 300}}, "longest_edge"),
        ({"size": {"height": 224}}, "height"),
        ({"size": {}}, "size"),
        ({"size": "224"}, "size is '224'"),
        ({"size": [1, 2, 3]}, "height and a width"),
        ({"size": 0}, "resize"),
        ({"size": True}, "size"),
        ({"size": 10**9}, "resize.*less than or equal to 4096"),
        ({"size": 224.5}, "size"),
        ({"do_center_crop": True}, "no crop_size"),
        ({"do_center_crop": True, "crop_size": {"shortest_edge": 3}}, "crop_size"),
        ({"resample": 9}, "resample is 9"),
        ({"resample": "bicubic"}, "resample is 'bicubic'"),
        ({"image_mean": [0.5, 0.5]}, "image_mean.*three numbers"),
        ({"image_mean": "grey"}, "image_mean"),
        ({"image_mean": [0.5, 0.5, float("nan")]}, "mean"),
        ({"image_std": [0.5, 0.0, 0.5]}, "std"),
        ({"image_std": [0.5, None, 0.5]}, "image_std"),
        ({"rescale_factor": 0}, "rescale"),
        ({"rescale_factor": 10**400}, "rescale_factor"),
    ],
)
def test_unsupported_configuration_is_refused_in_words(keys, words):
    with pytest.raises(BackboneError, match=words):
        from_huggingface({"image_processor_type": "ViTImageProcessor", **keys})


def test_folder_is_read(tmp_path):
    assert from_folder(tmp_path) is None
    config = {"image_processor_type": "DeiTImageProcessor"}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    assert from_folder(tmp_path) == pair("deit")[0]
    nested = {"image_processor": {"image_processor_type": "CLIPImageProcessor"}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert from_folder(tmp_path) == pair("clip")[0]


def test_folder_without_a_class_name_takes_that_of_the_family(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": 98}))
    with pytest.raises(BackboneError, match="has no image_processor_type"):
        from_folder(tmp_path)
    stored = from_folder(tmp_path, "BitImageProcessor")
    assert (stored.resize, stored.crop, stored.resample) == (98, (224, 224), "bicubic")


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_broken_file_in_a_folder_is_named(tmp_path, text):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(BackboneError, match=r"preprocessor_config\.json"):
        from_folder(tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_saved_by_hugging_face_reads_back_the_same(name, tmp_path):
    ours, processor = pair(name)
    processor.save_pretrained(tmp_path)
    assert from_folder(tmp_path) == ours
