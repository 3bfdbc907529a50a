"""The script that installs torch into the image: the build for the device, or a helpful error."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY

SCRIPT = DEPLOY / "install_torch.py"


def wheel(folder: Path, version: str, cuda: str | None, *requires: str) -> None:
    """A package named torch that says which build it is."""
    folder.mkdir(exist_ok=True)
    info = f"torch-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", "Name: torch", f"Version: {version}"]
    lines += [f"Requires-Dist: {each}" for each in requires]
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr("torch/__init__.py", "from torch import version\n")
        archive.writestr("torch/version.py", f"cuda = {cuda!r}\n")
        archive.writestr(f"{info}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")


def index(folder: Path) -> str:
    """The address of an index that has the wheels of a folder."""
    (folder / "index" / "torch").mkdir(parents=True)
    links = "".join(f'<a href="{file.as_uri()}">{file.name}</a>' for file in folder.glob("*.whl"))
    (folder / "index" / "torch" / "index.html").write_text(links)
    return (folder / "index").as_uri()


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> Path:
    """A virtual environment that has only pip."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


def installed(environment: Path) -> list[Path]:
    return list(environment.glob("lib/*/site-packages/torch*"))


@pytest.fixture
def install(environment, tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    (tmp_path / "constraints.txt").write_text("torch==1.0\n")
    for folder in installed(environment):
        shutil.rmtree(folder)

    def install(device: str, default: Path, torch_index: str = "") -> tuple[int, str]:
        done = subprocess.run(
            [environment / "bin" / "python", tmp_path / SCRIPT.name, device],
            env={
                "PATH": os.environ["PATH"],
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_INDEX_URL": index(default),
                "TORCH_INDEX": torch_index,
            },
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    return install


@pytest.fixture
def builds(tmp_path) -> dict[str, Path]:
    folders = {name: tmp_path / name for name in ("cpu", "cuda")}
    wheel(folders["cpu"], "1.0+cpu", None)
    wheel(folders["cuda"], "1.0", "13.0", 'cuda-toolkit==13.0; platform_system == "Nowhere"')
    return folders


def test_the_cpu_image_refuses_the_cuda_build_before_it_is_installed(install, environment, builds):
    code, output = install("cpu", builds["cuda"])
    assert code == 1
    assert "error: DEVICE=cpu, but pip finds only the CUDA build of torch" in output
    assert "--build-arg TORCH_INDEX=ADDRESS" in output
    assert not installed(environment)


def test_the_cpu_image_takes_the_build_of_the_index(install, builds):
    code, output = install("cpu", builds["cuda"], index(builds["cpu"]))
    assert code == 0, output
    assert "Successfully installed torch-1.0+cpu" in output


def test_the_cpu_image_needs_no_index_where_pip_finds_the_cpu_build(install, builds):
    code, output = install("cpu", builds["cpu"])
    assert code == 0, output


def test_an_index_without_cpu_builds_stops_the_build_of_the_cpu_image(install, builds, tmp_path):
    wheel(tmp_path / "other", "1.0", "13.0")
    code, output = install("cpu", builds["cuda"], index(tmp_path / "other"))
    assert code == 1
    assert "error: DEVICE=cpu, but pip installed the CUDA build of torch" in output


def test_the_cuda_image_takes_the_cuda_build(install, builds):
    code, output = install("cuda", builds["cuda"])
    assert code == 0, output


def test_the_cuda_image_refuses_the_cpu_build(install, builds):
    code, output = install("cuda", builds["cpu"])
    assert code == 1
    assert "error: DEVICE=cuda, but pip installed the CPU build of torch" in output


def test_pips_own_error_is_shown(install, tmp_path):
    (tmp_path / "empty").mkdir()
    code, output = install("cuda", tmp_path / "empty")
    assert code == 1
    assert "ERROR: " in output
    assert "torch" in output
