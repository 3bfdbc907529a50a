"""An environment for each peer, layered over the one this runs in.

What is there already (torch, transformers, FastAPI) is used; a peer brings the rest, and other
versions where it needs them, without touching ours. torch stays the one that we use: a peer
compared on another would not be compared.
"""

import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

PINS: dict[str, tuple[str, ...]] = {
    "litserve": ("litserve==0.2.19",),
    # Its workers ask for an event loop before they make one, which uvloop 0.22 and later refuse.
    "mlserver": ("mlserver==1.7.1", "uvloop==0.21.0"),
    "ray": (),  # a development dependency of ours
    "fastapi": (),
    "openvino": ("openvino==2026.4.1", "nncf==3.4.0"),
    # Made for transformers 4.57, which comes with it, and not for version 5.
    "adapters": ("adapters==1.3.0",),
}
FOLDER = Path(sys.prefix) / "peers"
REPOSITORY = Path(__file__).resolve().parent.parent.parent


def python_of(name: str) -> Path:
    """The interpreter of an environment, made if it is not there."""
    if not PINS[name]:
        return Path(sys.executable)
    place = FOLDER / name
    done = place / ".installed"
    requirements = "\n".join(PINS[name])
    if not done.exists() or done.read_text() != requirements:
        _make(place, PINS[name])
        done.write_text(requirements)
    return place / "bin" / "python"


def _make(place: Path, pins: tuple[str, ...]) -> None:
    venv.create(place, clear=True, symlinks=True)
    python = place / "bin" / "python"
    below = sysconfig.get_path("purelib")
    # `addsitedir` and not the path alone: editable installs below are found by files there.
    packages = sysconfig.get_path("purelib", vars={"base": str(place), "platbase": str(place)})
    Path(packages, "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    constraints = place / "constraints.txt"
    torch = metadata.version("torch").partition("+")[0]
    constraints.write_text(f"torch=={torch}\n")
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([python, *install, "-c", constraints, *pins], check=True)
