"""Check the English of documents and of texts that users see: `make check`.

Documents are checked without their code. Of Python files, every string with a space
counts: messages, help texts, docstrings; of JavaScript and HTML files, all but comments.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
DOCUMENTS = ("*.md", "docs/**/*.md", "clients/*/README.md", "server/README.md")
SOURCES = tuple(
    f"{folder}/**/*.{suffix}"
    for folder in ("server", "task_store", "training", "clients/python", "clients/typescript/src")
    for suffix in ("py", "js", "ts", "html")
)

# A pattern, and what to write in its place. A space in a pattern also matches a line break.
PATTERNS = {
    r"(?<!\bthere )\b(?:is|are) no (?!longer\b|more than\b)\w+": "is not a …; has no …",
    # "the people who …" and "who changed what" are as they should be.
    r"(?<!people )(?<!users )(?<!clients )(?<!callers )\bwho\b(?! \w+(?: \w+)? what\b)": (
        "name the subject: the client, the server, users who …"
    ),
    r"\bwhoever\b|\b(?:no|some|any|every)body\b|\bsomewhere\b": "name the subject or the place",
    r"\bshall\b": "must, should",
    r"\bof (?:its|their|his|her|our) own\b": "its own …, a separate …",
    r"\btold\b": "name what receives which information: gets, reports, receives",
    r"\b(?:was|is|are|as|be|what|it) said\b|\bsaid (?:otherwise|so)\b": "stated, described",
    r"\basked\b": "requested, called",
    r"\bgiven\b(?! (?:by|to|in|as|the|a|up)\b)": "specified, set, received",
    r"\bwanted\b": "requested, needed",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bthereby\b": "name the consequence",
    r"\bat hand\b": "available, in flight",
    r"\bfor ever\b": "permanently",
    r"\bto be rid of\b": "to remove",
    r"\bsuch as have\b": "those with",
    r"\b(?:own|linear) maps?\b|\bmaps it goes through\b": "linear layer, projection",
    r"\bclouds\b|\bmiddles\b|\blonely\b": "classes, class means, singleton",
    r"\bsolved head\b|\bwhat the names say\b": "closed-form (LDA) head, text logits",
    r"\bleft-out answers?\b": "leave-one-out predictions",
    r"\bmemory cells?\b": "memory tokens",
    r"\blessons?\b|\btaken away\b|\btaught on top\b": "example set, removed, added",
    r"\bdoubts\b": "suspected label errors",
    r"\b(?:let in|turned away|sent back)\b": "accepted, rejected",
    r"\blook(?:s|ed) at (?:it|them|itself)\b": "checks, reads, attends to",
    r"\bof what goes up to it\b|\bits worth\b": "name the quantity",
}
# Where the words are right, with the reason: (file, words around the match) -> reason.
EXCEPTIONS: dict[tuple[str, str], str] = {}
LOOKBEHIND = re.compile(r"(\(\?<!.*?\))")  # has a fixed width


def compile_pattern(pattern: str) -> re.Pattern[str]:
    parts = LOOKBEHIND.split(pattern)
    spaces = (r"\s" if LOOKBEHIND.match(part) else r"\s+" for part in parts)
    joined = "".join(part.replace(" ", space) for part, space in zip(parts, spaces, strict=True))
    return re.compile(joined, re.IGNORECASE)


RULES = {compile_pattern(pattern): instead for pattern, instead in PATTERNS.items()}
# Code in a document: blocks between fences, and code within a line. Line breaks stay.
CODE = re.compile(r"^ *(```+).*?^ *\1|<!--.*?-->|`[^`]*?`|\]\([^)\s]*\)", re.MULTILINE | re.DOTALL)
SCRIPT_COMMENT = re.compile(r"/\*.*?\*/|<!--.*?-->|(?<![:'\"`])//[^\n]*", re.DOTALL)


class Hit(NamedTuple):
    file: str
    line: int
    words: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: '{self.words}' ({self.instead})"


def blank(pattern: re.Pattern[str], text: str) -> str:
    """Remove what matches and keep its line breaks, so that line numbers stay right."""
    return pattern.sub(lambda match: "·" + "\n" * match[0].count("\n"), text)


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """The first line and the content of each text in a file."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield 1, blank(CODE, content)
    elif path.suffix == ".py":
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                yield node.lineno, blank(CODE, node.value)
    else:
        yield 1, blank(SCRIPT_COMMENT, content)


def check_text(text: str, file: str = "", first_line: int = 1) -> Iterator[Hit]:
    for rule, instead in RULES.items():
        for match in rule.finditer(text):
            around = " ".join(text[max(0, match.start() - 60) : match.end() + 60].split())
            if not any(name == file and words in around for name, words in EXCEPTIONS):
                line = first_line + text.count("\n", 0, match.start())
                yield Hit(file, line, " ".join(match[0].split()), instead)


def check_file(path: Path) -> Iterator[Hit]:
    name = path.relative_to(REPOSITORY).as_posix()
    for line, text in texts_of(path):
        yield from check_text(text, name, line)


def files() -> list[Path]:
    found = {path for pattern in (*DOCUMENTS, *SOURCES) for path in REPOSITORY.glob(pattern)}
    return sorted(path for path in found if "node_modules" not in path.parts)


def main() -> None:
    hits = [hit for path in files() for hit in check_file(path)]
    if hits:
        advice = f"{len(hits)} hits. Rewrite them, or add an exception in scripts/check_english.py."
        sys.exit("\n".join([*map(str, hits), advice]))


if __name__ == "__main__":
    main()
