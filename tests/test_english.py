"""The check of English: every pattern is found, and code and comments are not."""

import pytest

from scripts import check_english
from scripts.check_english import CODE, EXCEPTIONS, PATTERNS, blank, check_file, check_text

PHRASES = [
    "A folder is no bundle.",
    "These are no labels.",
    "Clients: who has none is rejected.",
    "Whoever connects is the client.",
    "Nobody waits.",
    "It is stored somewhere.",
    "The alias shall move.",
    "A thread of its own writes.",
    "The client is told the reason.",
    "The port is 8000 unless said otherwise.",
    "The tasks that are asked for.",
    "The name it was given.",
    "The wanted tasks.",
    "The log is mended.",
    "The file is thereby locked.",
    "Images at hand are counted.",
    "Cached for ever.",
    "Retire a task to be rid of it.",
    "Tasks such as have memory.",
    "Four own maps of a task.",
    "Classes are clouds around their middles.",
    "The solved head of a task.",
    "Choose by left-out answers.",
    "Twenty memory cells.",
    "Each lesson is a version.",
    "Photos that are doubts.",
    "A request that is turned away.",
    "The server looks at it again.",
    "One image and its worth of rows.",
]


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_to_avoid_is_found_also_across_lines(phrase):
    assert list(check_text(phrase))
    assert list(check_text(phrase.replace(" ", "\n")))


def test_every_pattern_has_a_phrase():
    found = {hit.instead for phrase in PHRASES for hit in check_text(phrase)}
    assert found == set(PATTERNS.values())


@pytest.mark.parametrize(
    "text",
    [
        "The record of who changed what.",
        "People who see the data.",
        "There is no task 'x'.",
        "It is no longer served.",
        "The model given by `--backbone`.",
    ],
)
def test_plain_english_passes(text):
    assert not list(check_text(text))


def test_code_is_not_text():
    page = "See `whoever`.\n\n```sh\nnobody asked\n```\n\n[link](nobody.md) <!-- shall -->\n"
    assert not list(check_text(blank(CODE, page)))


def test_a_page_is_reported_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(check_english, "REPOSITORY", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```sh\nnobody\n```\n\nNobody waits.\n")
    (hit,) = check_file(page)
    assert str(hit).startswith("page.md:7: 'Nobody' (")


def test_messages_are_checked_and_comments_and_names_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(check_english, "REPOSITORY", tmp_path)
    source = tmp_path / "module.py"
    source.write_text('# nobody\nwho = {"who": 1}\nraise ValueError(f"{who} is no task")\n')
    script = tmp_path / "page.js"
    script.write_text('// nobody\n/* shall */\nshow("Nobody answered");\n')
    assert [(hit.line, hit.words) for hit in check_file(source)] == [(3, "is no task")]
    assert [(hit.line, hit.words) for hit in check_file(script)] == [(3, "Nobody")]


def test_exceptions_are_few_and_say_why():
    assert len(EXCEPTIONS) <= 15
    assert all(EXCEPTIONS.values())


def test_the_command_fails_and_lists_all_hits(tmp_path, monkeypatch):
    monkeypatch.setattr(check_english, "REPOSITORY", tmp_path)
    (tmp_path / "page.md").write_text("Nobody waits. It shall move.\n")
    with pytest.raises(SystemExit, match=r"(?s)'Nobody'.*'shall'.*2 hits"):
        check_english.main()
