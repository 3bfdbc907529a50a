"""What is installed is what was meant: the lock, the bill of materials, the audit, the images."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts import audit, sbom
from scripts.lock import LOCK, UNLOCKED, locked_versions, needed, pins, read_lock
from tests.conftest import REPOSITORY
from tests.deploy.files import COMPOSE, DOCKERFILE

SCRIPTS = REPOSITORY / "scripts"
DIGEST = f"sha256:{'ab' * 32}"


# --- the lock -------------------------------------------------------------------------------------


def test_the_lock_is_fresh():
    locked = {name: version for name, (version, _) in read_lock().items()}
    assert locked == locked_versions(), "run `make lock`"


def test_every_line_of_the_lock_has_hashes_and_none_has_an_address():
    for name, (_, hashes) in read_lock().items():
        assert hashes, name
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", each) for each in hashes), name
    assert "://" not in LOCK.read_text(encoding="utf-8")


def test_compiled_packages_are_locked_for_every_platform():
    # One file for each of at least Linux on two processors and macOS.
    for name in ("numpy", "pillow", "pydantic-core", "safetensors", "tokenizers", "uvloop"):
        assert len(read_lock()[name][1]) >= 3, name


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize(
    ("system", "machine"),
    [("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "x86_64"), ("Darwin", "arm64")],
)
def test_every_platform_needs_the_same_packages(python, system, machine):
    platform = {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": system.lower(),
        "platform_system": system,
        "platform_machine": machine,
    }
    assert needed(platform) == {*read_lock(), UNLOCKED}


def test_torch_is_not_in_the_lock_and_says_so():
    assert UNLOCKED not in read_lock()
    assert UNLOCKED in pins()
    assert f"# {UNLOCKED} is not here" in LOCK.read_text(encoding="utf-8")


def test_the_image_and_make_serve_install_from_the_lock():
    recipe = DOCKERFILE.read_text(encoding="utf-8")
    assert "pip install --require-hashes -r /opt/engram/serve.txt\n" in recipe
    # Every other install is of torch, of our own wheels, or of the line of setuptools in the lock.
    installs = re.findall(r"pip install (.*)", recipe)
    assert len(installs) == 4
    unlocked = [line for line in installs if "--require-hashes" not in line]
    assert [line.split()[-1] for line in unlocked] == ["torch", "/wheels/*.whl"]
    assert "scripts/install-locked.sh" in (REPOSITORY / "Makefile").read_text(encoding="utf-8")


def test_the_image_builds_with_the_setuptools_of_the_lock():
    (command,) = re.findall(r"sed -n '(.*)' requirements", DOCKERFILE.read_text(encoding="utf-8"))
    printed = subprocess.run(["sed", "-n", command, LOCK], capture_output=True, text=True)
    lines = printed.stdout.splitlines()
    assert lines[0] == f"setuptools=={pins()['setuptools']} \\"
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


def test_another_file_than_the_locked_one_is_refused_in_words_for_people(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    wheel(files)
    other = hashlib.sha256(b"what the lock was made with").hexdigest()
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


@pytest.fixture(scope="module")
def bill() -> dict:
    program = [sys.executable, SCRIPTS / "sbom.py"]
    return json.loads(subprocess.run(program, capture_output=True, check=True).stdout)


def test_the_bill_follows_the_schema_of_cyclonedx(bill):
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(json.dumps(bill)) is None
    wrong = json.dumps({**bill, "colour": "blue"})
    assert validator.validate_str(wrong) is not None


def test_the_bill_lists_every_locked_package_and_our_own_with_version_and_licence(bill):
    listed = {each["name"]: each for each in bill["components"]}
    for name, version in {**locked_versions(), UNLOCKED: pins()[UNLOCKED]}.items():
        # A build of torch may add where it is from: 2.13.0+cpu.
        assert listed[name]["version"].partition("+")[0] == str(version)
        assert listed[name]["purl"].startswith(f"pkg:pypi/{name}@{version}")
        assert listed[name].get("licenses"), f"{name}: the licence is not known"
    assert {"engram", "engram-client"} <= listed.keys()
    assert listed["engram"]["licenses"] == [{"expression": "Apache-2.0"}]


def test_the_bill_says_who_needs_whom(bill):
    needs = {each["ref"].partition("@")[0]: each["dependsOn"] for each in bill["dependencies"]}
    of_server = {each.partition("@")[0] for each in needs["pkg:pypi/engram"]}
    assert {"pkg:pypi/torch", "pkg:pypi/fastapi"} <= of_server
    references = {each["bom-ref"] for each in bill["components"]}
    assert {each for each_list in needs.values() for each in each_list} <= references


def test_a_licence_that_is_a_whole_text_is_not_a_name(tmp_path):
    text = "Permission is hereby granted, " * 9
    (tmp_path / "METADATA").write_text(f"Name: a\nVersion: 1\nLicense: {text}\n")
    assert sbom.licences(Distribution.at(tmp_path)) == []
    (tmp_path / "METADATA").write_text("Name: a\nVersion: 1\nLicense: MIT\n")
    assert sbom.licences(Distribution.at(tmp_path)) == [{"license": {"name": "MIT"}}]


def test_the_image_keeps_its_bill():
    assert "/sbom.py > /opt/engram/sbom.cdx.json\n" in DOCKERFILE.read_text(encoding="utf-8")


# --- the audit ------------------------------------------------------------------------------------


def answer(name: str, *found: str) -> dict:
    vulns = [{"id": each, "fix_versions": ["9.9"]} for each in found]
    return {"name": name, "version": "1.0", "vulns": vulns}


SKIPPED = {"name": "b", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("answers", "code", "sentence"),
    [
        ([], 2, "No advisory service can be reached from here, so nothing was audited"),
        ([SKIPPED], 2, "No advisory service can be reached from here, so nothing was audited"),
        ([answer("a"), SKIPPED], 2, "so not audited: b."),
        ([answer("a"), answer("c")], 0, "2 packages audited, 0 with known weaknesses."),
        ([answer("a", "CVE-1"), answer("c")], 1, "a 1.0: CVE-1, fixed in: 9.9"),
    ],
)
def test_an_audit_that_looked_nothing_up_is_no_clean_one(
    monkeypatch, capsys, answers, code, sentence
):
    monkeypatch.setattr(audit, "audit", lambda requirements: (answers, ""))
    with pytest.raises(SystemExit) as ended:
        audit.main()
    assert ended.value.code == code
    said = capsys.readouterr()
    assert sentence in said.out + said.err


def test_without_a_network_the_audit_says_so_in_one_sentence(tmp_path, monkeypatch):
    # Nobody listens on the discard port.
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    listed = tmp_path / "serve.txt"
    listed.write_text("anyio==4.16.0\n")
    answers, trouble = audit.audit(listed)
    assert answers == []
    assert trouble.count("\n") == 1
    assert "127.0.0.1" in trouble


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
    path.write_text(f'#!/bin/sh\necho "$@" >> {copy}/asked\n{script}\n')
    path.chmod(0o755)


def pin(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, copy / "scripts" / "pin_images.py", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": str(copy / "bin")},
    )


@pytest.mark.parametrize(
    ("tool", "printed", "asked"),
    [
        ("crane", DIGEST, "digest haproxy:"),
        ("skopeo", DIGEST, "docker://haproxy:"),
        ("docker", json.dumps({"digest": DIGEST}), "} haproxy:"),
    ],
)
def test_images_are_pinned_with_whichever_tool_is_there(copy, tool, printed, asked):
    install(copy, tool, f"echo '{printed}'")
    done = pin(copy)
    assert done.returncode == 0, done.stderr
    assert asked in (copy / "asked").read_text()
    assert re.search(
        rf"^ARG BASE=python:[\w.-]+@{DIGEST}$", (copy / "Dockerfile").read_text(), re.M
    )
    compose = (copy / "docker-compose.yml").read_text()
    images = re.findall(r"^    image: (\S+)$", compose, re.M)
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
    assert "digest registry.example.org/engram:cpu" in (copy / "asked").read_text()


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
