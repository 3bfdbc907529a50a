"""What images may be, and what is sent for each."""

import io
import subprocess
import sys
from importlib.util import find_spec

import httpx
import numpy as np
import pytest
from engram_server.model.preprocessing import Preprocessing
from engram_vit import Client
from engram_vit.errors import UsageError
from engram_vit.images import InputSize, load, walk
from PIL import Image

from tests.client.fake_server import Fake
from tests.model.image_files import HEIC, assert_same_pixels

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (90, 140, 3), dtype=np.uint8)
SHORTEST = {"resize": 48, "resample": "bicubic", "crop": (32, 32)}
EXACT = {"resize": (32, 40), "resample": "bilinear", "crop": None}


def saved(image, kind="PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def size_of(view) -> InputSize:
    return InputSize(view["resize"], view["resample"])


def seen_by_server(data: bytes, view) -> np.ndarray:
    """The pixels that the server's own preprocessing makes of a file."""
    preprocessing = Preprocessing(**view, rescale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    return preprocessing(data, max_pixels=None)


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(Image.fromarray(PIXELS), "JPEG", exif=exif, quality=95)


def transparent() -> Image.Image:
    alpha = RNG.integers(0, 256, PIXELS.shape[:2], dtype=np.uint8)
    return Image.fromarray(np.dstack([PIXELS, alpha]))


FILES = {
    "RGB": saved(Image.fromarray(PIXELS)),
    "JPEG": saved(Image.fromarray(PIXELS), "JPEG"),
    "grey": saved(Image.fromarray(PIXELS[:, :, 0])),
    "palette": saved(Image.fromarray(PIXELS).convert("P")),
    "transparent": saved(transparent()),
    "CMYK": saved(Image.fromarray(PIXELS).convert("CMYK"), "TIFF"),
    "16 bits": saved(Image.fromarray(PIXELS[:, :, 0].astype(np.uint16) * 200)),
    "float": saved(Image.fromarray(PIXELS[:, :, 0].astype(np.float32)), "TIFF"),
    **{f"turned {number}": turned(number) for number in (3, 6, 7)},
}


@pytest.mark.parametrize("view", [SHORTEST, EXACT], ids=["shortest edge", "exact size"])
@pytest.mark.parametrize("kind", FILES)
def test_an_encoded_image_is_seen_as_the_file_itself(kind, view):
    data = FILES[kind]
    expected = seen_by_server(data, view)
    with Image.open(io.BytesIO(data)) as image:
        sent = load(image, size_of(view), shrink=False)
    assert_same_pixels(seen_by_server(sent, view), expected.astype(int), view["resample"])
    shrunk = load(data, size_of(view), shrink=True)
    assert_same_pixels(seen_by_server(shrunk, view), expected.astype(int), view["resample"])
    assert len(shrunk) <= len(data)


@pytest.mark.parametrize("channels", [None, 1, 3, 4])
@pytest.mark.parametrize("pillow", [True, False], ids=["with Pillow", "without"])
def test_an_array_is_seen_as_its_picture(channels, pillow, monkeypatch):
    array = RNG.integers(0, 256, (60, 80, *([channels] if channels else [])), dtype=np.uint8)
    picture = saved(Image.fromarray(array[:, :, 0] if channels == 1 else array))
    if not pillow:
        monkeypatch.setattr("engram_vit.images.find_spec", lambda name: None)
    sent = load(array, size_of(EXACT), shrink=False)
    expected = seen_by_server(picture, EXACT).astype(int)
    assert_same_pixels(seen_by_server(sent, EXACT), expected, EXACT["resample"])
    with Image.open(io.BytesIO(sent)) as image:
        assert image.size == ((40, 32) if pillow else (80, 60))


def test_a_small_image_is_not_blown_up():
    small = Image.fromarray(PIXELS[:10, :10])
    with Image.open(io.BytesIO(load(small, size_of(EXACT), shrink=False))) as sent:
        assert sent.size == (10, 10)


@pytest.mark.parametrize(
    ("array", "complaint"),
    [
        (PIXELS / 255, r"array of float64 with shape \(90, 140, 3\)\. Use uint8"),
        (PIXELS.transpose(2, 0, 1), r"shape \(3, 90, 140\)"),
        (PIXELS[:0], "The image is empty"),
    ],
)
def test_an_array_that_is_not_an_image_is_an_error(array, complaint):
    with pytest.raises(Exception, match=complaint):
        raise load(array, None, shrink=False)


def test_paths_and_bytes_are_sent_as_they_are(tmp_path):
    (tmp_path / "a.png").write_bytes(FILES["RGB"])
    for image in (tmp_path / "a.png", str(tmp_path / "a.png"), FILES["RGB"]):
        assert load(image, size_of(EXACT), shrink=False) == FILES["RGB"]


def test_shrinking_leaves_alone_what_it_cannot_read():
    assert load(b"no image", size_of(EXACT), shrink=True) == b"no image"


def test_the_input_size_is_requested_once_and_only_where_it_matters():
    def paths(fake):
        return [request.url.path for request in fake.requests]

    class Counting(Fake):
        def __call__(self, request):
            if request.url.path == "/readyz":
                self.requests.append(request)
            return super().__call__(request)

    fake = Counting(size={"resize": [32, 40], "resample": "bilinear"})
    with Client("http://s", transport=httpx.MockTransport(fake), concurrency=1) as client:
        client.predict([b"bytes"] * 40)
        assert "/readyz" not in paths(fake)
        client.predict(np.stack([PIXELS] * 40))
        assert paths(fake).count("/readyz") == 1
    with Image.open(io.BytesIO(fake.image_batches[-1][0])) as sent:
        assert sent.size == (40, 32)


@pytest.mark.parametrize("size", [None, {"resize": None, "resample": "box"}, {"resize": "big"}])
def test_a_server_that_does_not_say_its_size_gets_images_in_theirs(size):
    fake = Fake(size=size)
    with Client("http://s", transport=httpx.MockTransport(fake)) as client:
        client.predict(PIXELS)
    with Image.open(io.BytesIO(fake.image_batches[0][0])) as sent:
        assert sent.size == (140, 90)


def test_shrinking_without_pillow_says_what_to_install(monkeypatch):
    monkeypatch.setattr("engram_vit.images.find_spec", lambda name: None)
    with Client("http://s") as client, pytest.raises(UsageError, match="pip install pillow"):
        client.predict(b"x", shrink=True)


def test_an_unsupported_type_is_an_error():
    with (
        Client("http://s") as client,
        pytest.raises(UsageError, match="int is not an image or a list"),
    ):
        client.predict(3)


def test_neither_numpy_nor_pillow_is_imported_for_files():
    program = (
        "import sys, httpx\n"
        "from engram_vit import AsyncClient, Client\n"
        "from tests.client.fake_server import Fake\n"
        "with Client('http://s', transport=httpx.MockTransport(Fake())) as client:\n"
        "    client.predict([b'x', b'y'])\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert not {"numpy", "PIL", "pandas", "torch"} & set(done.stdout.split())
    assert all(find_spec(name) for name in ("numpy", "PIL", "pandas")), "nothing to be seen here"


def test_a_heic_photo_is_shrunk_as_the_server_would_resize_it():
    data = HEIC.read_bytes()
    view = {**SHORTEST, "resize": 24, "crop": (24, 24)}
    sent = load(data, size_of(view), True)
    assert sent.startswith(b"\x89PNG")
    assert len(sent) < len(data)
    expected = seen_by_server(data, view).astype(int)
    assert_same_pixels(seen_by_server(sent, view), expected, view["resample"])


def test_without_a_heic_decoder_the_photo_is_sent_as_it_is(monkeypatch):
    monkeypatch.setattr("engram_vit.images.find_spec", lambda name: None)
    assert load(HEIC.read_bytes(), size_of(SHORTEST), True) == HEIC.read_bytes()


# --- folders --------------------------------------------------------------------------------------


def test_a_folder_has_every_photo_by_suffix_or_by_content(tmp_path):
    photo = saved(Image.fromarray(PIXELS))
    heic = b"\0\0\0\x18ftypheic"
    files = {
        "a.jpg": photo, "b.HEIC": heic, "c.cr2": b"x", "d": photo, "e.png~1": photo, "f": heic,
        "LICENSE": b"text", "notes.txt": photo, "clip.mp4": b"\0\0\0\x18ftypisom", "empty": b"",
        ".hidden.jpg": photo,
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    found = [path.removeprefix(f"{tmp_path}/") for path in walk(str(tmp_path))]
    assert found == ["a.jpg", "b.HEIC", "c.cr2", "d", "e.png~1", "f"]


def test_a_photo_in_an_unsupported_format_says_what_to_do(tmp_path):
    (tmp_path / "a.NEF").write_bytes(b"x")
    error = load(tmp_path / "a.NEF", None, False)
    assert str(error) == ".nef files are not supported. Convert it to JPEG or PNG."
