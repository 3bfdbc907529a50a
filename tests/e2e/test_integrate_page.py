"""docs/how-to/integrate.md: its programs are compiled and run against a server."""

import json
import re
import shutil
import subprocess

import pytest

from tests.conftest import PHOTOS
from tests.documents import ADDRESS, Terminal, blocks_of, page_environment, read_page
from tests.e2e.typescript import CLIENT, GENERATED, TSC, build_client, package, run_node

PAGE = "how-to/integrate.md"
BLOCKS = blocks_of(read_page(PAGE))
INSTALL = "npm install "


@pytest.fixture(scope="module")
def server(embedded_server):
    return embedded_server


@pytest.fixture
def folder(tmp_path):
    """A project with photos, and with the packages that the page installs."""
    for name in ("cat.jpg", "dog.jpg"):
        shutil.copy(PHOTOS / name, tmp_path)
    for name in ("declarations.d.ts", "tsconfig.json", "package.json"):
        shutil.copy(GENERATED / name, tmp_path)
    return tmp_path


def code(language, server, marker=""):
    """The block of a language that contains a text, for the test's server."""
    (found,) = (
        block.content.replace(ADDRESS, server.url)
        for block in BLOCKS
        if block.language == language and marker in block.content
    )
    return found


def shell(script, folder):
    terminal = Terminal(script, folder, page_environment())
    try:
        printed = terminal.read()
        assert terminal.process.wait() == 0, printed
        return printed
    finally:
        terminal.end()


def run_typescript(program, folder):
    (folder / "program.ts").write_text(program)
    run_node(package(TSC), "--project", folder, folder=folder)
    return run_node(folder / "dist" / "program.js", folder=folder)


def label_of(answer):
    return json.loads(answer)["images"][0]["tasks"]["cifar10"]["predictions"][0]["label"]


def test_every_block_is_run_but_installing_and_go():
    assert {block.language for block in BLOCKS} == {"sh", "ts", "java", "go"}
    scripts = [block.content for block in BLOCKS if block.language == "sh"]
    assert [each.startswith(INSTALL) for each in scripts] == [False, True, True, False]
    assert len([block for block in BLOCKS if block.language == "ts"]) == 3


def test_what_is_installed_is_what_is_tested():
    (line,) = (block.content for block in BLOCKS if "--save-dev" in block.content)
    pinned = json.loads((GENERATED / "package.json").read_text())["devDependencies"]
    named = dict(word.rsplit("@", 1) for word in line.split() if "@" in word)
    assert named == pinned
    assert re.search(r"npm install \S+/clients/typescript$", read_page(PAGE), re.M)
    assert (CLIENT / "package.json").exists()


def test_curl(server, folder):
    assert label_of(shell(code("sh", server, "curl"), folder)) == "cat"


def test_fetch(server, folder):
    assert run_typescript(code("ts", server, "await fetch("), folder) == "cat\n"


def test_the_typescript_client(server, folder):
    build_client()
    (folder / "node_modules").mkdir()
    (folder / "node_modules" / "engram-vit").symlink_to(CLIENT)
    printed = run_typescript(code("ts", server, "EngramClient"), folder)
    assert printed.splitlines() == ["cat", "0 cat", "1 dog"]


def test_a_generated_client(server, folder):
    package("@hey-api/openapi-ts/package.json", of=GENERATED)
    (folder / "node_modules").symlink_to(GENERATED / "node_modules")
    shell(code("sh", server, "npx"), folder)
    assert run_typescript(code("ts", server, "sdk.gen"), folder) == "cat\n"


@pytest.mark.parametrize(
    ("language", "file", "command"),
    [("java", "Classify.java", ["java"]), ("go", "main.go", ["go", "run"])],
)
def test_other_languages(server, folder, language, file, command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]} here")
    (folder / file).write_text(code(language, server))
    done = subprocess.run(
        [*command, file], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert label_of(done.stdout) == "cat"
