"""The console as the server gives it out. tests/e2e/test_console.py drives it in a browser."""

import posixpath
import re
import tomllib
from fnmatch import fnmatch

import pytest
from PIL import Image

from tests.api.conftest import assert_problem
from tests.conftest import REPOSITORY

FOLDER = REPOSITORY / "server" / "engram_server" / "console"
FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
SCRIPTS = [name for name in FILES if name.endswith(".js")]


def test_the_page_allows_nothing_but_its_own_files(client):
    response = client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
    )
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) <= {"'self'", "'none'", "'script'"}
    assert policy["script-src"] == policy["style-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"


def test_the_page_has_no_script_or_style_of_its_own(client):
    page = client.get("/").text
    assert re.findall(r"<script(?![^>]*\bsrc=)", page) == []
    assert "<style" not in page
    assert re.findall(r"\s(?:style|on\w+)=", page) == []


def test_everything_the_page_and_its_scripts_name_is_there(client):
    page = client.get("/").text
    named = set(re.findall(r'(?:src|href)="(console/[^"]+)"', page))
    assert len(named) >= 3
    for script in SCRIPTS:
        text = client.get(f"/console/{script}").text
        for name in re.findall(r'from "(\.[^"]+)"', text):
            named.add(posixpath.normpath(f"console/{posixpath.dirname(script)}/{name}"))
    for name in named:
        assert client.get(f"/{name}").status_code == 200, name


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_served_with_its_type_and_its_tag(client, name):
    response = client.get(f"/console/{name}")
    assert response.content == (FOLDER / name).read_bytes()
    kinds = {
        "js": "text/javascript",
        "css": "text/css",
        "svg": "image/svg+xml",
        "jpg": "image/jpeg",
    }
    kinds |= {"html": "text/html", "md": "text/markdown"}
    assert response.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
    assert response.headers["x-content-type-options"] == "nosniff"
    again = client.get(f"/console/{name}", headers={"If-None-Match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["none.js", "../app.py", "%2e%2e/app.py", "samples", ""])
def test_nothing_else_is_served(client, path):
    assert_problem(client.get(f"/console/{path}"), 404, "not-found")


@pytest.mark.parametrize(
    "name", [name for name in FILES if name.endswith((".js", ".css", ".html"))]
)
def test_no_file_names_another_site(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    found = re.findall(r"(?:https?:)?//[a-z][\w.-]+\.\w+", text)
    # Neither is fetched: the name of SVG, and the link to the documentation.
    assert set(found) <= {"http://www.w3.org", "https://github.com"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_make_no_markup_of_text(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert unsafe not in text


def test_an_installed_server_has_every_file():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["engram_server"]
    for name in FILES:
        depth = [each for each in patterns if each.count("/") == f"console/{name}".count("/")]
        assert any(fnmatch(f"console/{name}", pattern) for pattern in depth), name
    assert (REPOSITORY / "server" / "engram_server" / "console").resolve() == FOLDER


def test_samples_are_small_and_free_to_give_out():
    table = (FOLDER / "samples" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(.+?)` \|(.+)\|$", table, flags=re.MULTILINE))
    samples = sorted((FOLDER / "samples").glob("*.jpg"))
    assert {sample.name for sample in samples} == set(rows)
    assert 8 <= len(samples) <= 12
    assert sum(sample.stat().st_size for sample in samples) <= 400_000
    for sample in samples:
        assert re.search(r"\| (public domain|CC0 1\.0|CC BY(-SA)? \d\.0) \|", rows[sample.name])
        with Image.open(sample) as photo:
            assert photo.width <= 480
            assert not photo.getexif()


def test_the_page_offers_every_sample_photo():
    script = (FOLDER / "ask" / "samples.js").read_text(encoding="utf-8")
    offered = re.findall(r'^  \["(\w+)", ".+"\],$', script, flags=re.MULTILINE)
    assert sorted(offered) == sorted(path.stem for path in (FOLDER / "samples").glob("*.jpg"))


def test_the_form_for_browsers_without_scripts_works(client, cat):
    assert 'action="predict"' in client.get("/").text
    response = client.post("/predict", files={"image": ("cat.jpg", cat, "image/jpeg")})
    assert response.status_code == 200
