"""Node, and the packages that `npm ci` installs: the TypeScript client and a generator."""

import fcntl
import os
import subprocess
from pathlib import Path

from tests.conftest import REPOSITORY
from tests.tools import find_tool, skip_without

CLIENT = REPOSITORY / "clients" / "typescript"
GENERATED = REPOSITORY / "tests" / "e2e" / "generated_client"
TSC = "typescript/bin/tsc"


def run_node(*arguments: str | Path, folder: Path = REPOSITORY, **variables: str) -> str:
    """Run Node and return what it printed; it must succeed."""
    node = find_tool("node")
    done = subprocess.run(
        [node, *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def package(path: str, *, of: Path = REPOSITORY) -> Path:
    """A file of an installed package."""
    file = of / "node_modules" / path
    if not file.exists():
        skip_without(path.partition("/")[0], "npm ci")
    return file


def build_client() -> None:
    """Compile the client to its dist/, one process at a time."""
    compiler = package(TSC)
    with (CLIENT / "package.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run_node(compiler, "--project", CLIENT)
