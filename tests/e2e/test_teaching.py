"""Teaching and correcting on a real server, while others ask it."""

import asyncio
import itertools
import json

import httpx
import pytest
from engram_server.model import load_backbone
from engram_training.run import fit
from engram_vit import AsyncClient, Client, teach
from engram_vit.answers import CorrectionsResult

from tests.e2e.server_process import serving
from tests.serving import make_bundle, photo
from tests.training.pictures import class_folders, whole_picture

CLIENTS = 16
PHOTOS = [photo(number) for number in range(40)]
UPDATES = 12


@pytest.fixture(scope="module")
def server(folder_of, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("server"), folder_of("vit")) as running:
        yield running


@pytest.fixture(scope="module")
def birds(server, folder_of):
    """A trained task."""
    bundle = make_bundle(load_backbone(folder_of("vit")), 1)
    with Client(server.url) as client:
        client.push(bundle.to_bytes(), "birds")


class Askers:
    """Clients that predict until they are stopped. Every request must succeed."""

    def __init__(self, http):
        self.http = http
        self.stopped = asyncio.Event()
        self.answered = 0

    async def ask(self, first):
        for turn in itertools.count(first):
            if self.stopped.is_set():
                return
            answer = await self.http.post(
                "/predict", params={"tasks": "birds,moving"}, content=PHOTOS[turn % len(PHOTOS)]
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["images"][0]["tasks"]["moving"]["predictions"]
            self.answered += 1


async def teach_while_others_ask(url):
    async with (
        AsyncClient(url) as client,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        await client.teach("moving", {"a": [photo(100)], "b": [photo(101)]})
        askers = Askers(http)
        asking = [asyncio.create_task(askers.ask(number)) for number in range(CLIENTS)]
        versions = set()
        for update in range(UPDATES):
            taught = await client.teach("moving", [(photo(200 + update), "ab"[update % 2])])
            corrected = await client.correct("moving", photo(200 + update), "ba"[update % 2])
            versions |= {taught.version, corrected.version}
        askers.stopped.set()
        await asyncio.gather(*asking)
        return askers.answered, versions, await client.examples("moving")


def test_no_request_fails_while_a_task_is_taught_and_corrected(server, birds):
    answered, versions, known = asyncio.run(teach_while_others_ask(server.url))
    assert answered >= CLIENTS
    assert len(versions) == 2 * UPDATES
    assert len(known.examples) == UPDATES + 2


def test_commands_from_teaching_to_undoing(engram, tmp_path):
    photos = class_folders(tmp_path / "photos", each=4, colours=("red", "blue"))
    code, out, err = engram("teach", photos, "--name", "colours", "--new", "--table")
    assert (code, err) == (0, "")
    assert out.startswith("colours@1 · 8 examples: blue 4, red 4\n")
    assert "leave-one-out accuracy" in out
    assert engram("teach", photos, "--name", "colours", "--new")[0] == 1
    green = tmp_path / "green.png"
    whole_picture("green", 3).save(green)
    assert engram("correct", "colours", green, "green", "--table")[1].startswith(
        "colours@2 · 9 examples: blue 4, green 1, red 4\n"
    )
    assert "green" in engram("examples", "ls", "colours", "--table")[1]
    history = json.loads(engram("tasks", "history", "colours")[1])
    assert history[0]["details"]["note"] == "1 example added"
    assert '"version": 1,' in engram("examples", "rm", "colours", green, "--purge")[1]
    history = json.loads(engram("tasks", "history", "colours")[1])
    assert (history[0]["kind"], history[0]["details"]["versions"]) == ("purge", [2])
    code, _, err = engram("teach", tmp_path / "nowhere", "--name", "colours")
    assert (code, "neither a folder" in err) == (2, True)


def test_photos_that_cannot_be_read_are_reported_and_counted(engram, tmp_path):
    photos = class_folders(tmp_path / "photos", each=3, colours=("red", "blue"))
    for name in ("text", "empty"):
        (photos / "red" / f"{name}.png").write_bytes(b"" if name == "empty" else b"no picture")
    code, out, err = engram("teach", photos, "--name", "bad", "--strict")
    assert (code, out) == (1, "")
    assert "Nothing was published" in err or "empty.png: The image is empty" in err
    assert engram("examples", "ls", "bad")[0] == 5, "there is no such task"
    code, out, err = engram("teach", photos, "--name", "bad", "--table")
    assert (code, out.partition(" ·")[0]) == (0, "bad@1")
    assert f"{photos / 'red' / 'text.png'}: The file looks like" in err
    assert "2 of 8 photos could not be read." in err


def test_examples_are_listed_with_names_and_saved_pictures(engram, tmp_path):
    photos = class_folders(tmp_path / "photos", each=3, colours=("red", "blue"))
    engram("teach", photos, "--name", "named")
    out = engram("examples", "ls", "named", "--table", "--save-thumbnails", tmp_path / "small")[1]
    assert all(path.name in out for path in photos.rglob("*.png"))
    assert "100.0%" in out, "the accuracy of a class"
    pictures = [path.read_bytes() for path in (tmp_path / "small").glob("*.webp")]
    assert [data[8:12] for data in pictures] == [b"WEBP"] * 6
    engram("teach", photos, "--name", "unnamed", "--no-pictures")
    assert {
        one["name"] for one in json.loads(engram("examples", "ls", "unnamed")[1])["examples"]
    } == {None}


def test_any_number_of_photos_is_one_version(engram, tmp_path):
    photos = class_folders(tmp_path / "photos", each=35, colours=("red", "blue"))
    out = engram("teach", photos, "--name", "many", "--table")[1]
    assert out.startswith("many@1 · 70 examples")
    (entry,) = json.loads(engram("tasks", "history", "many")[1])
    assert entry["details"]["note"] == "70 examples added"


def test_suspected_label_errors_are_reported_with_their_files(engram, tmp_path):
    photos = class_folders(tmp_path / "photos", each=5, colours=("red", "blue"))
    whole_picture("blue", 77).save(photos / "red" / "wrong.png")
    out = engram("teach", photos, "--name", "label_issues", "--table")[1]
    assert "Suspected label errors:" in out
    assert f"{photos / 'red' / 'wrong.png'}: red" in out


def test_one_call_teaches(server, tmp_path):
    photos = class_folders(tmp_path / "photos", each=2, colours=("red", "blue"))
    assert teach("called", photos, server=server.url).examples == 4


def test_corrections_of_a_trained_task_reach_its_next_training(
    engram, client, server, folder_of, tmp_path
):
    photos = class_folders(tmp_path / "photos", each=6, colours=("red", "blue"))
    wrong = photos / "red" / "wrong.png"
    whole_picture("blue", 77).save(wrong)
    out = tmp_path / "shades.safetensors"
    options = {"regimes": ("head",), "rates": (0.1,), "epochs": 1, "augment": "none"}
    fit(photos, name="shades", backbone=folder_of("vit"), out=out, **options)
    client.push(out, "shades")
    assert isinstance(client.correct("shades", wrong, "blue"), CorrectionsResult)
    assert '"blue"' in engram("corrections", "shades")[1]
    client.correct("shades", f"sha256:{'0' * 64}", "blue")
    gone = engram("corrections", "shades", "--remove", f"sha256:{'0' * 64}", "--table")
    assert gone[:2] == (0, "shades: 1 corrections removed\n")
    code, printed, err = engram(
        *("train", photos, "--name", "shades", "--out", tmp_path / "again.safetensors"),
        *("--backbone", folder_of("vit"), "--regime", "head", "--lr", "0.1", "--epochs", "1"),
        *("--augment", "none", "--with-corrections"),
    )
    assert code == 0, err
    assert "1 of 1 corrections" in " ".join(f"{printed} {err}".split())
    assert '"removed": 1' in engram("corrections", "shades", "--remove-all")[1]
    assert engram("corrections", "shades", "--remove-all", "--remove", wrong)[0] == 2
    assert engram("tasks", "rm", "shades", "--purge", "--table")[1] == "shades is purged\n"
    assert "was purged" in engram("tasks", "restore", "shades")[2]
