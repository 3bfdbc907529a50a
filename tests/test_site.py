"""The documentation site: it builds, finds what people search for, and needs no network."""

import json
import re
import tomllib

import pytest
from engram_server import documentation
from engram_server.commands.serve import serve

from scripts import site
from tests.conftest import REPOSITORY
from tests.documents import DOCS
from tests.e2e.typescript import package, run_node
from tests.test_architecture import project_files

# What people type, and the pages that help them.
USEFUL = {
    "LoRA": {"explanation/masked-pass", "explanation/accuracy"},
    "few-shot": {"how-to/teach"},
    "out-of-distribution": {"explanation/teaching"},
    "latency": {"reference/performance"},
    "GPU": {"how-to/gpu", "explanation/gpu"},
    "Docker": {"how-to/deploy"},
    "Kubernetes": {"how-to/deploy", "how-to/kubernetes"},
    "rate limit": {"how-to/keys", "reference/http-api"},
    "delete data": {"how-to/erase"},
    "embeddings": {"how-to/search", "reference/http-api"},
    "gRPC": {"how-to/grpc", "reference/open-inference"},
    "batch": {"how-to/batch"},
    "TypeScript": {"how-to/integrate"},
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The site of a release, built as `make site` builds it."""
    for origin, _ in site.VENDORED.values():
        package(origin)
    return site.build(tmp_path_factory.mktemp("site") / "out", "1.2.3")


@pytest.fixture(scope="module")
def hits(built):
    found: dict = json.loads(run_node("tests/search_site.cjs", built, *USEFUL))
    return found


@pytest.mark.parametrize("query", USEFUL)
def test_the_first_hit_is_useful(hits, query):
    page = re.sub(r"\.html.*", "", hits[query][0])
    assert page in USEFUL[query], hits[query]


def test_the_site_loads_nothing_from_elsewhere(built):
    loading = re.compile(
        r"<(?:script|img|iframe)[^>]*src=\"(https?:[^\"]+)|<link[^>]*rel=\"(?:stylesheet|preconnect)\"[^>]*(https?:[^\"]+)"
    )
    for page in built.rglob("*.html"):
        assert not loading.findall(page.read_text(encoding="utf-8")), page.name
    for _, copy in site.VENDORED.values():
        assert (built / copy).is_file()


def test_the_site_has_the_openapi_documents(built):
    for name in ("openapi.json", "openapi-3.0.json"):
        assert json.loads((built / "openapi" / name).read_bytes())["info"]["title"] == "Engram"
        assert f'href="openapi/{name}"' in (built / "index.html").read_text(encoding="utf-8")


def test_releases_are_listed_newest_first(built):
    versions = json.loads((built.parent / "versions.json").read_text(encoding="utf-8"))
    assert versions == [{"version": "1.2.3", "title": "1.2.3", "aliases": ["latest"]}]
    assert (built.parent / "latest" / "index.html").is_file()


def test_every_page_is_in_the_menu_once():
    menu = site.sections((DOCS / "README.md").read_text(encoding="utf-8"))
    pages = [page for entries in menu.values() for page in entries]
    assert len(pages) == len(set(pages))
    assert set(pages) == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} - {
        "README.md"
    }


def test_a_broken_link_ends_the_build(tmp_path, monkeypatch):
    broken = tmp_path / "docs"
    broken.mkdir()
    (broken / "README.md").write_text("# Index\n\n## Start\n\n- [Page](page.md)\n")
    (broken / "page.md").write_text("# Page\n\n[nowhere](absent.md)\n")
    monkeypatch.setattr(site, "DOCS", broken)
    with pytest.raises(site.SiteError, match=r"absent\.md"):
        site.build(tmp_path / "out", "1.2.3")


# --- what the product says --------------------------------------------------------------------


def test_the_product_links_to_the_documentation_of_the_project():
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        assert tomllib.load(file)["project"]["urls"]["Documentation"] == documentation.SITE
    assert documentation.CONFIGURATION in (serve.__doc__ or "")


def test_every_linked_page_of_the_site_exists():
    page = re.compile(rf"{documentation.SITE}/([\w/-]+)\.html".encode())
    constants = "\n".join(str(value) for value in vars(documentation).values()).encode()
    contents = [file.read_bytes() for file in project_files() if file.is_file()]
    linked = {found.decode() for text in [constants, *contents] for found in page.findall(text)}
    assert len(linked) > 3
    assert [name for name in linked if not (DOCS / f"{name}.md").is_file()] == []
