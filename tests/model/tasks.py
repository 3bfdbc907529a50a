"""Random tasks for any backbone, in the reference's own terms."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from engram_server.model import Backbone, MultiTaskViT, TaskWeights
from engram_server.model.lora import LoraWeight
from engram_server.model.tasks import LayerWeights
from torch import Tensor

from tests.families import vision_config
from tests.reference.dense import ReferenceTask


def random_task(
    model,
    seed: int,
    memory: int | None = 3,
    placement: str = "pre_norm",
    parents: tuple[str, ...] = (),
    classes: int = 5,
    bias: bool = True,
    class_token: bool = True,
    targets: Sequence[str] = (),
    rank: int = 2,
) -> ReferenceTask:
    """A task with values large enough to show; `memory=None` has no memory tensor at all.

    `targets` are the linear layers with LoRA.
    """
    config = vision_config(model)
    width, layers = config.hidden_size, config.num_hidden_layers
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, scale: float = 1.0):
        return scale * torch.randn(*shape, generator=generator)

    has_memory = class_token and memory is not None
    sizes = target_sizes(model)
    return ReferenceTask(
        head_weight=noise(classes, width, scale=width**-0.5),
        head_bias=noise(classes) if bias else None,
        class_token=noise(width) if class_token else None,
        memory=noise(layers, memory, width) if has_memory else None,
        placement=placement,
        parents=parents,
        lora={
            name: (
                noise(layers, sizes[name][0], rank, scale=sizes[name][0] ** -0.5),
                noise(layers, rank, sizes[name][1], scale=0.5 * rank**-0.5),
            )
            for name in targets
            if class_token
        },
    )


def target_sizes(model) -> dict[str, tuple[int, int]]:
    """Return the input and output width of each linear layer of a tiny model."""
    config = vision_config(model)
    width = config.hidden_size
    hidden = getattr(config, "intermediate_size", None) or int(width * config.mlp_ratio)
    raised = hidden
    if getattr(config, "use_swiglu_ffn", False):
        hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        raised = 2 * hidden  # the gate goes up too
    if getattr(config, "use_gated_mlp", False):
        raised = 2 * hidden
    return {
        "query": (width, width),
        "output": (width, width),
        "up": (width, raised),
        "down": (hidden, width),
    }


def reading_layers(
    task: ReferenceTask, backbone: Backbone, seed: int, layers: Sequence[int] | None = None
) -> ReferenceTask:
    """The task with random weights on summaries, of all layers that have one by default."""
    generator = torch.Generator().manual_seed(seed)
    classes, (_, parts, width) = len(task.head_weight), backbone.summary_shape
    chosen = backbone.summary_layers if layers is None else layers
    weights = {
        layer: width**-0.5 * torch.randn(classes, parts, width, generator=generator)
        for layer in chosen
    }
    return replace(task, layers=weights)


def head_only(model, seed: int, classes: int = 5, bias: bool = True) -> ReferenceTask:
    return random_task(model, seed, classes=classes, bias=bias, class_token=False)


def some_tasks(model, count: int, seed: int = 0) -> dict[str, ReferenceTask]:
    """Independent tasks of all kinds: both placements, several memory sizes, some head-only."""
    tasks = {}
    for index in range(count):
        if index % 5 == 4:
            task = head_only(model, seed + index, classes=2 + index % 7)
        else:
            task = random_task(
                model,
                seed + index,
                memory=(index * 3) % 8,
                placement=("pre_norm", "post_norm")[index % 2],
                classes=2 + index % 7,
                bias=index % 3 != 0,
            )
        tasks[f"task-{index}"] = task
    return tasks


def add_all(model: MultiTaskViT, tasks: Mapping[str, ReferenceTask]) -> MultiTaskViT:
    """Gives the model under test the very tensors of the reference's tasks."""
    for name, task in tasks.items():
        model.add(name, weights(task), extends=task.parents)
    return model


def weights(task: ReferenceTask) -> TaskWeights:
    return TaskWeights(
        task.head_weight,
        task.head_bias,
        task.class_token,
        task.memory,
        task.placement,
        {name: LoraWeight(*change) for name, change in task.lora.items()},
        layers=LayerWeights(tuple(task.layers), torch.stack(list(task.layers.values()), dim=1))
        if task.layers
        else None,
        feature_weight=task.feature,
    )


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float) -> None:
    """The same tasks with logits no further apart than `atol`."""
    assert set(got) == set(expected)
    for name, logits in expected.items():
        torch.testing.assert_close(
            got[name], logits, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )
