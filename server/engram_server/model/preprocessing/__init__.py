"""Image preprocessing: decode, resize, crop and normalise (`pipeline`)."""

from engram_server.model.preprocessing.decoding import ImageHeader, read_header
from engram_server.model.preprocessing.pipeline import Preprocessing
from engram_server.model.preprocessing.resizing import FILTERS

__all__ = ["FILTERS", "ImageHeader", "Preprocessing", "read_header"]
