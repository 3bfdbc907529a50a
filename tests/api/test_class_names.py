"""Teaching by the names of classes, on a server whose backbone has a text tower."""

import numpy as np
import pytest
from engram_bundle import TaskBundle
from engram_server.app import build_engine, build_metrics, create_app
from engram_server.model import load_backbone
from engram_server.settings import Settings
from starlette.testclient import TestClient

from tests.api.test_examples import listed, taught, teach, teach_json
from tests.api.test_problems import assert_problem
from tests.serving import photo, reference_logits
from tests.texts import text_folder

NAMES = ["snow", "beach", "forest"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_folder("clip", tmp_path_factory.mktemp("text") / "clip")


@pytest.fixture(scope="module")
def reader(folder):
    """A client of a server that reads names."""
    settings = Settings(
        backbone=str(folder),
        store="memory://",
        allowed_hosts="testserver",
        devices="cpu",
        poll_seconds=3600,
        decode_threads=1,
        bundle_cache_bytes=0,
    )
    metrics = build_metrics(settings)
    engine = build_engine(settings, metrics)
    engine.start()
    try:
        with TestClient(create_app(settings, engine, metrics=metrics)) as client:
            yield client
    finally:
        engine.stop()


def named(client, task, names, **members):
    return client.post(f"/tasks/{task}/examples", json={"classes": names, **members})


def bundle_of(client, task, version):
    return TaskBundle.from_bytes(client.get(f"/tasks/{task}/versions/{version}/bundle").content)


def scores(client, task, image):
    answer = client.post(f"/predict?tasks={task}&top_k=9", content=image).json()
    predictions = answer["images"][0]["tasks"][task]["predictions"]
    return {each["label"]: each["score"] for each in predictions}


def test_readyz_says_whether_names_are_read(reader, client):
    assert reader.get("/readyz").json()["reads_names"] is True
    assert client.get("/readyz").json()["reads_names"] is False


def test_names_alone_make_a_task_that_answers_as_the_model_does(reader, folder):
    result = taught(named(reader, "scene", NAMES, templates=["a photo of the {}"]))
    assert [each.label for each in result.classes] == sorted(NAMES)
    assert (result.examples, result.leave_one_out, result.task_type) == (0, None, "single_label")
    bundle = bundle_of(reader, "scene", 1)
    assert bundle.manifest.normalised
    assert bundle.manifest.taught.templates == ("a photo of the {}",)
    logits = reference_logits(load_backbone(folder), bundle, photo(1))
    expected = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    found = scores(reader, "scene", photo(1))
    assert [found[label] for label in bundle.labels] == pytest.approx(expected, abs=1e-4)


def test_photos_that_are_added_later_are_mixed_with_the_names(reader):
    taught(named(reader, "mixed", NAMES))
    alone = bundle_of(reader, "mixed", 1)
    before = scores(reader, "mixed", photo(2))["forest"]
    result = taught(teach(reader, "mixed", ("forest", photo(2)), ("beach", photo(3))))
    assert [(each.label, each.examples) for each in result.classes] == [
        ("beach", 1),
        ("forest", 1),
        ("snow", 0),
    ]
    assert scores(reader, "mixed", photo(2))["forest"] > before
    bundle = bundle_of(reader, "mixed", 2)
    assert np.array_equal(bundle.tensors["text.weight"], alone.tensors["head.weight"])
    assert len(listed(reader, "mixed").examples) == 2


def test_taking_all_photos_away_leads_back_to_the_names(reader):
    first = taught(named(reader, "back", NAMES))
    digests = []
    for seed in (4, 5):
        taught(teach(reader, "back", ("forest", photo(seed))))
        digests += [each.digest for each in listed(reader, "back").examples]
    query = "&".join(f"digest={digest}" for digest in set(digests))
    answer = reader.delete(f"/tasks/back/examples?{query}")
    assert answer.status_code == 200, answer.text
    assert answer.json()["digest"] == first.digest


def test_a_name_added_later_is_read_as_those_before(reader):
    taught(named(reader, "more", NAMES[:2], templates=["a painting of {}"]))
    taught(named(reader, "more", NAMES[2:]))
    taught(named(reader, "at-once", NAMES, templates=["a painting of {}"]))
    more, once = bundle_of(reader, "more", 2), bundle_of(reader, "at-once", 1)
    assert more.labels == once.labels
    np.testing.assert_allclose(more.tensors["head.weight"], once.tensors["head.weight"], rtol=1e-5)


def test_names_and_photos_may_come_together(reader):
    answer = teach_json(
        reader,
        "both",
        *[{"digest": d, "label": "snow"} for d in known_digests(reader)],
        classes=NAMES,
    )
    result = taught(answer)
    assert {each.label: each.examples for each in result.classes}["snow"] == 1


def known_digests(client):
    return [client.post("/predict", content=photo(6)).json()["images"][0]["digest"]]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"classes": ["snow"]}, "the only class"),
        ({"classes": ["snow", "snow"]}, "twice"),
        ({"classes": NAMES, "templates": ["a photo"]}, "{}"),
        ({"classes": ["snow", "a " * 20]}, "tokens"),
    ],
)
def test_names_that_make_no_task_are_rejected(reader, body, says):
    answer = reader.post("/tasks/none/examples", json=body)
    assert says in assert_problem(answer, 422, "unteachable-examples")["detail"]


def test_neither_photos_nor_names_is_an_invalid_request(reader):
    answer = reader.post("/tasks/none/examples", json={"examples": []})
    assert "classes or both" in assert_problem(answer, 422, "invalid-request")["detail"]


def test_a_server_without_a_text_tower_says_so(client):
    problem = assert_problem(named(client, "scene2", NAMES), 409, "no-text-tower")
    assert "no text tower" in problem["detail"]
    assert "images" in problem["detail"]
