"""Pages of docs/ as their readers follow them: every code block, from top to bottom, in a terminal.

A block of `sh` is typed into the shell, one of `python` is run by Python there. A block of `text`
right after it is what it prints, line by line, with `…` for what varies between runs. Digests,
numbers with decimals and the widths of columns may differ from the page. A block below
`<!-- in another terminal -->` starts a server, and what follows waits until it is ready.
"""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"
ADDRESS = "http://127.0.0.1:8000"  # what pages call the server
RUN = ("sh", "python")

_FENCE = re.compile(
    r"(?P<elsewhere><!-- in another terminal -->\n)?"
    r"^```(?P<language>\w*)\n(?P<content>.*?)^```\n(?:```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
_AWAIT_SERVER = f"""
until curl -sf {ADDRESS}/readyz > /dev/null; do
    kill -0 $!  # or it has ended
    sleep 0.1
done
"""


@dataclass(frozen=True)
class Block:
    language: str
    content: str
    shown: str  # what it prints, as far as the page says
    elsewhere: bool  # in another terminal


def read_page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def blocks_of(page: str) -> list[Block]:
    return [
        Block(each["language"], each["content"], each["shown"] or "", bool(each["elsewhere"]))
        for each in _FENCE.finditer(page)
    ]


@contextlib.contextmanager
def following(
    name: str, folder: Path, replaced: Mapping[str, str], **variables: object
) -> Iterator[str]:
    """Follow a page, starting in `folder`; what was printed. Its server runs until the end.

    `replaced` is what a reader here would type instead. Variables are of the environment.
    """
    blocks = [block for block in blocks_of(read_page(name)) if block.language in RUN]
    script = "\n".join(f"printf '\\n<<block>>\\n'\n{_typed(block)}" for block in blocks)
    for old, new in replaced.items():
        script = script.replace(old, new)
    terminal = Terminal(script, folder, page_environment(**variables))
    try:
        printed = terminal.read()
        assert terminal.process.wait() == 0, printed
        parts = printed.split("\n<<block>>\n")[1:]
        for block, part in zip(blocks, parts, strict=True):
            _check_shown(block, part)
        yield printed
    finally:
        terminal.end()


def page_environment(**variables: object) -> dict[str, str]:
    """The environment of a reader with the virtual environment activated."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("ENGRAM_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "TERM": "dumb",  # no colours
        "COLUMNS": "160",
        "OMP_NUM_THREADS": "1",
        **{name.upper(): str(value) for name, value in variables.items()},
    }


def _typed(block: Block) -> str:
    if block.language == "python":
        return f"python3 - <<'END OF PYTHON'\n{block.content}END OF PYTHON"
    if block.elsewhere:
        # Its own output goes nowhere: a terminal that something may write to never ends.
        return f"(\n{block.content}) > /dev/null 2>&1 &{_AWAIT_SERVER}"
    return block.content


def _check_shown(block: Block, printed: str) -> None:
    """Each line that the page shows was printed, in that order."""
    lines = iter(printed.splitlines())
    for line in block.shown.splitlines():
        pattern = _pattern(line.strip())
        found = any(re.fullmatch(pattern, each.strip()) for each in lines)
        assert found, f"{block.content}did not print '{line}', but:\n{printed}"


# What may differ from a page, as patterns that match themselves.
_VARYING = ("sha256:[0-9a-f]+", r"\d+\.\d+", r"\s+", "…")


def _pattern(line: str) -> str:
    """What a line of a page stands for: its words, with numbers and columns that may differ."""
    found = ""
    while line:
        for varying in _VARYING:
            if match := re.match(varying, line):
                found += ".*" if match[0] == "…" else varying
                line = line[match.end() :]
                break
        else:
            found += re.escape(line[0])
            line = line[1:]
    return found


class Terminal:
    """bash in a terminal of its own, which stops at the first command that fails."""

    def __init__(self, script: str, folder: Path, environment: Mapping[str, str]) -> None:
        self._reading, writing = pty.openpty()
        self.process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            start_new_session=True,
        )
        os.close(writing)

    def read(self) -> str:
        """Everything that is printed until the last command has ended."""
        parts = []
        # Linux raises an error when no process is left that could write.
        with contextlib.suppress(OSError):
            while part := os.read(self._reading, 65536):
                parts.append(part)
        return b"".join(parts).decode(errors="replace").replace("\r\n", "\n")

    def end(self) -> None:
        """End what is left running in it, such as a server."""
        os.close(self._reading)
        deadline = time.monotonic() + 60
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            while time.monotonic() < deadline:
                self.process.poll()
                os.killpg(self.process.pid, 0)  # until no process is left
                time.sleep(0.05)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
