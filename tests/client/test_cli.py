"""What every command shares: versions, help, errors, interruption, laziness."""

import os
import re
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import engram_vit
import pytest
from engram_vit.commands.main import main

from tests.client.sites import RUN_MAIN

HEAVY = {"torch", "transformers", "fastapi", "httpx", "server", "task_store", "training"}

FAILING = """
    class AppError(Exception):
        pass

    class Narrower(AppError):
        pass

    def fail() -> None:
        raise Narrower("no backbone in 'somewhere' [sic]")

    def crash() -> None:
        raise ValueError("a bug")

    def stop() -> None:
        raise KeyboardInterrupt

    def leave() -> None:
        raise SystemExit(7)
"""
FAILING_COMMANDS = {name: f"failing_cli:{name}" for name in ("fail", "crash", "stop", "leave")}


@pytest.fixture
def failing(site):
    site.install(
        "failing",
        commands=FAILING_COMMANDS,
        errors={"failing": "failing_cli:AppError"},
        modules={"failing_cli": FAILING},
    )
    return site


def test_version_names_client_and_server(engram):
    outcome = engram("--version")
    assert outcome.code == 0
    server = metadata.version("engram-vit-server")
    assert outcome.out == f"engram-vit {engram_vit.__version__}\nengram-vit-server {server}\n"


def test_version_attribute_is_the_installed_version():
    assert engram_vit.__version__ == metadata.version("engram-vit")


def test_without_a_command_help_is_shown(engram):
    outcome = engram()
    assert "Usage: engram" in outcome.out
    assert "--install-completion" in outcome.out


def test_unknown_command_suggests_the_nearest(failing, engram):
    outcome = engram("fial")
    assert outcome.code == 2
    assert "No such command 'fial'" in outcome.err
    assert "Did you mean 'fail'" in outcome.err


def test_declared_error_is_one_line_for_people(failing, engram):
    outcome = engram("fail")
    assert outcome.code == 1
    assert outcome.out == ""
    assert outcome.err == "error: no backbone in 'somewhere' [sic]\n"


def test_debug_setting_shows_where_a_declared_error_came_from(failing, monkeypatch):
    monkeypatch.setenv("ENGRAM_DEBUG", "1")
    with pytest.raises(Exception, match="no backbone") as raised:
        main(["fail"])
    assert type(raised.value).__name__ == "Narrower"


def test_debug_setting_of_zero_is_off(failing, engram, monkeypatch):
    monkeypatch.setenv("ENGRAM_DEBUG", "0")
    assert engram("fail").err.startswith("error: ")


def test_undeclared_error_keeps_its_traceback(failing):
    process = failing.start("crash")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Traceback" in err
    assert "ValueError: a bug" in err


def test_error_declared_by_a_class_that_is_not_a_base_does_not_count(site):
    site.install(
        "failing",
        commands=FAILING_COMMANDS,
        errors={"failing": "elsewhere:AppError"},
        modules={"failing_cli": FAILING},
    )
    with pytest.raises(Exception, match="no backbone"):
        main(["fail"])


def test_exit_code_of_a_command_is_kept(failing, engram):
    assert engram("leave").code == 7


def test_keyboard_interrupt_is_a_word_and_130(failing, engram):
    outcome = engram("stop")
    assert (outcome.code, outcome.err) == (130, "interrupted\n")


def test_sigint_ends_a_running_command(site):
    module = """
        import time

        def wait() -> None:
            print("ready", flush=True)
            while True:  # one long sleep would miss a signal that arrives just before it
                time.sleep(0.01)
    """
    site.install("waiting", commands={"wait": "wait_cli:wait"}, modules={"wait_cli": module})
    process = site.start("wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")


@pytest.mark.parametrize("lines", [1, 100_000])
def test_reader_that_goes_away_is_no_error(site, lines):
    module = f"def chat() -> None:\n    print('line\\n' * {lines})\n"
    site.install("chatting", commands={"chat": "chat_cli:chat"}, modules={"chat_cli": module})
    reader, writer = os.pipe()
    os.close(reader)
    outcome = subprocess.run(
        [sys.executable, "-c", RUN_MAIN, "chat"],
        env=site.environment(),
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert outcome.stderr == ""


@pytest.mark.parametrize("args", [["--version"], ["--help"], ["tasks", "--help"], ["nothing"]])
def test_nothing_heavy_is_imported_before_a_command_runs(site, args):
    program = (
        "import sys\n"
        "from engram_vit.commands.main import main\n"
        "try:\n    main()\n"
        "finally:\n    print('modules:', *sys.modules, file=sys.stderr)\n"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program, *args],
        env=site.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    loaded = outcome.stderr.rpartition("modules:")[2].split()
    assert "engram_vit.commands.plugins" in loaded
    assert not HEAVY & set(loaded)


def test_installed_script_runs():
    script = Path(sys.executable).with_name("engram")
    outcome = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0
    assert re.fullmatch(r"engram-vit \S+\nengram-vit-server \S+\n", outcome.stdout)
