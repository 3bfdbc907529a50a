"""The lock, the bill of materials and the pinned images."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.conftest import REPOSITORY
from tests.deploy.files import COMPOSE, DOCKERFILE

SCRIPTS = REPOSITORY / "scripts"
LOCK = REPOSITORY / "requirements" / "serve.txt"
DIGEST = f"sha256:{'ab' * 32}"


# --- the lock -------------------------------------------------------------------------------------


def read_lock() -> dict[str, tuple[str, list[str]]]:
    """Version and hashes by package."""
    locked = {}
    for line in LOCK.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            requirement, *hashes = line.split(" --hash=")
            name, _, version = requirement.partition(";")[0].strip().partition("==")
            locked[canonicalize_name(name)] = (version, [each.strip() for each in hashes])
    return locked


def pins() -> dict[str, str]:
    """The versions of constraints.txt by package."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_lock_has_the_tested_version_of_every_direct_dependency_but_torch():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    texts = [*project["dependencies"], *extras["tracing"], *extras["openid"]]
    direct = {canonicalize_name(Requirement(text).name) for text in texts}
    locked = read_lock()
    assert direct - {"torch", "engram-vit"} <= locked.keys()
    assert not {"torch", "websockets", "watchfiles"} & locked.keys()
    assert not [name for name in locked if name.startswith("nvidia")]
    versions = {name: version for name, (version, _) in locked.items() if name in pins()}
    assert versions == {name: pins()[name] for name in versions}, "run `make lock`"


def test_every_locked_package_has_hashes():
    for name, (_, hashes) in read_lock().items():
        assert hashes, name
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", each) for each in hashes), name


def test_compiled_packages_are_locked_for_every_platform():
    # At least Linux on two processors, and macOS.
    for name in ("numpy", "pillow", "pydantic-core", "safetensors", "tokenizers", "uvloop"):
        assert len(read_lock()[name][1]) >= 3, name


def test_the_image_builds_with_the_setuptools_of_the_lock():
    (command,) = re.findall(r"sed -n '(.*)' requirements", DOCKERFILE.read_text(encoding="utf-8"))
    printed = subprocess.run(["sed", "-n", command, LOCK], capture_output=True, text=True)
    lines = printed.stdout.splitlines()
    assert lines[0].startswith(f"setuptools=={pins()['setuptools']}")
    assert all(line.lstrip().startswith("--hash=sha256:") for line in lines[1:])
    assert not lines[-1].endswith("\\")


def wheel(folder: Path) -> Path:
    """A package of one file."""
    path = folder / "lockable-1.0-py3-none-any.whl"
    info = "lockable-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("lockable.py", "")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: lockable\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.parametrize("index", ["", "https://torch.example/cpu"])
def test_torch_can_come_from_another_index_and_the_download_is_announced(tmp_path, index):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    done = subprocess.run(
        [REPOSITORY / "scripts" / "install-locked.sh", python],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "TORCH_INDEX": index},
    )
    assert done.returncode == 0, done.stderr
    (torch,) = (
        call for call in (tmp_path / "calls").read_text().splitlines() if call.endswith(" torch")
    )
    assert ("--extra-index-url https://torch.example/cpu" in torch) == bool(index)
    assert str(tmp_path / "venv") in done.stdout
    assert ("CUDA" in done.stdout) == (not index and sys.platform == "linux")


