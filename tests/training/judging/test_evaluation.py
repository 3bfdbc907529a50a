"""Bundles judged on data: each on what it knows, all in one pass, never on what it was taught."""

import json
from dataclasses import replace

import pytest
import torch
from engram_bundle import TaskBundle
from engram_server.model import MultiTaskViT, load_backbone
from engram_training.commands.evaluate import as_document
from engram_training.errors import DataError, SettingsConflict
from engram_training.judging.evaluation import evaluate, evaluate_server
from engram_training.run import fit
from engram_vit.answers import Bundle, ImageAnswer, TaskAnswer
from engram_vit.errors import NotFound, ServerError

from tests.training.pictures import brightness, class_folders

QUICK = {"memory": (2,), "rates": (0.1,), "epochs": 6, "batch": 8}


@pytest.fixture(scope="module")
def backbone(folder_of):
    return load_backbone(folder_of("vit"))


@pytest.fixture(scope="module")
def trained(backbone, tmp_path_factory):
    """Two tasks on one data set, one on another, and a child."""
    root = tmp_path_factory.mktemp("trained")
    colours = class_folders(root / "colours", each=10)
    few = class_folders(root / "few", each=10, colours=("red", "blue"), seed=1)
    found = {"colours": colours, "few": few}
    for name, data, extends in (
        ("one", colours, ()),
        ("two", colours, ("one",)),
        ("pair", few, ()),
    ):
        parents = [found[parent] for parent in extends]
        settings = {**QUICK, "regimes": ("memory",) if name == "one" else ("class",)}
        out = root / f"{name}.safetensors"
        fit(data, name=name, backbone=backbone, out=out, extends=parents, **settings)
        found[name] = out
    return found


@pytest.fixture
def fresh(tmp_path):
    """Images that no task has seen."""
    return class_folders(tmp_path / "fresh", each=5, seed=9)


def test_figures_are_those_of_the_model_itself(backbone, trained, fresh):
    found = evaluate([fresh], tasks=[trained["one"]], backbone=backbone)
    (judged,) = found.judged
    model = MultiTaskViT(backbone)
    model.add("one", TaskBundle.load(trained["one"]))
    paths = sorted(fresh.rglob("*.png"))
    pixels = [backbone.preprocessing(path.read_bytes(), max_pixels=None) for path in paths]
    logits = model(torch.stack([torch.from_numpy(each) for each in pixels]), ["one"])["one"]
    torch.testing.assert_close(judged.logits, logits, rtol=0, atol=1e-4)
    assert judged.figures.images == 20
    assert {c.label for c in judged.figures.classes} == {"blue", "green", "red", "yellow"}


def test_several_tasks_in_one_pass_answer_as_each_alone(backbone, trained, fresh):
    bundles = [trained["one"], trained["two"]]
    together = evaluate([fresh], tasks=bundles, backbone=backbone)
    assert [one.task for one in together.judged] == ["one", "two"]
    alone = evaluate([fresh], tasks=bundles[:1], backbone=backbone)
    torch.testing.assert_close(together.judged[0].logits, alone.judged[0].logits, rtol=0, atol=1e-4)


def test_each_task_is_evaluated_on_data_with_its_labels(backbone, trained, fresh):
    data = [fresh, trained["few"]]
    found = evaluate(data, tasks=[trained["one"], trained["pair"]], backbone=backbone)
    assert [(one.data, one.task) for one in found.judged] == [
        ("fresh", "one"),
        ("few", "one"),  # knows red and blue as well
        ("few", "pair"),
    ]


def test_training_data_is_evaluated_on_held_out_images(backbone, trained):
    found = evaluate([trained["colours"]], tasks=[trained["one"]], backbone=backbone)
    (judged,) = found.judged
    bundle = TaskBundle.load(trained["one"])
    assert judged.figures.images == bundle.manifest.training["images"]["test"]
    assert judged.figures.values["accuracy"] == bundle.manifest.metrics["test_accuracy"]
    assert "held-out" in found.notes[0]
    taught = evaluate(
        [trained["colours"]], tasks=[trained["one"]], backbone=backbone, split="train"
    )
    assert taught.judged[0].figures.images == 32


def test_classes_without_names_are_matched_by_order(backbone, trained, fresh, tmp_path):
    bundle = TaskBundle.load(trained["one"])
    unnamed = bundle.manifest.model_copy(update={"labels": tuple(f"class_{k}" for k in range(4))})
    path = tmp_path / "unnamed.safetensors"
    replace(bundle, manifest=unnamed).save(path)
    found = evaluate([fresh], tasks=[path, trained["one"]], backbone=backbone)
    assert [one.by_order for one in found.judged] == [True, False]
    one, two = (judged.figures.values["accuracy"] for judged in found.judged)
    assert one == two


