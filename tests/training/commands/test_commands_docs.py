"""The example of docs/how-to/train.md runs."""

import re

from tests.conftest import REPOSITORY
from tests.training.pictures import class_folders

HOW_TO = (REPOSITORY / "docs" / "how-to" / "train.md").read_text(encoding="utf-8")


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
