"""From the inputs of a request to the images the engine is asked about."""

from collections.abc import Sequence

from server.api.errors import InvalidRequest, TooManyImages
from server.api.v2.schemas import InputTensor
from server.api.v2.tensors import assign_binary, read_elements, read_floats
from server.engine.types import Floats

IMAGE = "image"
PIXEL_VALUES = "pixel_values"

_EITHER = f"give either '{IMAGE}' (BYTES, image files) or '{PIXEL_VALUES}' (FP32)"


def read_images(
    inputs: Sequence[InputTensor],
    binary: memoryview,
    image_size: tuple[int, int],
    max_images: int,
) -> list[bytes | Floats]:
    """The images: files, or pixel values (3, H, W) that go to the backbone as they are."""
    _check_names(inputs)
    given = inputs[0]
    raw = assign_binary(inputs, binary).get(given.name)
    if raw is not None and given.data is not None:
        raise InvalidRequest(f"Input '{given.name}' has both data and binary_data_size.")
    if given.name == IMAGE:
        _check_datatype(given, "BYTES")
        _check_shape(given, "[N] or [N, 1]", ([], [1]), max_images)
        files = read_elements(given, raw)
        if not all(files):
            raise InvalidRequest(f"Input '{IMAGE}' has an empty element: each is an image file.")
        return list(files)
    _check_datatype(given, "FP32")
    height, width = image_size
    _check_shape(given, f"[N, 3, {height}, {width}]", ([3, height, width],), max_images)
    return list(read_floats(given, raw))


def _check_names(inputs: Sequence[InputTensor]) -> None:
    names = [each.name for each in inputs]
    for each in inputs:
        if each.name not in (IMAGE, PIXEL_VALUES):
            raise InvalidRequest(f"There is no input '{each.name}': {_EITHER}.")
        if each.parameters.shared_memory_region is not None:
            raise InvalidRequest(
                f"Input '{each.name}' is in shared memory, which is not read here: send its data."
            )
    if len(names) != 1:
        raise InvalidRequest(f"The request has {len(names)} inputs: {_EITHER}.")


def _check_datatype(given: InputTensor, datatype: str) -> None:
    if given.datatype != datatype:
        raise InvalidRequest(
            f"Input '{given.name}' is of datatype '{given.datatype}', and must be {datatype}."
        )


def _check_shape(
    given: InputTensor, expected: str, tails: Sequence[list[int]], max_images: int
) -> None:
    if not given.shape or given.shape[1:] not in tails:
        raise InvalidRequest(
            f"Input '{given.name}' has the shape {given.shape}, and must have {expected}, where N "
            f"is the number of images."
        )
    count = given.shape[0]
    if count == 0:
        raise InvalidRequest(f"Input '{given.name}' has no image.")
    if count > max_images:
        raise TooManyImages(
            f"The request has {count} images, and at most {max_images} may be sent at once."
        )
