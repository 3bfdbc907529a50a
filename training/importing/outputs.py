"""Names, labels and files of the bundles that a checkpoint becomes."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from task_store import TaskBundle, check_task_name
from training.data.labels import Labels, default_labels, read_labels
from training.errors import WrongLabels, WrongOutput
from training.importing.checkpoint import Checkpoint

SUFFIX = ".safetensors"


def task_names(given: Sequence[str], count: int) -> list[str]:
    """One name per task, in the checkpoint's order; a single one given is a prefix for several."""
    names = list(given)
    if len(names) == 1 and count > 1:
        names = [f"{names[0]}-{number}" for number in range(1, count + 1)]
    if len(names) != count:
        raise WrongOutput(
            f"{_tasks(count)} but {len(names)} names were given; give one --name for each, in the "
            "checkpoint's order, or a single one to number them"
        )
    for name in names:
        check_task_name(name)
    if repeated := [name for name in names if names.count(name) > 1]:
        raise WrongOutput(f"the name '{repeated[0]}' was given to more than one task")
    return names


def task_labels(
    files: Sequence[Path], checkpoint: Checkpoint, names: Sequence[str]
) -> list[Labels]:
    """The labels of each task, from a file each, or `class_0`, `class_1` … without files."""
    classes = [task.weights.head_weight.shape[0] for task in checkpoint.tasks]
    if not files:
        return [default_labels(count) for count in classes]
    if len(files) != len(classes):
        raise WrongLabels(
            f"{_tasks(len(classes))} but {len(files)} labels files were given; give one --labels "
            "for each, in the checkpoint's order, or none"
        )
    labels = [read_labels(file) for file in files]
    for file, read, name, count in zip(files, labels, names, classes, strict=True):
        if len(read) != count:
            raise WrongLabels(
                f"'{file}' names {len(read)} labels, and '{name}' has {count} classes"
            )
    return labels


def output_files(out: str, names: Sequence[str]) -> list[Path]:
    """Where each bundle goes: a `.safetensors` file, a pattern with `{name}`, or a folder."""
    if "{name}" in out:
        files = [Path(out.replace("{name}", _file_stem(name))) for name in names]
    elif out.endswith(SUFFIX) and not Path(out).is_dir():
        if len(names) > 1:
            raise WrongOutput(
                f"{_tasks(len(names))} and '{out}' is one file; give a folder, or a pattern such "
                f"as '{{name}}{SUFFIX}'"
            )
        files = [Path(out)]
    else:
        files = [Path(out, _file_stem(name) + SUFFIX) for name in names]
    if repeated := [file for file in files if files.count(file) > 1]:
        raise WrongOutput(f"two tasks would be written to '{repeated[0]}'; choose other names")
    return files


def _file_stem(name: str) -> str:
    return name.replace("/", "-")  # a team's task


def _tasks(count: int) -> str:
    return "the checkpoint has one task" if count == 1 else f"the checkpoint has {count} tasks"


def save_all(files: Mapping[Path, TaskBundle]) -> None:
    """Write every bundle or none. Files that hold these very bytes already are left as they are."""
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
        raise WrongOutput(f"'{path}' cannot be used: {error.strerror}") from error
    if not same:
        raise WrongOutput(
            f"'{path}' exists and is something else; remove it or choose another --out"
        )
    return True


def _make_folder(folder: Path, undo: ExitStack) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent, undo)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise WrongOutput(f"the folder '{folder}' cannot be made: {error.strerror}") from error
    undo.callback(_remove_if_empty, folder)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
