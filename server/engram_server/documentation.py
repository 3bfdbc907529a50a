"""The address of the documentation, for messages and the OpenAPI document."""

from typing import Final

# The `Documentation` of [project.urls] in pyproject.toml; a test compares them.
SITE: Final = "https://engram-vit.github.io/engram/latest"
OPEN_INFERENCE: Final = f"{SITE}/reference/open-inference.html"
BUNDLE_FORMAT: Final = f"{SITE}/reference/bundle-format.html"
CONFIGURATION: Final = f"{SITE}/reference/configuration.html"
