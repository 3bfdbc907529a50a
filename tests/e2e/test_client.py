"""The client, its commands and `engram evaluate --server` with a real server in its own process."""

import asyncio
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from engram_bundle import TaskBundle
from engram_server.access.keys import edit_keys
from engram_server.model import load_backbone
from engram_training.judging.evaluation import evaluate
from engram_training.run import fit
from engram_vit import AsyncClient, Client
from engram_vit.errors import AccessDenied, Conflict, ImageError, Invalid, NotFound
from PIL import Image

from tests.e2e.server_process import serving
from tests.serving import make_bundle, photo, reference_logits
from tests.training.pictures import class_folders

TOLERANCE = 1e-4
# Larger than the backbone's 32 pixels, so that shrinking has something to do.
PHOTO = photo(3, size=(120, 200))


@pytest.fixture(scope="module")
def backbone(folder_of):
    return load_backbone(folder_of("vit"))


@pytest.fixture(scope="module")
def server(folder_of, tmp_path_factory):
    # Contexts in full precision: a repeated image gets the same answer.
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, folder_of("vit"), cache_precision="float32") as running:
        yield running


@pytest.fixture(scope="module")
def birds(server, backbone):
    """A published task and its bundle."""
    bundle = make_bundle(backbone, 1, description="Which bird?")
    with Client(server.url) as client:
        client.push(bundle.to_bytes(), "birds")
    return bundle


@pytest.fixture(scope="module")
def guarded(folder_of, tmp_path_factory):
    """A server with two keys of its settings, a file of more, and an audit log."""
    folder = tmp_path_factory.mktemp("guarded")
    with edit_keys(folder / "keys.json"):
        pass  # there it is, with no key
    keys = {"api_key": "reader-key", "admin_key": "admin-key-1", "keys_file": folder / "keys.json"}
    audit = folder / "audit.jsonl"
    with serving(folder, folder_of("vit"), audit_log=audit, **keys) as running:
        yield running


# --- predicting -----------------------------------------------------------------------------------


def test_every_kind_of_image_has_the_same_answer(client, birds, backbone, tmp_path):
    path = tmp_path / "bird.png"
    path.write_bytes(PHOTO)
    picture = Image.open(io.BytesIO(PHOTO))
    images = [path, str(path), PHOTO, picture, np.asarray(picture)]
    first = client.predict(images, ["birds"], returns="logits")
    again = client.predict([first[0].digest], ["birds"], returns="logits")
    shrunk = client.predict(path, ["birds"], returns="logits", shrink=True)
    expected = reference_logits(backbone, birds, PHOTO)
    errors = [
        np.abs(np.array(answer["birds"].logits) - expected).max()
        for answer in (*first, *again, *shrunk)
    ]
    # Pictures that are not files are shrunk here, by Pillow and not by torch: a few pixels differ
    # by one level.
    pictures, files = [errors[3], errors[4], errors[-1]], [*errors[:3], errors[5]]
    assert max(files) < TOLERANCE
    assert max(pictures) < 0.005
    assert again[0].cache == "hit"
    assert shrunk[0].digest != first[0].digest


def test_a_list_longer_than_a_request_may_be_keeps_its_order(client, birds):
    images = [photo(number) for number in range(150)]
    answers = client.predict(images, "birds", top_k=1)
    alone = client.predict(images[77], "birds", top_k=1)[0]
    assert len({answer.digest for answer in answers}) == 150
    assert answers[77].digest == alone.digest
    assert answers[77].top["birds"].label == alone.top["birds"].label


def test_attention_is_returned_on_request(client, birds):
    client.predict(PHOTO, tasks="birds")  # from now on its context is cached
    plain = client.predict(PHOTO, tasks="birds")[0]["birds"]
    (explained,) = client.predict(PHOTO, tasks="birds", explain="attention")
    attention = explained["birds"].attention
    assert plain.attention is None
    assert explained["birds"].predictions == plain.predictions
    weights = np.array(attention.grid)
    assert weights.shape == (4, 4)  # 32 pixels in patches of 8
    assert weights.sum() == pytest.approx(attention.on_patches, abs=1e-4)
    assert 0 < attention.on_patches < 1


