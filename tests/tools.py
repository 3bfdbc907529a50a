"""Programs that are not Python's, and that some tests drive."""

import os
import shutil
import sys
from pathlib import Path

import pytest

INSTALLER = "scripts/install-test-tools.sh"


def find_tool(name: str) -> Path:
    """The program, or a skip; on CI, where it was installed for this, a failure."""
    # Azurite is beside Python, and Debian keeps servers where only root's PATH looks.
    places = [str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        reason = f"there is no {name} here: {INSTALLER} installs it"
        if os.environ.get("REQUIRE_TEST_TOOLS"):
            pytest.fail(reason)
        pytest.skip(reason)
    return Path(found)
