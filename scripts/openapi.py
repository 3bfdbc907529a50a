"""Write the OpenAPI documents to a folder: `python -m scripts.openapi FOLDER`.

`openapi.json` is OpenAPI 3.1, `openapi-3.0.json` the same as 3.0.3. A server has both under these
names.
"""

import sys
from pathlib import Path

from engram_server.api.openapi import Documents
from engram_server.app import create_app
from engram_server.settings import load_settings

FILES = {"openapi.json": "3.1", "openapi-3.0.json": "3.0"}


def write(folder: Path) -> None:
    """Write both documents; neither depends on the settings of a server."""
    documents: Documents = create_app(load_settings(store="memory://")).state.documents
    folder.mkdir(parents=True, exist_ok=True)
    for name, version in FILES.items():
        (folder / name).write_bytes(documents.encoded(version))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("Usage: python -m scripts.openapi FOLDER")
    write(Path(sys.argv[1]))
