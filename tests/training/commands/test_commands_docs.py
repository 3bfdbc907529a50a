"""docs/how-to/train.md: its example runs. docs/reference/training.md: every option is in it."""

import inspect
import re
from typing import get_args

import pytest
import typer

from tests.conftest import REPOSITORY
from tests.training.pictures import class_folders
from training.commands.evaluate import evaluate_bundles
from training.commands.train import train
from training.fitting.variants import AUTO_RATES

HOW_TO = (REPOSITORY / "docs" / "how-to" / "train.md").read_text(encoding="utf-8")
REFERENCE = (REPOSITORY / "docs" / "reference" / "training.md").read_text(encoding="utf-8")


def test_the_worked_example_runs(folder_of, tmp_path, monkeypatch, capsys):
    class_folders(tmp_path / "photos", each=10)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "vit").symlink_to(folder_of("vit"))
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", HOW_TO, flags=re.DOTALL))
    names: dict = {}
    exec(compile(code, "docs/how-to/train.md", "exec"), names)
    assert "on 4 images" in capsys.readouterr().out
    assert names["model"].tasks[-1] == "flowers"
    assert (tmp_path / "flowers.html").exists()


def options_of(function):
    """What is typed for every option of a command."""
    for name, parameter in inspect.signature(function).parameters.items():
        for about in get_args(parameter.annotation):
            if isinstance(about, typer.models.OptionInfo):
                # In an annotation typer's first argument is a name, whatever it is called.
                first = [about.default] if isinstance(about.default, str) else []
                given = [*first, *(about.param_decls or ())] or [f"--{name.replace('_', '-')}"]
                yield from (part for one in given for part in one.split("/"))


@pytest.mark.parametrize("option", sorted({*options_of(train), *options_of(evaluate_bundles)}))
def test_every_option_is_documented(option):
    assert f"`{option}`" in REFERENCE or f"{option} " in REFERENCE


def test_the_default_rates_are_documented():
    for rates in AUTO_RATES.values():
        assert ",".join(f"{rate:g}" for rate in rates) in REFERENCE