def test_the_asynchronous_client_says_the_same(server, client, birds):
    async def run():
        async with AsyncClient(server.url) as awaited:
            await awaited.task("birds")
            answers = await awaited.predict([PHOTO] * 40, "birds")
            listed = [answer.digest async for answer in awaited.predict_iter([PHOTO] * 40, "birds")]
            return answers, listed

    answers, listed = asyncio.run(run())
    assert listed == [answer.digest for answer in answers]
    assert answers[0].top == client.predict(PHOTO, "birds")[0].top


def test_a_bad_image_among_good_ones_is_found(client, birds):
    images = [*(photo(number) for number in range(20)), b"not an image", photo(99)]
    with pytest.raises(ImageError, match="image 20: The file looks like text") as raised:
        client.predict(images, "birds")
    assert [answer.index for answer in raised.value.answered] == [*range(20), 21]


def test_a_digest_that_is_not_cached_is_an_error(client, birds):
    with pytest.raises(ImageError, match="is not cached") as raised:
        client.predict([PHOTO, f"sha256:{'0' * 64}"], "birds")
    assert [answer.index for answer in raised.value.answered] == [0]


def test_an_unknown_task_is_named_with_what_was_meant(client, birds):
    with pytest.raises(NotFound, match="Did you mean 'birds'") as raised:
        client.predict(PHOTO, "brids")
    assert raised.value.names == ("brids",)


# --- tasks ----------------------------------------------------------------------------------------


def test_the_life_of_a_task(client, backbone, tmp_path):
    one, two = (make_bundle(backbone, seed) for seed in (11, 12))
    file = one.save(tmp_path / "life.safetensors")
    assert client.validate(file).valid
    first = client.push(file, "team/life", only_new=True)
    assert (first.version, first.created, first.digest) == (1, True, one.digest)
    assert not client.push(file, "team/life").created
    with pytest.raises(Conflict):
        client.push(two.to_bytes(), "team/life", only_new=True)

    client.push(two.to_bytes(), "team/life", ["canary"])
    assert client.task("team/life").aliases == {"canary": 2, "default": 1}
    assert client.set_alias("team/life", "default", 2).aliases["default"] == 2
    assert client.rollback("team/life").aliases["default"] == 1
    assert client.pull("team/life:canary").data == two.to_bytes()
    saved = client.pull("team/life@1").save(tmp_path)
    assert saved.name == "team-life-1.safetensors"
    assert TaskBundle.load(saved).digest == one.digest
    with pytest.raises(NotFound, match="has no alias 'gold'; it has canary, default"):
        client.pull("team/life:gold")

    assert client.remove_alias("team/life", "canary").aliases == {"default": 1}
    assert client.retire("team/life", 2).versions == (1,)
    assert client.retire("team/life").versions == ()
    with pytest.raises(NotFound):
        client.task("team/life")
    assert client.restore("team/life").versions == (1,)
    kinds = [entry.kind for entry in client.history("team/life")]
    assert kinds[0] == "restore"
    assert kinds[-1] == "publish"
    listed = {task.task: task for task in client.tasks()}
    assert listed["team/life"].status == "ready"
    assert "base" in listed


def test_a_file_that_is_no_bundle_is_refused_and_the_verdict_says_why(client):
    with pytest.raises(Invalid, match="bundle"):
        client.push(b"nothing of the kind", "nothing")
    verdict = client.validate(b"nothing of the kind")
    assert not verdict.valid
    assert verdict.problems


def test_keys_are_sent_and_a_wrong_one_is_rejected(guarded, backbone):
    bundle = make_bundle(backbone, 5).to_bytes()
    with Client(guarded.url) as client, pytest.raises(AccessDenied, match="send the key"):
        client.predict([PHOTO] * 3)
    with Client(guarded.url, "reader-key") as client:
        assert client.predict(PHOTO, "base")
        with pytest.raises(AccessDenied, match="admin key"):
            client.push(bundle, "birds")
    with Client(guarded.url, "admin-key-1") as client:
        assert client.push(bundle, "birds").version == 1


