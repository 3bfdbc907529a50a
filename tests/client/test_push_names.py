"""The name under which `engram push` publishes a file."""

import hashlib
import json

import pytest
from engram_vit.answers import Bundle
from engram_vit.client import Client
from engram_vit.commands.bundles import name_in
from engram_vit.errors import NotFound

from tests.bundles import bundle

UNNAMED = bundle(1).to_bytes()
NAMED = bundle(1, name="vision/pets").to_bytes()


class Version:
    def __init__(self, version, data):
        self.version = version
        self.digest = f"sha256:{hashlib.sha256(data).hexdigest()}"


@pytest.fixture
def server(monkeypatch):
    """A server with `pets` and `team/birds`, whose version 2 is UNNAMED; records what is pushed."""
    pushed = []

    def task(client, name):
        if name not in ("pets", "team/birds"):
            raise NotFound(f"There is no task '{name}'.", status=404)
        detail = type("Detail", (), {})()
        detail.version_details = [Version(1, b"older"), Version(2, UNNAMED)]
        return detail

    def push(client, file, name, aliases, **waiting):
        pushed.append(name)
        raise NotFound("enough", status=404)

    monkeypatch.setattr(Client, "task", task)
    monkeypatch.setattr(Client, "push", push)
    return pushed


@pytest.mark.parametrize(
    ("file", "data", "options", "name"),
    [
        ("anything-2.safetensors", NAMED, [], "vision/pets"),
        ("anything.safetensors", NAMED, ["--name", "other"], "other"),
        ("cats.safetensors", UNNAMED, [], "cats"),
        ("pets-2.safetensors", UNNAMED, [], "pets"),
        ("team-birds-2.safetensors", UNNAMED, [], "team/birds"),
        ("pets-1.safetensors", UNNAMED, [], "pets-1"),  # other bytes: not pulled from there
        ("cifar-10.safetensors", UNNAMED, [], "cifar-10"),  # no such task
        ("pets-2.safetensors", b"damaged", [], "pets-2"),
    ],
)
def test_the_name_is_that_of_the_option_the_bundle_or_the_file(
    engram, server, tmp_path, file, data, options, name
):
    (tmp_path / file).write_bytes(data)
    engram("push", str(tmp_path / file), *options)
    assert server == [name]


def test_pull_says_how_to_keep_a_name_that_is_not_in_the_bundle(engram, monkeypatch, tmp_path):
    monkeypatch.setattr(Client, "pull", lambda client, task: Bundle(task, 3, "sha256:0", NAMED))
    outcome = engram("pull", "wildlife", "--out", str(tmp_path))
    assert "The name in the bundle is vision/pets." in outcome.err
    assert outcome.err.endswith("wildlife-3.safetensors --name wildlife\n")
    assert engram("pull", "vision/pets", "--out", str(tmp_path)).err == ""


@pytest.mark.parametrize(
    "header",
    ["", "[]", "{}", '{"__metadata__": 3}', '{"__metadata__": {"engram": "3"}}', "[" * 100_000,
     json.dumps({"__metadata__": {"engram": '{"name": 7}'}})],
)  # fmt: skip
def test_what_is_no_bundle_has_no_name(header):
    data = len(header).to_bytes(8, "little") + header.encode()
    assert name_in(data) is None
    assert name_in(data[:5]) is None
