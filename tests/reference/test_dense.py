"""The reference itself is checked before anything is checked against it."""

import pytest
import torch

from tests.families import (
    FAMILIES,
    FAMILIES_WITH_HEAD,
    build,
    image_batch,
    unmodified_base,
    unmodified_feature,
    vision_config,
)
from tests.model.tasks import head_only, random_task, some_tasks
from tests.reference.dense import (
    ReferenceTask,
    attention_of,
    dense_forward,
    dense_mask,
    key_tokens,
    query_tokens,
)

CLOSE = 1e-5


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@pytest.mark.parametrize("family", FAMILIES_WITH_HEAD)
def test_without_tasks_it_is_the_unmodified_model(hugging_face, family):
    model = hugging_face(family)
    pixels = image_batch(model, 3)
    with torch.no_grad():
        logits = dense_forward(model, pixels, {})
    assert list(logits) == ["base"]
    assert difference(logits["base"], unmodified_base(model, pixels)) < CLOSE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_only_task_reads_the_models_class_token(hugging_face, family):
    model = hugging_face(family)
    pixels = image_batch(model, 3)
    tasks = {"identity": ReferenceTask(torch.eye(vision_config(model).hidden_size))}
    with torch.no_grad():
        logits = dense_forward(model, pixels, tasks)
    assert difference(logits["identity"], unmodified_feature(model, pixels)) < CLOSE


@pytest.mark.parametrize("overrides", [{"image_size": 36}, {"image_size": 64, "patch_size": 16}])
@pytest.mark.parametrize("family", ["vit", "deit-teacher", "dinov2-registers", "clip-projection"])
def test_other_image_sizes_are_the_unmodified_model_too(hugging_face, family, overrides):
    model = hugging_face(family, **overrides)
    pixels = image_batch(model, 2)
    with torch.no_grad():
        logits = dense_forward(model, pixels, {})
    assert difference(logits["base"], unmodified_base(model, pixels)) < CLOSE


@pytest.mark.parametrize("family", FAMILIES_WITH_HEAD)
def test_tasks_do_not_touch_base(hugging_face, family):
    model = hugging_face(family)
    pixels = image_batch(model, 2)
    with torch.no_grad():
        logits = dense_forward(model, pixels, some_tasks(model, 6))
    assert difference(logits["base"], unmodified_base(model, pixels)) < CLOSE


def test_concatenated_tasks_answer_as_if_alone(hugging_face):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    tasks = some_tasks(model, 6)
    with torch.no_grad():
        together = dense_forward(model, pixels, tasks)
        for name, task in tasks.items():
            alone = dense_forward(model, pixels, {name: task})
            assert difference(alone[name], together[name]) < CLOSE


def test_a_child_sees_its_ancestors_and_they_do_not_see_it(hugging_face):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    chain = {
        "a": random_task(model, 1),
        "b": random_task(model, 2, parents=("a",)),
        "c": random_task(model, 3, parents=("b",)),
    }
    other_a = {**chain, "a": random_task(model, 4)}
    other_c = {**chain, "c": random_task(model, 5, parents=("b",))}
    with torch.no_grad():
        before = dense_forward(model, pixels, chain)
        changed_a = dense_forward(model, pixels, other_a)
        changed_c = dense_forward(model, pixels, other_c)
    for name in "abc":  # a is an ancestor of all
        assert difference(before[name], changed_a[name]) > 1e-2
    for name in "ab":
        assert difference(before[name], changed_c[name]) < CLOSE


def test_the_mask_reads_as_the_papers_table(hugging_face):
    model = hugging_face("vit")
    tasks = {
        "a": random_task(model, 1, memory=1),
        "lone": random_task(model, 2, memory=2),
        "head": head_only(model, 3),
        "child": random_task(model, 4, memory=0, parents=("a",)),
    }
    queries, keys = query_tokens(2, tasks), key_tokens(2, tasks)
    mask = dense_mask(queries, keys, tasks)
    picture = ["".join(".x"[cell] for cell in row) for row in mask.int().tolist()]
    assert picture == [
        # base | a lone child | memory of a, lone, lone
        "xx" + "..." + "...",
        "xx" + "..." + "...",
        "xx" + "x.." + "x..",
        "xx" + ".x." + ".xx",
        "xx" + "x.x" + "x..",
    ]


def test_placements_differ(hugging_face):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    with torch.no_grad():
        pre = dense_forward(model, pixels, {"t": random_task(model, 1, placement="pre_norm")})
        post = dense_forward(model, pixels, {"t": random_task(model, 1, placement="post_norm")})
    assert difference(pre["t"], post["t"]) > 1e-2


def test_double_precision_agrees_with_single(hugging_face):
    model = hugging_face("dinov2-registers")
    pixels = image_batch(model, 2)
    tasks = some_tasks(model, 5)
    with torch.no_grad():
        single = dense_forward(model, pixels, tasks)
        double = dense_forward(model, pixels, tasks, dtype=torch.float64)
    for name in single:
        assert double[name].dtype == torch.float64
        assert difference(single[name].double(), double[name]) < CLOSE


def test_attention_of_a_task_is_a_distribution_over_what_it_may_see(hugging_face):
    model = hugging_face("vit")
    pixels = image_batch(model, 2)
    tasks = {
        "a": random_task(model, 1, memory=2),
        "b": random_task(model, 2, memory=3),
        "head": head_only(model, 3),
    }
    weights = attention_of(model, pixels, tasks)
    keys = key_tokens(17, tasks)
    for name, attention in weights.items():
        assert attention.shape == (2, 3, 4, len(keys))
        torch.testing.assert_close(attention.sum(-1), torch.ones(2, 3, 4))
        for column, key in enumerate(keys):
            seen = key.kind == "base" or key.task == name
            assert bool((attention[..., column] > 0).all()) is seen


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_of_a_family_shows_in_its_output(family):
    """Otherwise code that drops a term would pass every comparison made with these models."""
    model = build(family)
    pixels = image_batch(model, 2)
    tasks = {"t": random_task(model, 1, placement="pre_norm"), "head": head_only(model, 2)}
    # Never read in a forward pass; and a key bias shifts all scores of a query alike.
    inert = ("mask_token", "pooler.", "text_model.", "text_projection", "logit_", "decoder.")
    inert += ("temperature",)
    with torch.no_grad():
        before = dense_forward(model, pixels, tasks)
        for name, parameter in model.named_parameters():
            if any(part in name for part in inert) or name.endswith("k_proj.bias"):
                continue
            if not parameter.numel():  # no registers
                continue
            value = parameter.clone()
            neutral = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            parameter.fill_(1.0 if name.endswith("lambda1") else neutral)
            after = dense_forward(model, pixels, tasks)
            parameter.copy_(value)
            assert max(difference(before[key], after[key]) for key in before) > 1e-3, name
