"""Class names from a file: text with one name per line, a JSON list, or JSON {"0": name, …}."""

import json
from operator import itemgetter
from pathlib import Path

from task_store.manifest import shown
from training.errors import WrongLabels

Labels = tuple[str, ...]


def default_labels(classes: int) -> Labels:
    """Names for classes that nobody named."""
    return tuple(f"class_{index}" for index in range(classes))


def read_labels(path: Path) -> Labels:
    """The names in a file, in the order of the head's outputs."""
    try:
        # With universal newlines, and without the mark that some editors put in front.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongLabels(f"the labels in '{path}' are not UTF-8 text") from error
    except OSError as error:
        raise WrongLabels(f"the labels '{path}' cannot be read: {error.strerror}") from error
    try:
        labels = _from_json(text) if _is_json(path, text) else _from_lines(text)
    except WrongLabels as error:
        raise WrongLabels(f"the labels in '{path}' cannot be used: {error}") from error
    if not labels:
        raise WrongLabels(f"the labels file '{path}' is empty")
    return labels


def _is_json(path: Path, text: str) -> bool:
    if path.suffix.lower() == ".json":
        return True
    if not text.lstrip().startswith(("[", "{")):
        return False
    try:
        return isinstance(json.loads(text), list | dict)
    except (ValueError, RecursionError):  # a first class named '[unknown]', say
        return False


def _from_lines(text: str) -> Labels:
    lines = [line.strip() for line in text.rstrip().split("\n")]
    if lines == [""]:
        return ()
    if "" in lines:
        raise WrongLabels(f"line {lines.index('') + 1} is empty, and every class needs a name")
    return tuple(lines)


def _from_json(text: str) -> Labels:
    try:
        # Pairs instead of a dictionary, in which a repeated index would vanish.
        value = json.loads(text, object_pairs_hook=lambda pairs: tuple(pairs))
    except (ValueError, RecursionError) as error:
        raise WrongLabels(f"they are not valid JSON ({shown(str(error), 120)})") from error
    if isinstance(value, tuple):
        by_index = sorted(((_index(key), name) for key, name in value), key=itemgetter(0))
        if [index for index, _ in by_index] != list(range(len(by_index))):
            raise WrongLabels("the indices must be 0, 1, 2 … without gaps or repetitions")
        value = [name for _, name in by_index]
    if not isinstance(value, list):
        raise WrongLabels("they must be a list of names or an object of index and name")
    for position, name in enumerate(value):
        if not isinstance(name, str) or not name.strip():
            raise WrongLabels(f"class {position} is {shown(repr(name))} and not a name")
    return tuple(name.strip() for name in value)


def _index(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise WrongLabels(f'\'{shown(key)}\' is no index; write {{"0": name, "1": name, …}}')
    return int(key)
