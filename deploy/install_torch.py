"""Install torch into this interpreter and check that it is the build for the device.

python install_torch.py cpu|cuda

pip looks at the index TORCH_INDEX, if that is set, besides the one it is configured with. The
version is that of constraints.txt beside this file.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).with_name("constraints.txt")
PAGE = "https://pytorch.org/get-started/locally"
BUILD_CHECK = "import torch; print(torch.version.cuda or '')"
MISSING_CPU_BUILD = f"""
error: DEVICE=cpu, but pip {{finding}} the CUDA build of torch, which is several gigabytes.
Pass the address of an index of CPU builds: docker build --build-arg TORCH_INDEX=ADDRESS …
{PAGE} shows it: select Linux, Pip, Python and CPU, and take the
address after --index-url. For the CUDA image, pass --build-arg DEVICE=cuda.
"""
MISSING_CUDA_BUILD = f"""
error: DEVICE=cuda, but pip installed the CPU build of torch.
Leave TORCH_INDEX out, or pass the address of an index of CUDA builds ({PAGE}). For the
CPU image, pass --build-arg DEVICE=cpu.
"""


def pip_install(*options: str) -> str:
    index = os.environ.get("TORCH_INDEX")
    source = ["--extra-index-url", index] if index else []
    command = [sys.executable, "-m", "pip", "install", "-c", str(CONSTRAINTS), *source, *options]
    done = subprocess.run([*command, "torch"], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def would_install_cuda() -> bool:
    """Ask pip for the metadata of the build that it would choose, without the file."""
    report = json.loads(
        pip_install("--quiet", "--dry-run", "--ignore-installed", "--no-deps", "--report", "-")
    )
    (torch,) = report["install"]
    needs = torch["metadata"].get("requires_dist", [])
    return any(re.match(r"nvidia-|cuda-", each) for each in needs)


def main(device: str) -> None:
    # An index of CPU builds may have no separate metadata, and the file would be downloaded twice.
    if device == "cpu" and not os.environ.get("TORCH_INDEX") and would_install_cuda():
        sys.exit(MISSING_CPU_BUILD.format(finding="finds only"))
    sys.stdout.write(pip_install())
    check = [sys.executable, "-c", BUILD_CHECK]
    cuda = subprocess.run(check, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    if device == "cpu" and cuda:
        sys.exit(MISSING_CPU_BUILD.format(finding="installed"))
    if device == "cuda" and not cuda:
        sys.exit(MISSING_CUDA_BUILD)


if __name__ == "__main__":
    main(sys.argv[1])
