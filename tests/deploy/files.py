"""The files that are deployed, and what they say."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import yaml
from engram_server.settings import PREFIX, Settings, load_settings

from tests.conftest import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
DOCKER_PAGE = REPOSITORY / "docs" / "how-to" / "deploy.md"
KUBERNETES_PAGE = REPOSITORY / "docs" / "how-to" / "kubernetes.md"
DOCKERFILE = REPOSITORY / "Dockerfile"
COMPOSE = REPOSITORY / "docker-compose.yml"


def read_yaml(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def run(*command: object) -> str:
    """What a program prints, or a failed assertion with it."""
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=REPOSITORY,
        # Contact no cluster, even if this machine has a kubeconfig.
        env={"PATH": "/usr/bin:/bin", "KUBECONFIG": "/dev/null"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def image_environment() -> dict[str, str]:
    """The variables that the image sets."""
    return dict(re.findall(r"^(?:ENV)? +(\w+)=(\S+)", DOCKERFILE.read_text(), re.M))


def settings_of(environment: Mapping[str, str | None]) -> Settings:
    """The settings of a server in the image with these variables; None stands for any value."""
    values = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in {**image_environment(), **environment}.items()
        if name.startswith(PREFIX)
    }
    assert values.keys() <= Settings.model_fields.keys()
    secret = {name for name in values if name.endswith(("_key", "_key_file"))}
    kept = {name.removesuffix("_file"): "of a secret" for name in secret}
    return load_settings(**{name: values[name] for name in values.keys() - secret}, **kept)