def test_a_key_made_or_revoked_counts_without_a_restart(guarded, backbone, engram):
    file = ["--file", guarded.log.with_name("keys.json")]
    code, out, _ = engram("keys", "add", "team b", "--scope", "publish:team-b/*", *file)
    assert code == 0
    bundle, key = make_bundle(backbone, 6).to_bytes(), out.strip()
    key_id = key.split("_")[1]
    with Client(guarded.url, key) as client:
        await_soon(lambda: is_accepted(client, bundle, "team-b/birds"))
        assert not is_accepted(client, bundle, "team-a/birds")
        assert engram("keys", "revoke", key_id, *file)[0] == 0
        await_soon(lambda: not is_accepted(client, bundle, "team-b/birds"))

    # The audit log has every action with its caller, and its chain is intact.
    log = guarded.log.with_name("audit.jsonl")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    done = [(one["action"], one["outcome"]) for one in records if one.get("who") == f"key:{key_id}"]
    assert done[:3] == [("publish", "begun"), ("publish", "ended"), ("publish", "refused")]
    assert [key_id] in [one.get("keys") for one in records]
    code, out, _ = engram("audit", "verify", log)
    assert (code, out.startswith("The chain is intact up to record")) == (0, True)


def is_accepted(client, bundle, name):
    try:
        client.push(bundle, name)
    except AccessDenied:
        return False
    return True


def await_soon(condition):
    until = time.monotonic() + 30  # `tests/test_keys.py` holds the second that we promise
    while not condition():
        assert time.monotonic() < until


# --- commands -------------------------------------------------------------------------------------


def test_commands_from_push_to_pull(engram, backbone, tmp_path):
    one, two = (
        make_bundle(backbone, seed).save(tmp_path / f"w{seed}.safetensors") for seed in (21, 22)
    )
    code, out, err = engram("push", one, "--name", "weeds")
    assert (code, err) == (0, "")
    assert json.loads(out)["version"] == 1
    code, out, _ = engram("push", two, "--name", "weeds", "--alias", "canary", "--table")
    assert (code, out.split(" · ")[:2]) == (0, ["weeds@2 published", "canary"])
    assert engram("tasks", "alias", "weeds", "default", 2)[0] == 0
    assert json.loads(engram("tasks", "rollback", "weeds")[1])["aliases"]["default"] == 1
    assert "default → 1" in engram("tasks", "ls", "--table")[1]
    assert json.loads(engram("tasks", "show", "weeds")[1])["versions"] == [1, 2]
    assert "canary" in engram("tasks", "show", "weeds", "--table")[1]
    assert json.loads(engram("tasks", "history", "weeds", "--limit", 1)[1])[0]["kind"] == "alias"
    assert "publish" in engram("tasks", "history", "weeds", "--table")[1]

    (tmp_path / "a.png").write_bytes(PHOTO)
    code, out, _ = engram("predict", tmp_path / "a.png", "--tasks", "weeds,base", "--top-k", 2)
    assert code == 0
    assert len(json.loads(out)["tasks"]["weeds"]["predictions"]) == 2

    target = tmp_path / "pulled.safetensors"
    assert engram("pull", "weeds@2", "--out", target)[0] == 0
    assert target.read_bytes() == two.read_bytes()
    code, _, err = engram("pull", "weeds@1", "--out", target)
    assert (code, target.read_bytes()) == (2, two.read_bytes())
    assert "exists with other content" in err

    assert engram("tasks", "alias", "weeds", "canary", "--remove")[0] == 0
    assert json.loads(engram("tasks", "rm", "weeds@2")[1])["versions"] == [1]
    assert "engram tasks restore weeds" in engram("tasks", "rm", "weeds", "--table")[1]
    assert engram("tasks", "show", "weeds")[0] == 5
    assert json.loads(engram("tasks", "restore", "weeds")[1])["versions"] == [1]


def test_replicas_are_waited_for_and_listed(engram, server, backbone, tmp_path):
    file = make_bundle(backbone, 23).save(tmp_path / "waited.safetensors")
    code, out, err = engram("push", file, "--wait", "all", "--timeout", 20, "--table")
    assert (code, err) == (0, "")
    assert out.rstrip().endswith("served by all replicas (1)")
    (listed,) = json.loads(engram("replicas")[1])
    assert (listed["this"], listed["address"]) == (True, server.url)
    assert server.url in engram("replicas", "--table")[1]


def test_a_dry_run_publishes_nothing(engram, backbone, tmp_path):
    good = make_bundle(backbone, 31).save(tmp_path / "dry.safetensors")
    assert engram("push", good, "--dry-run", "--table")[1] == f"{good}: valid\n"
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"x")
    code, out, _ = engram("push", good, bad, "--dry-run")
    assert code == 1
    assert [json.loads(line)["valid"] for line in out.splitlines()] == [True, False]
    assert engram("tasks", "show", "dry")[0] == 5


