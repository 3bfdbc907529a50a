"""The fast path equals the dense-mask reference, and the unmodified model, whatever rides along."""

import json

import pytest
import torch
from engram_server.errors import ExtensionError, TaskError, TaskMismatch, UnknownTask
from engram_server.model import MultiTaskViT, TaskWeights, load_backbone, masked_pass
from engram_server.model.tasks import StackCache, prepare
from safetensors.torch import load_file

from tests.families import (
    FAMILIES_WITH_HEAD,
    FAMILIES_WITHOUT_HEAD,
    KINDS,
    image_batch,
    unmodified_base,
)
from tests.model.tasks import add_all, assert_same, head_only, random_task, some_tasks, weights
from tests.reference.dense import dense_forward
from tests.reference.test_reproduction import ORACLE, read_tasks

TOLERANCE = 1e-4  # DESIGN §1, absolute, for logits of scale 1
PLACEMENTS = ["pre_norm", "post_norm"]
NO_WORSE = 1e-5  # of a task's own scale, when only other tasks change


def assert_matches_reference(backbone, model, tasks, images=3, atol=TOLERANCE):
    pixels = image_batch(model, images)
    with torch.no_grad():
        expected = dense_forward(model, pixels, tasks)
        got = add_all(MultiTaskViT(backbone), tasks)(pixels)
    assert_same(got, expected, atol)


# ---------------------------------------------------------------------------------------------
# One task, every family


@pytest.mark.parametrize("memory", [None, 0, 1, 7, 20])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", KINDS)
def test_one_task(hugging_face, backbone_of, family, placement, memory):
    model = hugging_face(family)
    task = random_task(model, 1, memory=memory, placement=placement)
    assert_matches_reference(backbone_of(family), model, {"t": task})


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", KINDS)
def test_every_memory_size_from_0_to_20_side_by_side(hugging_face, backbone_of, family, placement):
    model = hugging_face(family)
    tasks = {f"m{m}": random_task(model, m, m, placement, classes=2 + m % 4) for m in range(21)}
    assert_matches_reference(backbone_of(family), model, tasks)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("family", KINDS)
def test_head_only_task(hugging_face, backbone_of, family, bias):
    model = hugging_face(family)
    assert_matches_reference(backbone_of(family), model, {"t": head_only(model, 1, bias=bias)})


@pytest.mark.parametrize("overrides", [{"image_size": 36}, {"image_size": 64, "patch_size": 16}])
@pytest.mark.parametrize("family", ["vit", "deit-teacher", "dinov2-registers", "clip"])
def test_other_grids_of_patches(hugging_face, backbone_of, family, overrides):
    """36 is not a multiple of 8: the edges are ignored, as in the convolution."""
    model = hugging_face(family, **overrides)
    assert_matches_reference(backbone_of(family, **overrides), model, some_tasks(model, 4))


@pytest.mark.parametrize("images", [1, 2, 17])
def test_any_batch_size(hugging_face, backbone_of, images):
    model = hugging_face("vit")
    assert_matches_reference(backbone_of("vit"), model, some_tasks(model, 5), images=images)


# ---------------------------------------------------------------------------------------------
# Several tasks: concatenation, extension, both

