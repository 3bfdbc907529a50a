"""Mutated images: whatever a decoder makes of them, the server answers or refuses."""

import base64
import json

import pytest

from tests.fuzz.conftest import Case, run_cases
from tests.fuzz.mutator import Mutator
from tests.model.image_files import heic_files, one_of_each, random_rgb, with_orientation

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
URL = "/predict?tasks=age"
FORM = {"Content-Type": "multipart/form-data; boundary=edge"}
PART = b'--edge\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'


@pytest.fixture(scope="module")
def files() -> list[bytes]:
    picture = random_rgb(24, 30)
    return [
        *one_of_each(picture).values(),
        *heic_files().values(),
        with_orientation(picture, 6, "JPEG"),
    ]


def test_mutated_images_are_answered_or_refused(send, files):
    def run_one(number: int) -> tuple[int, object]:
        mutator = Mutator(f"image {number}")
        image = mutator.damaged(files[number % len(files)], files)
        case = Case("POST", URL, image)
        if number % 16 == 1:
            case = Case("POST", URL, PART + image + b"\r\n--edge--\r\n", FORM)
        elif number % 16 == 2:
            text = json.dumps({"images": [{"b64": base64.b64encode(image).decode()}]})
            case = Case("POST", URL, text.encode(), {"Content-Type": "application/json"})
        return send(case).status_code, case

    run_cases("images", run_one)
