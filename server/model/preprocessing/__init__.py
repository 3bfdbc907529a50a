"""From the bytes of an image to what the backbone was trained on (`pipeline`)."""

from server.model.preprocessing.decoding import ImageHeader, read_header
from server.model.preprocessing.pipeline import FILTERS, Preprocessing, Resample

__all__ = ["FILTERS", "ImageHeader", "Preprocessing", "Resample", "read_header"]