def test_unreadable_images_are_listed(backbone, trained, fresh):
    (fresh / "red" / "bad.png").write_text("x")
    found = evaluate([fresh], tasks=[trained["one"]], backbone=backbone)
    assert [one.path.name for one in found.skipped] == ["bad.png"]
    assert found.judged[0].figures.images == 20


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("strangers", r"'pair' \(single_label\) has 2 of them, but not 'green'"),
        ("task_type", r"No task matches 'values.csv'. The data 'values.csv' \(regression"),
        ("split", "has no split 'test'"),
        ("twice", "The same bundle is listed twice"),
    ],
)
def test_mismatches_are_rejected(backbone, trained, fresh, tmp_path, case, message):
    data, tasks, split = {
        "strangers": (fresh, ["pair"], None),
        "task_type": (brightness(tmp_path / "numbers"), ["pair"], None),
        "split": (fresh, ["one"], "test"),
        "twice": (fresh, ["one", "one"], None),
    }[case]
    bundles = [trained[name] for name in tasks]
    with pytest.raises(DataError, match=message):
        evaluate([data], tasks=bundles, backbone=backbone, split=split)


def test_a_task_without_data_does_not_discard_the_others(backbone, trained, fresh):
    tasks = [trained["one"], trained["pair"]]
    found = evaluate([fresh], tasks=tasks, backbone=backbone)
    assert [one.task for one in found.judged] == ["one"]
    (failure,) = found.failed
    assert failure.name == "pair"
    assert "has 2 of them, but not 'green'" in failure.reason


def test_a_data_set_without_a_task_does_not_discard_the_others(backbone, trained, fresh, tmp_path):
    numbers = brightness(tmp_path / "numbers")
    found = evaluate([numbers, fresh], tasks=[trained["one"]], backbone=backbone)
    assert [(one.task, one.data) for one in found.judged] == [("one", "fresh")]
    assert [one.name for one in found.failed] == ["values.csv"]


class FakeServer:
    """A client whose server has two tasks of four classes, and fails for some."""

    def __init__(self, bundle, broken=(), rejected=()):
        self._bundle, self._broken, self._rejected = bundle, broken, rejected
        self.requests = []

    def pull(self, task):
        if task == "gone":
            raise NotFound("There is no task 'gone'.", status=404)
        return Bundle(task, 1, "sha256:0", self._bundle)

    def predict_iter(self, paths, references, **options):
        self.requests.append(list(references))
        if any(name in self._rejected for name in references):
            raise ServerError("It cannot be served.", status=503)
        for index, path in enumerate(paths):
            if path.name == "bad.png":
                yield ImageAnswer(str(path), index, error="It looks like text.")
                continue
            good = TaskAnswer(1, logits=(3.0, 0.0, 0.0, 0.0))
            bad = TaskAnswer(1, error="Its numbers are not finite.")
            tasks = {name: bad if name in self._broken else good for name in references}
            yield ImageAnswer(str(path), index, tasks=tasks)


@pytest.mark.parametrize("how", ["broken", "rejected"])
def test_a_server_reports_and_fails_per_task(trained, fresh, how):
    (fresh / "red" / "bad.png").write_text("x")
    client = FakeServer(trained["one"].read_bytes(), **{how: ("b@1",)})
    found = evaluate_server([fresh], tasks=["a", "b", "gone"], client=client)
    assert [(one.task, one.figures.values["accuracy"]) for one in found.judged] == [("a", 0.25)]
    assert [one.name for one in found.failed] == ["gone", "b"]
    assert [one.path.name for one in found.skipped] == ["bad.png"]


def test_without_any_figures_the_reasons_are_the_error(trained, fresh):
    with pytest.raises(DataError, match="There is no task 'gone'"):
        evaluate_server([fresh], tasks=["gone"], client=FakeServer(b""))


def test_a_child_without_its_parent_is_refused(backbone, trained, fresh):
    with pytest.raises(SettingsConflict, match="Pass that bundle"):
        evaluate([fresh], tasks=[trained["two"]], backbone=backbone)


def test_the_document_is_json(backbone, trained, fresh):
    found = evaluate([fresh], tasks=[trained["one"]], backbone=backbone)
    document = json.loads(json.dumps(as_document(found), allow_nan=False))
    assert (
        document["results"][0]["metrics"]["accuracy"] == found.judged[0].figures.values["accuracy"]
    )
    assert len(document["results"][0]["classes"]) == 4
