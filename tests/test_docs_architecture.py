"""docs/explanation/architecture.md: its paths exist, and its pictures are what the code is."""

import re

import pytest

from scripts import draw_architecture
from tests.conftest import REPOSITORY
from tests.documents import DOCS, read_page

PAGE = read_page("explanation/architecture.md")
# What looks like a path in the page: `server/api/`, `pyproject.toml`.
PATHS = sorted(set(re.findall(r"`([\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|toml|md)))`", PAGE)))


@pytest.fixture(scope="module")
def graph():
    return draw_architecture.import_graph()


@pytest.fixture(scope="module")
def pictures():
    return draw_architecture.draw_all()


def test_the_page_names_paths():
    assert len(PATHS) > 40


@pytest.mark.parametrize("path", PATHS)
def test_every_path_of_the_page_exists(path):
    assert (REPOSITORY / path).exists()
    assert path.endswith("/") == (REPOSITORY / path).is_dir()


@pytest.mark.parametrize("flow", draw_architecture.FLOWS.values(), ids=lambda flow: flow.title)
def test_every_file_of_a_picture_exists(flow):
    for step in flow.steps:
        assert (REPOSITORY / step.file).is_file(), step.file
        assert step.lane < len(flow.lanes)


@pytest.mark.parametrize("flow", draw_architecture.FLOWS.values(), ids=lambda flow: flow.title)
def test_every_picture_has_its_section(flow):
    assert f"## {flow.title}\n" in PAGE


def test_every_module_is_in_one_room(graph):
    outside = {module for module in graph.modules if draw_architecture.room_of(module) is None}
    assert outside == {"server", *draw_architecture.KNOWN_TO_ALL}


def test_rooms_use_each_other_in_one_direction(graph):
    uses = draw_architecture.uses(graph)
    assert uses
    assert not {(source, target) for source, target in uses if (target, source) in uses}


def test_the_pictures_are_what_the_script_draws(pictures):
    drawn = {path.name for path in (DOCS / "images").glob("architecture-*.svg")}
    assert drawn == set(pictures)
    for name, picture in pictures.items():
        committed = (DOCS / "images" / name).read_text(encoding="utf-8")
        assert committed == picture, "run: python scripts/draw_architecture.py docs/images"


def test_what_one_wants_to_add_is_in_one_or_two_files():
    """Each row names the files to edit; those for Python callers, and for training, come apart."""
    table = PAGE.partition("## Where do I change")[2]
    rows = re.findall(r"^\| (an? [^|]+) \| (.+) \|$", table, flags=re.M)
    assert len(rows) >= 9
    for name, cell in rows:
        for part in re.split(r"; (?=for |`training)|\. For ", cell):
            files = re.findall(r"`[\w/.-]+\.(?:py|toml)`", part)
            assert 1 <= len(files) <= 2, (name, files)
