"""Run `engram` with distributions that exist for one test only."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engram_vit.commands.main import main

from tests.client.sites import Outcome, Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.delenv("ENGRAM_DEBUG", raising=False)
    yield Site(folder)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def engram(site: Site, capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run the command line in this process, with the distributions of `site` installed."""

    def run(*args: str) -> Outcome:
        with pytest.raises(SystemExit) as stop:
            main(args)
        captured = capfd.readouterr()
        code = stop.value.code
        return Outcome(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run