def test_each_mistake_has_a_message_and_an_exit_code(engram, birds, tmp_path):
    (tmp_path / "a.png").write_bytes(PHOTO)
    code, out, err = engram("predict", tmp_path / "a.png", "--tasks", "brids")
    assert (code, out) == (5, "")
    assert err.startswith("error: There is no task 'brids' in the store. Did you mean 'birds'?")
    assert engram("tasks", "rm", "birds:default")[0] == 2
    assert engram("tasks", "alias", "birds", "canary")[0] == 2
    assert engram("push", "a.safetensors", "b.safetensors", "--name", "both")[0] == 2


# --- evaluating -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(backbone, tmp_path_factory):
    """Pictures, a task trained on them, and its child."""
    root = tmp_path_factory.mktemp("trained")
    photos = class_folders(root / "photos", each=10)
    settings = {"memory": (2,), "rates": (0.1,), "epochs": 6, "batch": 8}
    parent, child = root / "colours.safetensors", root / "child.safetensors"
    fit(photos, name="colours", backbone=backbone, out=parent, regimes=("memory",), **settings)
    fit(
        photos,
        name="child",
        backbone=backbone,
        out=child,
        extends=[parent],
        regimes=("class",),
        **settings,
    )
    return photos, parent, child


def test_a_server_judged_gives_what_the_report_and_evaluate_say(
    engram, server, backbone, trained, tmp_path
):
    photos, parent, child = trained
    assert engram("push", parent, child)[0] == 0
    tasks = "colours,child@1"
    code, out, err = engram("evaluate", photos, "--server", server.url, "--tasks", tasks, "--json")
    assert code == 0, err
    remote = json.loads(out)
    local = evaluate([photos], tasks=[parent, child], backbone=backbone)

    report = TaskBundle.load(parent).manifest.metrics["test_accuracy"]
    assert remote["results"][0]["metrics"]["accuracy"] == report
    assert [one["task"] for one in remote["results"]] == ["colours", "child@1"]
    for one, here in zip(remote["results"], local.judged, strict=True):
        assert one["images"] == here.figures.images
        assert one["metrics"] == pytest.approx(here.figures.values, abs=1e-4)
        assert one["metrics"]["accuracy"] == here.figures.values["accuracy"]
        assert [c["recall"] for c in one["classes"]] == [c.recall for c in here.figures.classes]
    assert remote["notes"] == local.notes


def test_the_server_says_of_each_image_what_evaluate_does(server, backbone, trained, tmp_path):
    _, parent, _ = trained
    fresh = class_folders(tmp_path / "fresh", each=5, seed=9)
    (judged,) = evaluate([fresh], tasks=[parent], backbone=backbone).judged
    with Client(server.url) as client:
        client.push(parent, "colours")
        answers = client.predict(sorted(fresh.rglob("*.png")), "colours", top_k=1)
    labels = TaskBundle.load(parent).labels
    assert [answer.top["colours"].label for answer in answers] == [
        labels[place] for place in judged.logits.argmax(dim=1)
    ]


def test_judging_a_server_skips_and_lists_what_cannot_be_read(engram, server, trained, tmp_path):
    fresh = class_folders(tmp_path / "fresh", each=2, seed=4)
    (fresh / "red" / "bad.png").write_text("x")
    engram("push", trained[1])
    code, out, _ = engram("evaluate", fresh, "--server", server.url, "--tasks", "colours", "--json")
    assert code == 0
    found = json.loads(out)
    assert [Path(one["path"]).name for one in found["skipped"]] == ["bad.png"]
    assert found["results"][0]["images"] == 8


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--tasks", "colours,colours@1"], "are the same. Remove one."),
        (
            ["--tasks", "colours", "--backbone", "x"],
            "--backbone or --batch",
        ),
        (["--tasks", "base"], "No task matches"),
    ],
)
def test_tasks_that_cannot_be_evaluated_are_clear_errors(
    engram, server, trained, options, complaint
):
    engram("push", trained[1])
    code, _, err = engram("evaluate", trained[0], "--server", server.url, *options)
    assert code == 1
    assert complaint in err


def test_the_installed_command_works_in_a_pipe(server, birds, tmp_path):
    (tmp_path / "a.png").write_bytes(PHOTO)
    script = Path(sys.executable).with_name("engram")
    done = subprocess.run(
        [script, "predict", tmp_path, "--tasks", "birds", "--server", server.url],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert list(json.loads(done.stdout)["tasks"]) == ["birds"]
