"""What the tests of deployed files share."""

import pytest
from engram_server.settings import PREFIX, Settings


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """No variable of the machine the tests run on."""
    for name in Settings.model_fields:
        monkeypatch.delenv(f"{PREFIX}{name.upper()}", raising=False)