GRAPHS = {
    "concatenation": {"a": (), "b": (), "c": ()},
    "chain": {"a": (), "b": ("a",), "c": ("b",), "d": ("c",)},
    "diamond": {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")},
    "two parents": {"a": (), "b": (), "c": ("a", "b")},
    "one parent, many children": {"a": (), "b": ("a",), "c": ("a",), "d": ("a",)},
    "a parent named with its own parent": {"a": (), "b": ("a",), "c": ("a", "b")},
    "chain, diamond and loners": {
        "loner": (),
        "a": (),
        "b": ("a",),
        "c": ("b",),
        "other": (),
        "left": ("other",),
        "right": ("other",),
        "bottom": ("left", "right"),
        "across": ("c", "bottom"),
        "last loner": (),
    },
}


def tasks_of(model, graph, seed=0):
    """Tasks in the shape of a graph, with memory sizes (0 too) and placements mixed."""
    return {
        name: random_task(
            model,
            seed + index,
            memory=(3, 0, 5, 1, None, 2)[index % 6],
            placement=PLACEMENTS[(index // 2) % 2],
            parents=parents,
            classes=3 + index % 3,
        )
        for index, (name, parents) in enumerate(graph.items())
    }


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("family", KINDS)
def test_graphs_of_tasks(hugging_face, backbone_of, family, graph):
    model = hugging_face(family)
    assert_matches_reference(backbone_of(family), model, tasks_of(model, GRAPHS[graph]))


def test_a_head_only_parent_gives_its_child_nothing_to_attend_to(hugging_face, backbone_of):
    model = hugging_face("vit")
    tasks = {"head": head_only(model, 1), "child": random_task(model, 2, parents=("head",))}
    assert_matches_reference(backbone_of("vit"), model, tasks)


def test_a_head_only_task_has_no_row_to_extend_with(hugging_face, backbone_of):
    model = hugging_face("vit")
    fast = MultiTaskViT(backbone_of("vit"))
    fast.add("a", weights(random_task(model, 1)))
    with pytest.raises(ExtensionError):
        fast.add("head", weights(head_only(model, 2)), extends=("a",))


@pytest.mark.parametrize("graph", ["chain", "diamond", "chain, diamond and loners"])
@pytest.mark.parametrize("family", ["vit", "deit", "dinov2-registers", "clip-vision"])
def test_a_child_is_requested_alone(hugging_face, backbone_of, family, graph):
    """Its ancestors take part in the pass although they were not requested."""
    model = hugging_face(family)
    tasks = tasks_of(model, GRAPHS[graph])
    pixels = image_batch(model, 3)
    fast = add_all(MultiTaskViT(backbone_of(family)), tasks)
    with torch.no_grad():
        expected = dense_forward(model, pixels, tasks)
        for name in tasks:
            assert_same(fast(pixels, tasks=[name]), {name: expected[name]}, TOLERANCE)


# ---------------------------------------------------------------------------------------------
# The backbone's own answers are untouched


@pytest.mark.parametrize("riders", [0, 1, 50])
@pytest.mark.parametrize("family", FAMILIES_WITH_HEAD)
def test_base_is_the_unmodified_model_with_tasks_riding_along(
    hugging_face, backbone_of, family, riders
):
    model = hugging_face(family)
    pixels = image_batch(model, 2)
    fast = add_all(MultiTaskViT(backbone_of(family)), some_tasks(model, riders))
    with torch.no_grad():
        got = fast(pixels)
    assert len(got) == riders + 1
    assert_same({"base": got["base"]}, {"base": unmodified_base(model, pixels)}, TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES_WITHOUT_HEAD)
def test_a_backbone_without_a_head_has_no_base(backbone_of, family):
    backbone = backbone_of(family)
    model = MultiTaskViT(backbone)
    assert backbone.base is None
    assert model.tasks == []
    with pytest.raises(UnknownTask, match="base"):
        model(torch.zeros(1, 3, 32, 32), tasks=["base"])


# ---------------------------------------------------------------------------------------------
# Tasks come and go without moving the others


def assert_unmoved(before, after):
    for name, logits in before.items():
        scale = logits.abs().max().item()
        assert (after[name] - logits).abs().max().item() <= NO_WORSE * scale, name


@pytest.mark.parametrize("family", ["vit", "deit-teacher", "dinov2", "clip"])
def test_adding_a_task_moves_no_other(hugging_face, backbone_of, family):
    model = hugging_face(family)
    pixels = image_batch(model, 3)
    fast = add_all(MultiTaskViT(backbone_of(family)), some_tasks(model, 4))
    for index in range(8):
        before = fast(pixels)
        task = random_task(model, 100 + index, memory=index * 3, placement=PLACEMENTS[index % 2])
        fast.add(f"new-{index}", weights(task), extends=("task-0",) if index % 2 else ())
        assert_unmoved(before, fast(pixels))


def test_removing_a_task_moves_no_other(hugging_face, backbone_of):
    model = hugging_face("vit")
    pixels = image_batch(model, 3)
    tasks = some_tasks(model, 6)
    fast = add_all(MultiTaskViT(backbone_of("vit")), tasks)
    for name in tasks:
        before = fast(pixels)
        fast.remove(name)
        after = fast(pixels)
        assert set(before) - set(after) == {name}
        assert_unmoved({key: before[key] for key in after}, after)


def test_a_new_version_of_a_task_moves_no_other(hugging_face, backbone_of):
    model = hugging_face("vit")
    pixels = image_batch(model, 3)
    tasks = some_tasks(model, 6)
    fast = add_all(MultiTaskViT(backbone_of("vit")), tasks)
    for index, name in enumerate(tasks):
        before = fast(pixels)
        tasks[name] = random_task(model, 200 + index, memory=index)
        fast.add(name, weights(tasks[name]))
        after = fast(pixels)
        assert_unmoved({key: before[key] for key in after if key != name}, after)
        with torch.no_grad():
            expected = dense_forward(model, pixels, {name: tasks[name]})[name]
        assert_same({name: after[name]}, {name: expected}, TOLERANCE)


def test_a_new_version_of_a_parent_reaches_its_children(hugging_face, backbone_of):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    tasks = tasks_of(model, GRAPHS["chain, diamond and loners"])
    fast = add_all(MultiTaskViT(backbone_of("vit")), tasks)
    fast(pixels)
    tasks["a"] = random_task(model, 77, memory=4)
    fast.add("a", weights(tasks["a"]))
    with torch.no_grad():
        assert_same(fast(pixels), dense_forward(model, pixels, tasks), TOLERANCE)


def test_an_image_is_answered_alike_in_any_company(hugging_face, backbone_of):
    model = hugging_face("vit")
    pixels = image_batch(model, 6)
    fast = add_all(MultiTaskViT(backbone_of("vit")), some_tasks(model, 5))
    together = fast(pixels)
    for index in range(6):
        alone = fast(pixels[index : index + 1])
        assert_unmoved({name: together[name][index : index + 1] for name in alone}, alone)


# ---------------------------------------------------------------------------------------------
# Requested tasks


def test_results_are_in_the_order_of_the_request(hugging_face, backbone_of):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    fast = add_all(MultiTaskViT(backbone_of("vit")), some_tasks(model, 5))
    assert fast.tasks == ["base", *(f"task-{index}" for index in range(5))]
    assert list(fast(pixels)) == fast.tasks
    assert list(fast(pixels, tasks=["task-3", "base", "task-0"])) == ["task-3", "base", "task-0"]
    assert fast(pixels, tasks=[]) == {}


def test_logits_are_float32_without_gradient(hugging_face, backbone_of):
    model = hugging_face("vit")
    fast = add_all(MultiTaskViT(backbone_of("vit")), some_tasks(model, 3))
    for logits in fast(image_batch(model, 2)).values():
        assert logits.dtype == torch.float32
        assert not logits.requires_grad


def test_an_unknown_task_is_rejected_by_name(backbone_of):
    model = MultiTaskViT(backbone_of("vit"))
    with pytest.raises(UnknownTask, match="nothing"):
        model(torch.zeros(1, 3, 32, 32), tasks=["nothing"])
    with pytest.raises(UnknownTask, match="nothing"):
        model.remove("nothing")


def test_images_of_another_size_are_refused(backbone_of):
    model = MultiTaskViT(backbone_of("vit"))
    for shape in [(1, 3, 48, 48), (3, 32, 32), (1, 1, 32, 32)]:
        with pytest.raises(TaskMismatch, match="32"):
            model(torch.zeros(shape))


HEAD = torch.ones(5, 32)
TOKEN = torch.ones(32)


@pytest.mark.parametrize(
    ("task", "cause"),
    [
        (TaskWeights(torch.ones(5, 31)), r"\(5, 31\)"),
        (TaskWeights(torch.ones(5)), r"\(5,\)"),
        (TaskWeights(HEAD, torch.ones(4)), r"\(4,\)"),
        (TaskWeights(HEAD, class_token=torch.ones(1, 1, 32)), r"\(1, 1, 32\)"),
        (TaskWeights(HEAD, class_token=TOKEN, memory=torch.ones(2, 4, 32)), r"\(2, 4, 32\)"),
        (TaskWeights(HEAD, class_token=TOKEN, memory=torch.ones(3, 4, 16)), r"\(3, 4, 16\)"),
        (TaskWeights(HEAD, memory=torch.ones(3, 4, 32)), "class token"),
        (
            TaskWeights(HEAD, class_token=TOKEN, memory=torch.ones(3, 4, 32), placement="mid"),
            "mid",
        ),
    ],
)
def test_a_task_that_does_not_fit_is_refused_and_leaves_no_trace(backbone_of, task, cause):
    model = MultiTaskViT(backbone_of("vit"))
    with pytest.raises(TaskMismatch, match=cause):
        model.add("t", task)
    assert model.tasks == ["base"]


def test_the_name_base_is_reserved(backbone_of):
    with pytest.raises(TaskError, match="base"):
        MultiTaskViT(backbone_of("vit")).add("base", TaskWeights(HEAD))


def test_a_missing_parent_is_refused_by_name(hugging_face, backbone_of):
    fast = MultiTaskViT(backbone_of("vit"))
    task = weights(random_task(hugging_face("vit"), 1))
    with pytest.raises(ExtensionError, match="missing"):
        fast.add("child", task, extends=("missing",))
    assert fast.tasks == ["base"]


def test_circles_are_refused(hugging_face, backbone_of):
    model = hugging_face("vit")
    fast = add_all(MultiTaskViT(backbone_of("vit")), tasks_of(model, GRAPHS["chain"]))
    for parent in ("a", "b", "d"):
        with pytest.raises(ExtensionError, match=f"'a'.*'{parent}'"):
            fast.add("a", weights(random_task(model, 9)), extends=(parent,))


def test_a_parent_stays_while_a_child_extends_it(hugging_face, backbone_of):
    model = hugging_face("vit")
    fast = add_all(MultiTaskViT(backbone_of("vit")), tasks_of(model, GRAPHS["chain"]))
    with pytest.raises(ExtensionError, match=r"'b'.*c"):
        fast.remove("b")
    for name in ("d", "c", "b"):
        fast.remove(name)
    assert fast.tasks == ["base", "a"]


# ---------------------------------------------------------------------------------------------
# The public reproduction's own numbers


@pytest.mark.parametrize("kind", ["alone", "concatenated", "extended"])
def test_logits_of_the_reproduction(data, kind):
    folder = data / ORACLE
    expected = load_file(folder / "expected.safetensors")
    names = [task["name"] for task in json.loads((folder / "fixture.json").read_text())["tasks"]]
    if kind == "extended":
        parents = [(), (names[0],), (names[1],)]
        groups = [read_tasks(folder / "extended_model.pt", names, parents)]
    else:
        groups = [read_tasks(folder / f"{name}_model.pt", [name], [()]) for name in names]
    if kind == "concatenated":
        groups = [{name: task for group in groups for name, task in group.items()}]
    backbone = load_backbone(folder / "backbone")
    for tasks in groups:
        got = add_all(MultiTaskViT(backbone), tasks)(expected["pixel_values"])
        reproduced = {name: expected[f"{kind}.{name}.logits"] for name in tasks}
        assert_same(got, {**reproduced, "base": expected["base.logits"]}, TOLERANCE)


# ---------------------------------------------------------------------------------------------
# Half precision

HALF = 0.05  # of the largest logit of a task, for its worst logit; measured: 0.03
HALF_ON_AVERAGE = 0.015  # the same, over all tasks; measured: 0.009


@pytest.mark.parametrize("family", KINDS)
def test_bfloat16_stays_near_the_reference(hugging_face, backbone_of, family):
    """bfloat16 keeps 8 bits: its error is stated relative to the scale of each task's logits."""
    model = hugging_face(family)
    pixels = image_batch(model, 8)
    tasks = {**some_tasks(model, 10), **tasks_of(model, GRAPHS["diamond"], seed=50)}
    half = backbone_of(family).to(dtype=torch.bfloat16)
    got = add_all(MultiTaskViT(half), tasks)(pixels)
    with torch.no_grad():
        expected = dense_forward(model, pixels, tasks)
    errors = {
        name: ((got[name] - logits).abs().max() / logits.abs().max()).item()
        for name, logits in expected.items()
    }
    assert max(errors.values()) < HALF, errors
    assert sum(errors.values()) / len(errors) < HALF_ON_AVERAGE, errors


# ---------------------------------------------------------------------------------------------
# The plain layer


@pytest.mark.parametrize("family", KINDS)
def test_base_rows_without_extras_run_the_plain_layer(
    hugging_face, backbone_of, family, monkeypatch
):
    """Keeping contexts takes the general layer; both must give the same bits."""
    backbone, calls = backbone_of(family), []
    original = masked_pass.plain_layer

    def count(*arguments):
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(masked_pass, "plain_layer", count)
    pixels = image_batch(hugging_face(family), 3)
    task = prepare(backbone, TaskWeights(torch.eye(backbone.width)))
    requested = [[task]] * 3
    with torch.inference_mode():
        plain = masked_pass.masked_pass(backbone, pixels, None, requested, StackCache())
        assert len(calls) == (backbone.layers - 1 if backbone.rotary is None else 0)
        calls.clear()
        general = masked_pass.masked_pass(
            backbone, pixels, None, requested, StackCache(), keep_contexts=True
        )
    assert not calls
    assert torch.equal(plain.logits[0].values, general.logits[0].values)
