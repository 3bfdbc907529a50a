"""Programs that are not Python's, and that some tests drive."""

import os
import shutil
import sys
from pathlib import Path
from typing import NoReturn

import pytest

INSTALLER = "scripts/install-test-tools.sh"


def find_tool(name: str) -> Path:
    """The program, or a skip; on CI, where it was installed for this, a failure."""
    # Azurite is beside Python, and Debian keeps servers where only root's PATH looks.
    places = [str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin"]
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        skip_without(name, INSTALLER)
    return Path(found)


def skip_without(name: str, installer: str) -> NoReturn:
    """Skip the test because a tool is missing; on CI, where it was installed for this, fail."""
    reason = f"there is no {name} here: {installer} installs it"
    if os.environ.get("REQUIRE_TEST_TOOLS"):
        pytest.fail(reason)
    pytest.skip(reason)
