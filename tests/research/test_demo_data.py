"""The data of the demo tasks: names people read, splits that share no photo, faults one can see."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from research import demo_data
from research.qt_resources import files_in
from research.quality import FAULTS, prepared, to_light


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("Tomato___Early_blight", "Tomato: early blight"),
        ("Tomato___Tomato_Yellow_Leaf_Curl_Virus", "Tomato: yellow leaf curl virus"),
        ("Pepper,_bell___healthy", "Bell pepper: healthy"),
        ("Corn_(maize)___Common_rust_", "Corn: common rust"),
        ("Grape___Esca_(Black_Measles)", "Grape: esca (black measles)"),
    ],
)
def test_leaves_are_named_as_people_write_them(folder, name):
    assert demo_data.leaf_name(folder) == name


def test_each_class_is_limited_to_the_requested_number():
    photos = [(split, name, b"") for split in ("train", "test") for name in "ab" for _ in range(5)]
    selection = list(demo_data.some_of_each(photos, 3, 1))
    assert [each[:2] for each in selection] == [
        *[("train", "a")] * 3,
        *[("train", "b")] * 3,
        ("test", "a"),
        ("test", "b"),
    ]


def picture(seed: int = 0) -> Image.Image:
    """A picture with large and small things in it, of middling brightness."""
    rng = np.random.default_rng(seed)
    large = np.kron(rng.uniform(60, 200, (6, 8, 3)), np.ones((64, 64, 1)))
    small = np.kron(rng.uniform(-30, 30, (192, 256, 1)), np.ones((2, 2, 1)))
    return Image.fromarray(np.clip(large + small, 0, 255).astype(np.uint8))


def sharpness(photo: Image.Image) -> float:
    grey = np.asarray(photo.convert("L"), dtype=np.float32)
    return float(np.abs(np.diff(grey, axis=0)).mean() + np.abs(np.diff(grey, axis=1)).mean())


def test_every_fault_does_to_a_photo_what_it_says():
    before = prepared(picture(), np.random.default_rng(1))
    assert min(before.size) == 256
    after = {name: spoil(before, np.random.default_rng(2)) for name, spoil in FAULTS.items()}
    assert all(photo.size == before.size for photo in after.values())
    sharp, light = sharpness(before), float(to_light(before).mean())
    lit = {name: float(to_light(photo).mean()) for name, photo in after.items()}
    assert sharpness(after["sharp and well exposed"]) > 0.7 * sharp
    assert sharpness(after["out of focus"]) < 0.4 * sharp
    assert sharpness(after["motion blur"]) < 0.7 * sharp
    assert sharpness(after["noisy"]) > 1.5 * sharp
    assert lit["too dark"] < 0.2 * light
    assert lit["overexposed"] > 2 * light
    for kept in ("out of focus", "motion blur"):
        assert lit[kept] == pytest.approx(light, rel=0.05)


def jpeg(seed: int) -> bytes:
    file = io.BytesIO()
    picture(seed).save(file, "JPEG")
    return file.getvalue()


def test_quality_has_every_class_in_both_splits_and_is_the_same_again():
    originals = [("train", "", jpeg(1)), ("train", "", jpeg(2)), ("test", "", jpeg(3))]
    once, again = (list(demo_data.quality_photos(originals, 2, 1)) for _ in range(2))
    assert once == again
    assert {each[:2] for each in once} == {(s, name) for s in ("train", "test") for name in FAULTS}
    assert len(once) == 3 * len(FAULTS)


def test_photos_are_written_into_folders_of_split_and_class(tmp_path):
    photos = [("train", "a", jpeg(1)), ("train", "a", jpeg(2)), ("test", "b: c", jpeg(3))]
    assert demo_data.write(photos, tmp_path) == {"train": 2, "test": 1}
    found = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jpg"))
    assert found == ["test/b: c/0000.jpg", "train/a/0000.jpg", "train/a/0001.jpg"]


def test_photos_the_console_shows_are_found_in_its_table(tmp_path):
    table = tmp_path / "README.md"
    table.write_text("| `dog.jpg` | Debian `gcompris-qt-data`, `erase/dog.webp`, cropped |\n")
    assert demo_data.shown_samples(table) == {"erase/dog.webp"}


def test_a_file_in_a_qt_resource_is_read(tmp_path):
    names = b"".join(
        struct.pack(">HI", len(name), 0) + name.encode("utf-16-be") for name in ("photos", "a.webp")
    )
    second = 6 + 2 * len("photos")
    rows = [(0, 2, 1, 1), (0, 2, 1, 2), (second, 0, 0, 0)]  # root, folder, file
    tree = b"".join(struct.pack(">IHIIQ", *row, 0) for row in rows)
    data = struct.pack(">I", 5) + b"pixel"
    head = struct.pack(">4sIIII", b"qres", 2, 20, 20 + len(tree), 20 + len(tree) + len(data))
    path = tmp_path / "some.rcc"
    path.write_bytes(head + tree + data + names)
    assert list(files_in(path)) == [("/photos/a.webp", b"pixel")]
    path.write_bytes(b"zzzz" + head[4:])
    with pytest.raises(ValueError, match="no Qt resource"):
        list(files_in(path))
