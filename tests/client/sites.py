"""Fake distributions: real folders with metadata and modules, found as pip-installed ones are."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

RUN_MAIN = "from engram_vit.commands.main import main; main()"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Site:
    """A folder on the import path that distributions can be put into."""

    path: Path

    def install(
        self,
        name: str,
        *,
        commands: Mapping[str, str] | None = None,
        errors: Mapping[str, str] | None = None,
        modules: Mapping[str, str] | None = None,
        version: str = "1.0",
    ) -> None:
        """Add a distribution; `commands` and `errors` map entry-point names to values."""
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = {"engram.commands": commands or {}, "engram.errors": errors or {}}
        lines = [
            line
            for group, entries in groups.items()
            for line in (f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for module, source in (modules or {}).items():
            file = self.path / f"{module.replace('.', '/')}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dedent(source))

    def environment(self, **extra: str) -> dict[str, str]:
        """For a subprocess that sees this folder."""
        path = os.pathsep.join([str(self.path), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "TERM": "dumb", **extra}

    def start(self, *args: str, **extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", RUN_MAIN, *args],
            env=self.environment(**extra),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