def test_another_file_than_the_locked_one_is_refused_in_words_for_people(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    wheel(files)
    other = hashlib.sha256(b"what the lock was made with").hexdigest()
    shutil.copy(REPOSITORY / "constraints.txt", tmp_path)
    for folder, name in (("scripts", "install-locked.sh"), ("requirements", "serve.txt")):
        (tmp_path / folder).mkdir()
        shutil.copy(REPOSITORY / folder / name, tmp_path / folder)
    lock = tmp_path / "requirements" / "serve.txt"
    lock.write_text(f"lockable==1.0 --hash=sha256:{other}\n")
    environment = {
        "PATH": os.environ["PATH"],
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(files),
        "PIP_TARGET": str(tmp_path / "installed"),
    }
    done = subprocess.run(
        [tmp_path / "scripts" / "install-locked.sh", sys.executable],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 1
    assert "lockable==1.0" in done.stderr
    assert "Nothing was installed: the package named above is not the file" in done.stderr
    assert not (tmp_path / "installed").exists()


# --- the bill of materials ------------------------------------------------------------------------


def test_the_bill_lists_the_server_its_client_and_what_they_need(tmp_path):
    target = tmp_path / "sbom.cdx.json"
    program = Path(sys.executable).with_name("cyclonedx-py")
    command = [program, "environment", "--output-reproducible", "--output-file", target]
    subprocess.run([*command, sys.executable], check=True, capture_output=True)
    bill = json.loads(target.read_text())
    listed = {canonicalize_name(each["name"]): each for each in bill["components"]}
    assert {"engram-vit", "engram-vit-server", "torch", "fastapi"} <= listed.keys()
    needs = {each["ref"]: each.get("dependsOn", []) for each in bill["dependencies"]}
    of_server = needs[listed["engram-vit-server"]["bom-ref"]]
    assert {listed["torch"]["bom-ref"], listed["engram-vit"]["bom-ref"]} <= set(of_server)


# --- images by digest -----------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path) -> Path:
    """The files that name images, and a crane that knows every image but one."""
    shutil.copytree(REPOSITORY / "deploy" / "kubernetes", tmp_path / "deploy" / "kubernetes")
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    for path in (DOCKERFILE, COMPOSE):
        shutil.copy(path, tmp_path)
    shutil.copy(SCRIPTS / "pin_images.py", tmp_path / "scripts")
    return tmp_path


def install(copy: Path, tool: str, script: str) -> None:
    path = copy / "bin" / tool
    path.write_text(f'#!/bin/sh\necho "$@" >> {copy}/calls\n{script}\n')
    path.chmod(0o755)


def pin(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, copy / "scripts" / "pin_images.py", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": str(copy / "bin")},
    )


@pytest.mark.parametrize(
    ("tool", "printed", "expected_call"),
    [
        ("crane", DIGEST, "digest haproxy:"),
        ("skopeo", DIGEST, "docker://haproxy:"),
        ("docker", json.dumps({"digest": DIGEST}), "} haproxy:"),
    ],
)
def test_images_are_pinned_with_whichever_tool_is_there(copy, tool, printed, expected_call):
    install(copy, tool, f"echo '{printed}'")
    done = pin(copy)
    assert done.returncode == 0, done.stderr
    assert expected_call in (copy / "calls").read_text()
    assert re.search(
        rf"^ARG BASE=python:[\w.-]+@{DIGEST}$", (copy / "Dockerfile").read_text(), re.M
    )
    compose = (copy / "docker-compose.yml").read_text()
    images = re.findall(r"^ +image: (\S+)$", compose, re.M)
    assert {image for image in images if not image.endswith(f"@{DIGEST}")} == {
        "engram:cpu",
        "engram:cuda",
    }


def test_pinning_twice_changes_nothing_and_a_moved_tag_is_noticed(copy):
    install(copy, "crane", f"echo {DIGEST}")
    assert pin(copy, "--check").returncode == 1
    assert pin(copy).returncode == 0
    pinned = (copy / "docker-compose.yml").read_text()
    again = pin(copy)
    assert (again.returncode, again.stdout) == (0, "")
    assert pin(copy, "--check").returncode == 0
    assert (copy / "docker-compose.yml").read_text() == pinned
    install(copy, "crane", f"echo sha256:{'cd' * 32}")
    moved = pin(copy, "--check")
    assert moved.returncode == 1
    assert "docker-compose.yml: differs" in moved.stdout
    assert (copy / "docker-compose.yml").read_text() == pinned


def test_our_own_image_is_pinned_where_an_overlay_names_its_registry(copy):
    overlay = copy / "deploy" / "kubernetes" / "overlays" / "cpu" / "kustomization.yaml"
    text = overlay.read_text()
    named = text.replace(
        "    newTag: cpu", "    newName: registry.example.org/engram\n    newTag: cpu"
    )
    overlay.write_text(named)
    install(copy, "crane", f"echo {DIGEST}")
    for _ in range(2):
        assert pin(copy).returncode == 0
        assert f"    newTag: cpu\n    digest: {DIGEST}\nconfigMap" in overlay.read_text()
    assert "digest registry.example.org/engram:cpu" in (copy / "calls").read_text()


@pytest.mark.parametrize("script", ["echo no such tag >&2; exit 1", "echo surprise", "exit 0"])
def test_an_image_without_a_digest_stops_the_script(copy, script):
    install(copy, "crane", script)
    before = (copy / "Dockerfile").read_text()
    done = pin(copy)
    assert done.returncode == 1
    assert "crane finds no digest of python:" in done.stderr
    assert (copy / "Dockerfile").read_text() == before


def test_without_a_tool_the_script_says_what_to_install(copy):
    done = pin(copy)
    assert done.returncode == 1
    assert done.stderr == "Images cannot be looked up: install one of crane, skopeo, docker.\n"
