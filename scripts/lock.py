"""Writes requirements/serve.txt: what a server needs, with the sha256 of every file that may be it.

    python -m scripts.lock

Names and versions come from the two pyproject.toml, constraints.txt and what is installed here; the
hashes from the indexes that pip is configured with. The list is for Linux and macOS.
"""

import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import requires
from pathlib import Path
from types import MappingProxyType

import setuptools  # noqa: F401 - before pip, whose distutils would shut it out
from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from pip._internal.commands import create_command
from pip._internal.index.collector import LinkCollector, parse_links
from pip._internal.models.candidate import InstallationCandidate
from pip._internal.models.link import Link

REPOSITORY = Path(__file__).parents[1]
LOCK = REPOSITORY / "requirements" / "serve.txt"
# Its file differs between indexes (CUDA, CPU), so no list of hashes could be whole.
UNLOCKED = "torch"
# What the image has beside the server itself.
EXTRAS = ("otel", "oidc")
HERE: Mapping[str, str] = MappingProxyType({})
HEADER = f"""\
# What serving needs, with the sha256 of every file that an index may give. `make lock` writes it.
# {UNLOCKED} is not here, since each index has another file of it: it is installed by version.
"""


def pins() -> dict[str, Version]:
    """The versions of constraints.txt, by name."""
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def needed(platform: Mapping[str, str] = HERE) -> set[str]:
    """The names of all packages that a server with its extras needs, told by those installed here.

    `platform` has the variables of markers (PEP 508) that differ from those of this machine.
    """
    server, client = (
        tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text(encoding="utf-8"))[
            "project"
        ]
        for folder in (".", "clients/python")
    )
    direct = [
        *server["dependencies"],
        *(text for extra in EXTRAS for text in server["optional-dependencies"][extra]),
        *client["dependencies"],
    ]
    waiting = [Requirement(text) for text in direct]
    found: set[tuple[str, str]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in found:
                found.add((name, extra))
                waiting += _needed_by(name, {**platform, "extra": extra})
    return {name for name, _ in found}


def _needed_by(name: str, environment: dict[str, str]) -> Iterator[Requirement]:
    for requirement in map(Requirement, requires(name) or []):
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def locked_versions() -> dict[str, Version]:
    """What the lock must name: exactly these, at these versions."""
    versions = pins()
    return {name: versions[name] for name in sorted(needed() - {UNLOCKED})}


def read_lock() -> dict[str, tuple[Version, frozenset[str]]]:
    """The version and the hashes of each package in the lock."""
    text = LOCK.read_text(encoding="utf-8").replace("\\\n", " ")
    entries = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    locked = {}
    for pin, *hashes in entries:
        name, _, version = pin.partition("==")
        locked[name] = (Version(version), frozenset(hashes))
    return locked


def write_lock(hashes: Mapping[str, set[str]]) -> None:
    entries = []
    for name, version in locked_versions().items():
        lines = [
            f"{name}=={version}",
            *(f"    --hash=sha256:{each}" for each in sorted(hashes[name])),
        ]
        entries.append(" \\\n".join(lines))
    LOCK.parent.mkdir(exist_ok=True)
    LOCK.write_text(HEADER + "\n".join(entries) + "\n", encoding="utf-8")


class Index:
    """All files of a package on the indexes that pip is configured with, for any platform."""

    def __init__(self) -> None:
        # pip's own machinery, so that indexes, proxies and certificates are those of every install.
        command = create_command("download")
        options, _ = command.parse_args([])
        session = command._build_session(options)  # type: ignore[attr-defined]
        finder = command._build_package_finder(options, session)  # type: ignore[attr-defined]
        self._collector: LinkCollector = finder._link_collector

    def hashes(self, name: str, version: Version) -> set[str]:
        """The sha256 of each file of a version."""

        def files(page: Link) -> Iterator[InstallationCandidate]:
            content = self._collector.fetch_response(page)
            for link in parse_links(content) if content is not None else ():
                if _version_of(link.filename) == version:
                    yield InstallationCandidate(name, str(version), link)

        sources = self._collector.collect_sources(name, candidates_from_page=files)
        return {
            each.link.hash
            for source in sources.index_urls
            if source is not None
            for each in source.page_candidates()
            if each.link.hash_name == "sha256" and each.link.hash
        }


def _version_of(filename: str) -> Version | None:
    try:
        if filename.endswith(".whl"):
            return parse_wheel_filename(filename)[1]
        return parse_sdist_filename(filename)[1]
    except (InvalidSdistFilename, InvalidWheelFilename, InvalidVersion):
        return None


def main() -> None:
    index, versions = Index(), locked_versions()
    # Pages of some megabytes, which an index may take seconds to make.
    with ThreadPoolExecutor(8) as threads:
        found = threads.map(index.hashes, versions, versions.values())
        hashes = dict(zip(versions, found, strict=True))
    for name in versions:
        if not hashes[name]:
            sys.exit(f"No index names a file with a sha256 for {name} {versions[name]}.")
    write_lock(hashes)
    files = sum(map(len, hashes.values()))
    sys.stdout.write(f"{LOCK.relative_to(REPOSITORY)}: {len(hashes)} packages, {files} files\n")


if __name__ == "__main__":
    main()
