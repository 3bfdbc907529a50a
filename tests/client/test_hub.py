"""`engram push` and `engram pull` with `hf://`, by the unmodified huggingface_hub."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engram_vit.answers import Bundle
from engram_vit.client import Client
from engram_vit.commands import hub as hub_commands
from engram_vit.commands.hub import HubAddress, manifest_in, model_card
from engram_vit.errors import UsageError

from tests.bundles import bundle
from tests.hub_server import serving_hub

ENGRAM = Path(sys.executable).with_name("engram")


@pytest.fixture
def hub():
    with serving_hub() as hub:
        yield hub


@pytest.fixture
def run(hub, tmp_path):
    """`engram …` in a process of its own, since the hub's address is read at import."""

    def run(*arguments: str, token: str | None = "hf_right", **variables: str):
        environment = {
            **os.environ,
            **hub.environment(tmp_path / "cache", token),
            "ENGRAM_SERVER": "http://127.0.0.1:9",
            **variables,
        }
        if token is None:
            environment.pop("HF_TOKEN", None)
        return subprocess.run(
            [ENGRAM, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def made(seed: int = 1, **manifest) -> bytes:
    return bundle(seed, labels=("cat", "dog", "a|b"), classes=3, **manifest).to_bytes()


@pytest.mark.long
def test_push_pull_pin_and_offline(hub, run, tmp_path):
    first, second = made(1, name="pets", metrics={"accuracy": 0.9}), made(2, name="pets")
    file = tmp_path / "pets.safetensors"
    file.write_bytes(first)
    done = run("push", "hf://lab/birds", "pets.safetensors", "--json")
    assert done.returncode == 0, done.stderr
    published = json.loads(done.stdout)
    repository = hub.repositories["lab/birds"]
    assert repository.private
    assert list(repository.commits) == [published["commit"]]
    card = repository.files("main")["README.md"].decode()
    assert "| accuracy | 0.9 |" in card

    file.write_bytes(second)
    assert run("push", "hf://lab/birds", "pets.safetensors").returncode == 0
    repository.tags["v1"] = published["commit"]
    for revision, expected in (("", second), ("@v1", first), (f"@{published['commit']}", first)):
        out = tmp_path / f"copy{revision}.safetensors"
        done = run("pull", f"hf://lab/birds{revision}", "--out", str(out), "--json")
        assert done.returncode == 0, done.stderr
        assert out.read_bytes() == expected
        assert json.loads(done.stdout)["commit"] == repository.find(revision[1:] or "main")

    # What was pulled once needs no hub.
    before = len(hub.requests)
    done = run("pull", f"hf://lab/birds@{published['commit']}", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "birds.safetensors").read_bytes() == first
    assert len(hub.requests) == before
    done = run("pull", "hf://lab/birds")  # another file is never overwritten
    assert done.returncode != 0
    assert "exists with other content" in done.stderr


@pytest.mark.long
def test_errors_of_the_hub_say_what_to_do(hub, run, tmp_path):
    (tmp_path / "pets.safetensors").write_bytes(made())
    assert run("push", "hf://lab/pets", "pets.safetensors", "--public").returncode == 0
    assert not hub.repositories["lab/pets"].private
    hub.repositories["lab/pets"].private = True
    hub.repositories["lab/model"] = type(hub.repositories["lab/pets"])(private=False)
    hub.repositories["lab/model"].commit({"config.json": b"{}"})
    for arguments, options, words in (
        (("push", "hf://lab/pets", "pets.safetensors"), {"token": "hf_wrong"}, "HF_TOKEN"),
        (("pull", "hf://lab/pets"), {"token": "hf_wrong"}, "HF_TOKEN"),
        (("pull", "hf://lab/pets"), {"token": None}, "HF_TOKEN"),
        (("pull", "hf://lab/pets@v9"), {}, "no revision 'v9'"),
        (("pull", "hf://lab/nothing"), {}, "no repository lab/nothing"),
        (("pull", "hf://lab/model"), {}, "has no task.safetensors"),
        (("pull", "hf://lab/new"), {"HF_HUB_OFFLINE": "1"}, "not in the cache"),
    ):
        done = run(*arguments, **options)
        assert done.returncode != 0, arguments
        assert words in " ".join(done.stderr.split()), (arguments, done.stderr)
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("hf://lab/pets", "broken.safetensors"), "not an Engram bundle"),
        (("hf://lab/pets", "pets.safetensors", "--name", "x"), "are for servers"),
        (("hf://lab/pets@v1", "pets.safetensors"), "Leave out '@v1'"),
        (("pets.safetensors", "--public"), "hf:// only"),
        (("hf://lab/pets",), "FILE|TASK"),
    ],
)
def test_mistakes_need_no_hub(engram, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pets.safetensors").write_bytes(made())
    (tmp_path / "broken.safetensors").write_bytes(b"no bundle")
    outcome = engram("push", *arguments)
    assert outcome.code != 0
    assert words in outcome.err


def test_a_task_of_the_server_can_be_pushed(engram, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pulled, uploaded = Bundle("team/pets", 3, "sha256:…", made(name="team/pets")), []
    monkeypatch.setattr(Client, "pull", lambda client, task: {"team/pets@3": pulled}[task])

    def upload(address, data, *, public) -> str:
        uploaded.append((address.repository, data, public))
        return "c0ffee" * 7

    monkeypatch.setattr(hub_commands, "upload", upload)
    outcome = engram("push", "hf://lab/pets", "team/pets@3", "--table")
    assert outcome.out == "team/pets@3 → hf://lab/pets@c0ffeec0ffee\n"
    assert uploaded == [("lab/pets", pulled.data, False)]


@pytest.mark.parametrize("text", ["hf://birds", "hf://a/b/c", "hf://", "hf://a/b@", "hf://a b/c"])
def test_addresses_that_are_none(text):
    with pytest.raises(UsageError, match="Examples: hf://lab/birds"):
        HubAddress.parse(text)


def test_the_card_has_what_the_manifest_says():
    data = made(
        3,
        name="pets",
        description="# Which pet?\n<script>",
        license="Apache-2.0",
        metrics={"accuracy": 0.98765},
    )
    card = model_card(HubAddress("lab/pets", None), manifest_in(data))
    front, text = card.removeprefix("---\n").split("---\n", 1)
    assert "license: apache-2.0" in front
    assert "pipeline_tag: image-classification" in front
    assert "# pets" in text
    assert "`cat`, `dog`, `a\\|b`" in text
    assert "| accuracy | 0.98765 |" in text
    assert manifest_in(data)["backbone"]["fingerprint"] in text
    assert "engram pull hf://lab/pets" in text
    assert "<script>" not in text
    assert "\n# Which" not in text


def test_an_odd_licence_is_in_the_text_only():
    card = model_card(HubAddress("lab/pets", None), manifest_in(made(license="See\nLICENCE file")))
    assert "license:" not in card.split("---\n")[1]
    assert "| licence | See LICENCE file |" in card
