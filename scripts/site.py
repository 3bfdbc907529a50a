"""Build the documentation site into build/site: `make site`, or `python -m scripts.site`.

The pages are those of docs/. The navigation is the list of docs/README.md. Links to files outside
docs/ lead to the repository. The OpenAPI documents and everything the pages load are copied into
the site, so it works without a network, from a server or from the file system.

Each release has a folder, and `latest` is a copy of the newest. `--release` names the release; the
default is the version in pyproject.toml. Folders of other releases stay as they are.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from scripts import openapi

REPOSITORY = Path(__file__).resolve().parent.parent
DOCS = REPOSITORY / "docs"
SITE = REPOSITORY / "build" / "site"
LATEST = "latest"

# What the theme would load from a CDN, and the npm package that has it. The paths are below the
# folder of the release.
VENDORED = {
    "iframe-worker": ("iframe-worker/shim/index.js", "assets/vendor/iframe-worker.js"),
    "mermaid": ("mermaid/dist/mermaid.min.js", "assets/vendor/mermaid.js"),
}
_LINK = re.compile(r"(?P<before>\]\(|(?:src|href)=\")(?P<target>[^)\s\"#]+)(?P<anchor>#[^)\s\"]*)?")
_ENTRY = re.compile(r"^- \[.+\]\((?P<page>[\w/-]+\.md)\)(?:: (?P<summary>.+))?$", re.MULTILINE)


class SiteError(Exception):
    """The site cannot be built."""


def project() -> dict[str, object]:
    """The `project` table of pyproject.toml."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        table: dict[str, object] = tomllib.load(file)["project"]
    return table


def address(name: str) -> str:
    """The URL of that name in pyproject.toml, without a final slash."""
    urls = project()["urls"]
    assert isinstance(urls, dict)
    return str(urls[name]).rstrip("/")


def sections(index: str) -> dict[str, dict[str, str]]:
    """The pages below each heading of the index in its order, with their summaries."""
    return {
        title: {each["page"]: each["summary"] or "" for each in _ENTRY.finditer(body)}
        for title, body in re.findall(
            r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", index, re.MULTILINE | re.DOTALL
        )
    }


def with_summary(text: str, summary: str) -> str:
    """The page with its summary from the index below the title."""
    title, _, rest = text.partition("\n")
    return f"{title}\n\n*{summary[:1].upper()}{summary[1:]}.*\n{rest}" if summary else text


def outside_links(text: str, page: Path) -> str:
    """The page with links to files outside docs/ made links to the repository."""

    def replace(match: re.Match[str]) -> str:
        target = match["target"]
        if re.match(r"[a-z]+:", target):
            return match[0]
        path = (page.parent / target).resolve()
        if path.is_relative_to(DOCS) or not path.is_relative_to(REPOSITORY):
            return match[0]
        kind = "tree" if path.is_dir() else "blob"
        url = f"{address('Homepage')}/{kind}/main/{path.relative_to(REPOSITORY).as_posix()}"
        return f"{match['before']}{url}{match['anchor'] or ''}"

    parts = re.split(r"(^ *```.*?^ *```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if index % 2 else _LINK.sub(replace, part) for index, part in enumerate(parts)
    )


