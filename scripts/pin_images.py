"""Pins every image that is named by a tag to the digest that its registry has for it today.

    python scripts/pin_images.py            writes name:tag@sha256:…
    python scripts/pin_images.py --check    fails where an image is not what its registry has

Looks into the Dockerfile, docker-compose.yml and the Kubernetes manifests. Asks crane, skopeo or
docker, whichever is there. Engram's own image is pinned where an overlay says which registry has it
(`newName`).
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TOOLS = {
    "crane": ["crane", "digest"],
    "skopeo": ["skopeo", "inspect", "--no-tags", "--format", "{{.Digest}}"],
    "docker": ["docker", "buildx", "imagetools", "inspect", "--format", "{{json .Manifest}}"],
}
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")

IMAGE = r"(?P<name>[\w./-]+(?::\d+/[\w./-]+)?):(?P<tag>[\w.-]+)(?:@sha256:[0-9a-f]{64})?"
# The one line that names an image, per kind of file; the lines around it stay as they are.
BASE = re.compile(rf"^(?P<before>ARG BASE=){IMAGE}$", re.M)
SERVICE = re.compile(rf"^(?P<before>\s+image: ){IMAGE}$", re.M)
OVERLAY = re.compile(
    r"^(?P<before>\s+newName: (?P<name>\S+)\n\s+newTag: (?P<tag>\S+)\n)"
    r"(?:(?P<indent>\s+)digest: \S+\n)?",
    re.M,
)

Resolve = Callable[[str], str]


def find_resolver() -> Resolve:
    """Asks a registry for the digest of an image, with the first tool that is installed."""
    tool = next((name for name in TOOLS if shutil.which(name)), None)
    if tool is None:
        sys.exit(f"Images cannot be looked up: install one of {', '.join(TOOLS)}.")

    def resolve(image: str) -> str:
        address = f"docker://{image}" if tool == "skopeo" else image
        result = subprocess.run([*TOOLS[tool], address], capture_output=True, text=True)
        found = DIGEST.fullmatch(_digest_of(result.stdout.strip()))
        if result.returncode or found is None:
            output = (result.stderr or result.stdout).strip() or "nothing"
            sys.exit(f"{tool} finds no digest of {image}. Its output: {output}")
        return found[0]

    return resolve


def _digest_of(answer: str) -> str:
    """docker describes the whole manifest, the others print the digest alone."""
    return str(json.loads(answer)["digest"]) if answer.startswith("{") else answer


def pin(path: Path, text: str, resolve: Resolve) -> str:
    """A file's text with each image that a registry has at its digest."""

    def pinned(match: re.Match[str]) -> str:
        # Ours is built here: no registry has it under this name.
        if match["name"] == "engram":
            return match[0]
        digest = resolve(f"{match['name']}:{match['tag']}")
        return f"{match['before']}{match['name']}:{match['tag']}@{digest}"

    def pinned_overlay(match: re.Match[str]) -> str:
        indent = " " * (len(match["before"]) - len(match["before"].lstrip()))
        digest = resolve(f"{match['name']}:{match['tag']}")
        return f"{match['before']}{indent}digest: {digest}\n"

    if path.name == "Dockerfile":
        return BASE.sub(pinned, text)
    if path.name == "kustomization.yaml":
        return OVERLAY.sub(pinned_overlay, text)
    return SERVICE.sub(pinned, text)


def main(arguments: list[str]) -> None:
    check = arguments == ["--check"]
    if arguments and not check:
        sys.exit("usage: pin_images.py [--check]")
    resolve = find_resolver()
    files = [REPOSITORY / "Dockerfile", REPOSITORY / "docker-compose.yml"]
    files += sorted((REPOSITORY / "deploy" / "kubernetes").rglob("*.yaml"))
    changed = False
    for path in files:
        text = path.read_text(encoding="utf-8")
        pinned = pin(path, text, resolve)
        if pinned != text:
            changed = True
            sys.stdout.write(
                f"{path.relative_to(REPOSITORY)}: {'differs' if check else 'pinned'}\n"
            )
            if not check:
                path.write_text(pinned, encoding="utf-8")
    sys.exit(1 if check and changed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
