"""One image of a source to pixels, within the server's limits."""

import hashlib
from dataclasses import dataclass
from functools import partial

from engram_server.batch.sources import Source
from engram_server.engine.observer import EngineObserver
from engram_server.engine.predictions import DecodingMemory, decoding_limit
from engram_server.engine.types import EngineConfig
from engram_server.errors import ImageError
from engram_server.model.preprocessing import Preprocessing
from engram_server.model.preprocessing.decoding import open_image, upright_size
from engram_server.model.preprocessing.resizing import Pixels


@dataclass(slots=True)
class DecodedImage:
    """An image, or the reason why it has no answer. Fields that are unknown are None."""

    path: str
    digest: str | None = None
    size_bytes: int | None = None
    width: int | None = None  # upright
    height: int | None = None
    pixels: Pixels | None = None
    error: str | None = None


class Decoder:
    """Reads and decodes images. Call it from any number of threads, which share its memory."""

    def __init__(self, preprocessing: Preprocessing, config: EngineConfig) -> None:
        self._preprocessing = preprocessing
        self._config = config
        self._memory = DecodingMemory(config.decoded_bytes, EngineObserver())

    def __call__(self, source: Source, index: int) -> DecodedImage:
        image = DecodedImage(source.keys[index])
        try:
            self._decode(image, source.read(index))
        except FileNotFoundError:
            image.error = "The file does not exist."
        except OSError as error:
            image.error = f"Cannot read the file: {error.strerror or error}."
        except ImageError as error:
            image.error = str(error)
        return image

    def _decode(self, image: DecodedImage, data: bytes) -> None:
        image.digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        image.size_bytes = len(data)
        stop = decoding_limit(self._config.decode_seconds, None, lambda: False)
        with open_image(data, stop) as header:
            image.width, image.height = upright_size(header)
        image.pixels = self._preprocessing(
            data,
            max_pixels=self._config.max_pixels,
            reserve=partial(self._memory.reserved, deadline=None),
            stop=stop,
        )
