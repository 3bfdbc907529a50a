"""Names, labels and files of imported bundles."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from operator import itemgetter
from pathlib import Path

from engram_bundle import TaskBundle, check_task_name
from engram_bundle.untrusted import printable

from engram_training.bundles import Labels, default_labels
from engram_training.errors import WrongLabels, WrongOutput
from engram_training.importing.checkpoint import Checkpoint

SUFFIX = ".safetensors"


def task_names(names: Sequence[str], count: int) -> list[str]:
    """Return one name per task, in the order of the checkpoint; a single name is a prefix."""
    names = list(names)
    if len(names) == 1 and count > 1:
        names = [f"{names[0]}-{number}" for number in range(1, count + 1)]
    if len(names) != count:
        raise WrongOutput(
            f"{_tasks(count)}, but there are {len(names)} names. Use one --name per task, in the "
            "order of the checkpoint, or a single one as a prefix."
        )
    for name in names:
        check_task_name(name)
    if repeated := [name for name in names if names.count(name) > 1]:
        raise WrongOutput(f"Several tasks have the name '{repeated[0]}'. Use distinct names.")
    return names


def task_labels(
    files: Sequence[Path], checkpoint: Checkpoint, names: Sequence[str]
) -> list[Labels]:
    """Return the labels of each task from its file, or `class_0`, `class_1` … without files."""
    classes = [task.weights.head_weight.shape[0] for task in checkpoint.tasks]
    if not files:
        return [default_labels(count) for count in classes]
    if len(files) != len(classes):
        raise WrongLabels(
            f"{_tasks(len(classes))}, but there are {len(files)} labels files. Use one --labels "
            "per task, in the order of the checkpoint, or none."
        )
    labels = [read_labels(file) for file in files]
    for file, read, name, count in zip(files, labels, names, classes, strict=True):
        if len(read) != count:
            raise WrongLabels(
                f"'{file}' has {len(read)} labels, but task '{name}' has {count} classes."
            )
    return labels


def read_labels(path: Path) -> Labels:
    """Read labels in the order of the head's outputs.

    The file has one name per line, a JSON list, or a JSON object {"0": name, …}.
    """
    try:
        # With universal newlines, and without the byte order mark of some editors.
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise WrongLabels(f"The labels file '{path}' is not UTF-8 text.") from error
    except OSError as error:
        raise WrongLabels(f"Cannot read the labels file '{path}': {error.strerror}") from error
    try:
        labels = _from_json(text) if _is_json(path, text) else _from_lines(text)
    except WrongLabels as error:
        raise WrongLabels(f"The labels file '{path}' is not valid: {error}") from error
    if not labels:
        raise WrongLabels(f"The labels file '{path}' is empty.")
    return labels


def _is_json(path: Path, text: str) -> bool:
    if path.suffix.lower() == ".json":
        return True
    if not text.lstrip().startswith(("[", "{")):
        return False
    try:
        return isinstance(json.loads(text), list | dict)
    except (ValueError, RecursionError):  # for example a first class named '[unknown]'
        return False


def _from_lines(text: str) -> Labels:
    lines = [line.strip() for line in text.rstrip().split("\n")]
    if lines == [""]:
        return ()
    if "" in lines:
        raise WrongLabels(f"line {lines.index('') + 1} is empty, but every class needs a name")
    return tuple(lines)


def _from_json(text: str) -> Labels:
    try:
        # Pairs instead of a dictionary, to detect repeated indices.
        value = json.loads(text, object_pairs_hook=lambda pairs: tuple(pairs))
    except (ValueError, RecursionError) as error:
        raise WrongLabels(f"not valid JSON ({printable(str(error), 120)})") from error
    if isinstance(value, tuple):
        by_index = sorted(((_index(key), name) for key, name in value), key=itemgetter(0))
        if [index for index, _ in by_index] != list(range(len(by_index))):
            raise WrongLabels("the indices must be 0, 1, 2 … without gaps or repetitions")
        value = [name for _, name in by_index]
    if not isinstance(value, list):
        raise WrongLabels("expected a list of names, or an object of index and name")
    for position, name in enumerate(value):
        if not isinstance(name, str) or not name.strip():
            raise WrongLabels(f"class {position} is {printable(repr(name))}, which is not a name")
    return tuple(name.strip() for name in value)


def _index(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise WrongLabels(
            f'\'{printable(key)}\' is not an index; write {{"0": name, "1": name, …}}'
        )
    return int(key)


def output_files(out: str, names: Sequence[str]) -> list[Path]:
    """Return the file of each bundle; `out` is a file, a pattern with `{name}`, or a folder."""
    if "{name}" in out:
        files = [Path(out.replace("{name}", _file_stem(name))) for name in names]
    elif out.endswith(SUFFIX) and not Path(out).is_dir():
        if len(names) > 1:
            raise WrongOutput(
                f"{_tasks(len(names))}, but '{out}' is one file. Use a folder, or a pattern such "
                f"as '{{name}}{SUFFIX}'."
            )
        files = [Path(out)]
    else:
        files = [Path(out, _file_stem(name) + SUFFIX) for name in names]
    if repeated := [file for file in files if files.count(file) > 1]:
        raise WrongOutput(f"Two tasks have the file '{repeated[0]}'. Use other names.")
    return files


def _file_stem(name: str) -> str:
    return name.replace("/", "-")  # the separator of a team prefix


def _tasks(count: int) -> str:
    return "The checkpoint has one task" if count == 1 else f"The checkpoint has {count} tasks"


def save_all(files: Mapping[Path, TaskBundle]) -> None:
    """Write all bundles or none; files with the same bytes are not touched."""
    new = {path: bundle for path, bundle in files.items() if not _is_there(path, bundle)}
    with ExitStack() as undo:
        for path, bundle in new.items():
            _make_folder(path.parent, undo)
            undo.callback(path.unlink, missing_ok=True)
            bundle.save(path)
        undo.pop_all()


def _is_there(path: Path, bundle: TaskBundle) -> bool:
    try:
        if not path.exists():
            return False
        same = path.is_file() and path.read_bytes() == bundle.to_bytes()
    except OSError as error:
        raise WrongOutput(f"Cannot use '{path}': {error.strerror}") from error
    if not same:
        raise WrongOutput(
            f"'{path}' already exists with other content. Remove it, or use another --out."
        )
    return True


def _make_folder(folder: Path, undo: ExitStack) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent, undo)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise WrongOutput(f"Cannot create the folder '{folder}': {error.strerror}") from error
    undo.callback(_remove_if_empty, folder)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