def prepare(source: Path) -> None:
    """Write the pages, the OpenAPI documents and the configuration for Zensical."""
    pages = source / "pages"
    shutil.copytree(DOCS, pages)
    for page in pages.rglob("*.md"):
        original = DOCS / page.relative_to(pages)
        page.write_text(outside_links(page.read_text(encoding="utf-8"), original), encoding="utf-8")
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    menu = sections(index)
    for name, summary in (entry for entries in menu.values() for entry in entries.items()):
        text = (pages / name).read_text(encoding="utf-8")
        (pages / name).write_text(with_summary(text, summary), encoding="utf-8")
    (pages / "README.md").unlink()
    links = ", ".join(f"[{version}](openapi/{name})" for name, version in openapi.FILES.items())
    home = index.replace("## Reference\n\n", f"## Reference\n\n- OpenAPI documents: {links}\n", 1)
    (pages / "index.md").write_text(f"---\nsearch:\n  exclude: true\n---\n{home}", "utf-8")
    for page in pages.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(re.sub(r"(\]\((?:\.\./)*)README\.md", r"\1index.md", text), "utf-8")
    openapi.write(pages / "openapi")
    navigation = [
        f"{{ {json.dumps(title)} = {json.dumps(list(entries))} }}"
        for title, entries in menu.items()
    ]
    generated = {
        "site_url": json.dumps(f"{address('Documentation').removesuffix(LATEST)}"),
        "site_dir": json.dumps("site"),
        "nav": f'["index.md", {", ".join(navigation)}]',
    }
    lines = "\n".join(f"{name} = {value}" for name, value in generated.items())
    template = (REPOSITORY / "scripts" / "site.toml").read_text(encoding="utf-8")
    (source / "zensical.toml").write_text(
        template.replace("[project]\n", f"[project]\n{lines}\n", 1).replace(
            '"HOMEPAGE"', json.dumps(address("Homepage"))
        ),
        encoding="utf-8",
    )


def vendor(site: Path) -> None:
    """Load what the theme loads from a CDN from the site itself."""
    for package, (origin, copy) in VENDORED.items():
        file = REPOSITORY / "node_modules" / origin
        if not file.is_file():
            raise SiteError(f"node_modules/{origin} is missing. Run `npm ci`.")
        (site / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, site / copy)
        pattern = re.compile(rf'"https://[^"]*/{package}[@/][^"]*"')
        for script in site.glob("assets/javascripts/bundle*.js"):
            # The bundle is loaded from assets/javascripts; pages are at any depth.
            bundle = "document.querySelector(\"script[src*='/bundle.']\").src"
            inner = f'new URL("../vendor/{Path(copy).name}",{bundle}).href'
            script.write_text(pattern.sub(inner, script.read_text("utf-8")), encoding="utf-8")
        for page in site.rglob("*.html"):
            prefix = "../" * (len(page.relative_to(site).parts) - 1)
            text = pattern.sub(f'"{prefix}{copy}"', page.read_text(encoding="utf-8"))
            page.write_text(text, encoding="utf-8")


def build(output: Path, release: str) -> Path:
    """Build one release into `output/release`, copy it to `latest`, and list all releases."""
    source = output.parent / "site-source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    prepare(source)
    done = subprocess.run(
        [Path(sys.executable).parent / "zensical", "build", "--strict", "--clean"],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        printed = re.sub(r"\x1b\[[\d;]*m", "", done.stdout + done.stderr)
        raise SiteError(f"Zensical failed:\n{printed.partition('Traceback')[0]}")
    vendor(source / "site")
    for name in (release, LATEST):
        shutil.rmtree(output / name, ignore_errors=True)
        shutil.copytree(source / "site", output / name)
    releases = sorted(
        (folder.name for folder in output.iterdir() if folder.is_dir() and folder.name != LATEST),
        key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")],
        reverse=True,
    )
    versions = [
        {"version": name, "title": name, "aliases": [LATEST] if name == release else []}
        for name in releases
    ]
    (output / "versions.json").write_text(json.dumps(versions, indent=1), encoding="utf-8")
    (output / "index.html").write_text(
        f'<!doctype html><meta http-equiv="refresh" content="0; url={LATEST}/index.html">',
        encoding="utf-8",
    )
    return output / release


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the documentation site into build/site.")
    parser.add_argument("--release", default=str(project()["version"]), help="Name of its folder.")
    try:
        built = build(SITE, parser.parse_args().release)
    except SiteError as error:
        sys.exit(str(error))
    sys.stdout.write(f"Built {built.relative_to(REPOSITORY)}.\n")


if __name__ == "__main__":
    main()
