"""What the indexes that pip is configured with have of a package."""

from collections.abc import Iterator

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version
from pip._internal.commands import create_command
from pip._internal.index.collector import LinkCollector, parse_links
from pip._internal.models.candidate import InstallationCandidate
from pip._internal.models.link import Link


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
