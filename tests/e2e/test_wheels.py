"""Both wheels in an empty environment, next to a project with its own server.py and training/."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import PHOTOS, REPOSITORY

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

# Names that our packages had, and names that people use: none of them may get in our way.
OWN_FILES = (
    "server.py",
    "task_store.py",
    "training/__init__.py",
    "engram_client/__init__.py",
    "bundle/__init__.py",
)
IMPORTS = """
from engram_bundle import TaskBundle
from engram_server.model import MultiTaskViT, load_backbone
from engram_server import embedded
from engram_store import open_store
from engram_training import fit
from engram_vit import AsyncClient, Client

model = MultiTaskViT(load_backbone(str(embedded.BACKBONE)))
bundle = TaskBundle.load("colours.safetensors")
print(bundle.labels, open_store("store").catalog().task("colours").aliases["default"])
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> list[Path]:
    """The wheels of `make release`, or else built now."""
    folder = Path(os.environ.get("WHEELS") or tmp_path_factory.mktemp("wheels")).resolve()
    if "WHEELS" not in os.environ:
        source = tmp_path_factory.mktemp("source") / "repository"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True, text=True
        ).stdout
        for name in filter(None, listed.split("\0")):
            if (REPOSITORY / name).is_file():
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                (source / name).write_bytes((REPOSITORY / name).read_bytes())
        for project in (source / "clients" / "python", source):
            build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
            run(*build, "--outdir", folder, project, cwd=source)
    found = sorted(folder.glob("engram_vit*.whl"))
    assert len(found) == 2, found
    return found


@pytest.fixture(scope="module")
def installed(wheels, tmp_path_factory) -> Path:
    """The bin folder of an environment that has the wheels and what they depend on."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet"]
    run(*pip, "-c", REPOSITORY / "constraints.txt", *wheels, cwd=folder)
    return folder / "bin"


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A user's project, whose modules have nothing to do with ours."""
    folder = tmp_path_factory.mktemp("project")
    for name in OWN_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("raise ImportError('this is the project of the user')\n")
    random = np.random.default_rng(0)
    for label, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        (folder / "photos" / label).mkdir(parents=True)
        for number in range(8):
            pixels = random.normal(colour, 20, (48, 48, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / "photos" / label / f"{number}.png")
    return folder


def run(*command: object, cwd: Path, **environment: str) -> str:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def url(installed, project) -> Iterator[str]:
    """The address of `engram serve`, started in the user's project."""
    command = [str(installed / "engram"), "serve", "--port", "0", "--store", "store"]
    with subprocess.Popen(command, cwd=project, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = iter(server.stdout)
        found = next(filter(None, (re.search(r"ready at (\S+)", line) for line in lines)), None)
        assert found, "the server ended"
        yield found[1]
        server.terminate()
        server.stdout.read()
    assert server.returncode == 0


def test_serve_train_push_and_predict_work_next_to_modules_of_the_same_names(
    installed, project, url
):
    engram = installed / "engram"
    answer = run(engram, "predict", PHOTOS / "bee.jpg", "--tasks", "cifar100,base", "--server", url,
                 cwd=project)  # fmt: skip
    assert '"label": "bee"' in answer
    options = ["--name", "colours", "--out", "colours.safetensors", "--epochs", "1"]
    run(engram, "train", "photos", *options, cwd=project)
    run(engram, "push", "colours.safetensors", "--server", url, cwd=project)
    answer = run(engram, "predict", "photos/red/0.png", "--tasks", "colours", "--server", url,
                 cwd=project)  # fmt: skip
    assert '"label": "red"' in answer
    printed = run(installed / "python", "-c", IMPORTS, cwd=project)
    assert printed == "('blue', 'red') 1\n"


def test_the_command_names_both_versions(installed, project):
    printed = run(installed / "engram", "--version", cwd=project)
    assert re.fullmatch(r"engram-vit 0\.1\.0\nengram-vit-server 0\.1\.0\n", printed)


def test_the_wheels_contain_only_packages_that_cannot_collide(wheels):
    names = set()
    for wheel in wheels:
        listed = run(sys.executable, "-m", "zipfile", "-l", wheel, cwd=REPOSITORY)
        names |= {line.split("/")[0] for line in listed.splitlines()[1:]}
    packages = {name for name in names if not name.endswith(".dist-info")}
    expected = ("server", "store", "bundle", "training", "vit")
    assert packages == {f"engram_{name}" for name in expected}
