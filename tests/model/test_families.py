"""Every family against the unmodified module, over configurations; and it can be learned on."""

from dataclasses import replace

import pytest
import torch
from engram_server.model import MultiTaskViT, TaskWeights, load_backbone
from engram_server.model.families import registry
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import ViTMSNConfig, ViTMSNModel

from tests.families import (
    FAMILIES,
    build,
    image_batch,
    interpolating,
    randomise,
    save,
    unmodified_base,
    unmodified_feature,
)
from tests.model.tasks import add_all, assert_same, random_task, some_tasks
from tests.reference.dense import dense_forward

TOLERANCE = 1e-4  # of the largest value


def assert_unmodified(model, backbone, pixels, tasks, **options):
    """What the model's own head answers and what head-only tasks read, beside `tasks`."""
    fast = add_all(MultiTaskViT(backbone), tasks)
    fast.add("feature", TaskWeights(torch.eye(backbone.width)))
    got = fast(pixels)
    expected = {"feature": unmodified_feature(model, pixels, **options)}
    if backbone.base is not None:
        expected["base"] = unmodified_base(model, pixels, **options)
    for name, values in expected.items():
        assert_same({name: got[name]}, {name: values}, TOLERANCE * values.abs().max().item())


@pytest.mark.parametrize("images", [1, 5])
@pytest.mark.parametrize("size", [None, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_the_unmodified_modules_beside_0_1_and_20_tasks(
    hugging_face, folder_of, backbone_of, family, size, images
):
    model = hugging_face(family)
    pixels = image_batch(model, images, size=size)
    backbone, options = backbone_of(family), {}
    if size is not None:
        backbone, options = load_backbone(folder_of(family), image_size=size), interpolating(model)
    for count in (0, 1, 20):
        assert_unmodified(model, backbone, pixels, some_tasks(model, count), **options)


@st.composite
def configurations(draw):
    """A family with rotary positions, registers or a pooling head, and settings of it."""
    family = draw(st.sampled_from(["dinov3", "dinov2-registers", "tips-vision", "siglip-vision"]))
    heads, head_width = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([4, 8, 12]))
    chosen = {
        "hidden_size": heads * head_width,
        "num_attention_heads": heads,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "image_size": draw(st.sampled_from([16, 32])),
    }
    if family != "siglip-vision":
        chosen["num_register_tokens"] = draw(st.integers(0, 4))
    if family == "dinov3":
        chosen["use_gated_mlp"] = draw(st.booleans())
        chosen["hidden_act"] = draw(st.sampled_from(["gelu", "silu"]))
        chosen["rope_theta"] = draw(st.sampled_from([10.0, 100.0]))
        chosen |= {name: draw(st.booleans()) for name in ("query_bias", "key_bias", "mlp_bias")}
    elif family == "siglip-vision":
        chosen["hidden_act"] = draw(st.sampled_from(["gelu", "gelu_pytorch_tanh", "quick_gelu"]))
    else:
        chosen["use_swiglu_ffn"] = draw(st.booleans())
    return family, chosen, draw(st.booleans()), draw(st.sampled_from([None, (16, 24)]))


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(configuration=configurations(), seed=st.integers(0, 1000))
def test_any_configuration_is_the_unmodified_module_and_the_reference(
    tmp_path_factory, configuration, seed
):
    family, chosen, has_layer_scale, size = configuration
    model = build(family, seed, **chosen)
    if not has_layer_scale:
        for name, parameter in model.named_parameters():
            if name.endswith("lambda1"):
                parameter.data.fill_(1.0)
    backbone = load_backbone(save(model, tmp_path_factory.mktemp("any")), image_size=size)
    pixels = image_batch(model, 2, seed, size=size)
    options = {} if size is None else interpolating(model)
    tasks = {
        "t": random_task(model, seed, memory=2, targets=("query", "output", "up", "down")),
        "child": random_task(model, seed + 1, memory=1, parents=("t",)),
    }
    assert_unmodified(model, backbone, pixels, tasks, **options)
    with torch.no_grad():
        expected = dense_forward(model, pixels, tasks)
    got = add_all(MultiTaskViT(backbone), tasks)(pixels, tasks=list(tasks))
    for name in tasks:
        scale = max(expected[name].abs().max().item(), 1.0)
        assert_same({name: got[name]}, {name: expected[name]}, TOLERANCE * scale)


@pytest.mark.parametrize("family", ["dinov3", "dinov3-gated", "siglip", "ijepa", "tips", "radio"])
def test_a_new_task_learns(hugging_face, backbone_of, family):
    """From where training starts it: the backbone's own token, or an average patch."""
    backbone = backbone_of(family)
    pixels, labels = image_batch(hugging_face(family), 12), torch.arange(12) % 3
    token = backbone.first_token.clone().requires_grad_()
    memory = (0.02 * torch.randn(backbone.layers, 4, backbone.width)).requires_grad_()
    head = torch.zeros(3, backbone.width, requires_grad=True)
    fast = MultiTaskViT(backbone)
    fast.add("t", TaskWeights(head, None, token, memory))
    optimiser = torch.optim.Adam([token, memory, head], lr=0.02)
    losses = []
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(fast(pixels)["t"], labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_adding_a_family_takes_one_entry_in_one_table(tmp_path, monkeypatch):
    """As docs/reference/backbones.md shows it."""
    config = ViTMSNConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
    )
    model = ViTMSNModel(config).eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    entry = replace(registry.FAMILIES["vit"], trunks={"ViTMSNModel": ""})
    monkeypatch.setitem(registry.FAMILIES, "vit_msn", entry)
    fast = MultiTaskViT(load_backbone(tmp_path))
    fast.add("feature", TaskWeights(torch.eye(32)))
    pixels = image_batch(model, 2)
    with torch.no_grad():
        expected = model(pixels).last_hidden_state[:, 0]
    assert_same(fast(pixels), {"feature": expected}, TOLERANCE)
