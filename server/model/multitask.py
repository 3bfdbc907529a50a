"""`MultiTaskViT`: a backbone and named tasks, for notebooks, training and tests.

    model = MultiTaskViT(load_backbone("google/vit-base-patch32-224-in21k"))
    model.add("cifar", TaskBundle.load("cifar.safetensors"))
    logits = model(pixel_values, tasks=["cifar"])

The server keeps its own bank of tasks and calls the same `masked_pass`.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.errors import ExtensionError, TaskError, TaskMismatch, UnknownTask
from server.model.adapters import AdaptedMap, LowRank
from server.model.backbone import Backbone
from server.model.context import Context, ContextBatch
from server.model.explaining import attention_maps
from server.model.known import Known
from server.model.masked_pass import encode, masked_pass
from server.model.tasks import Placement, StackCache, Task, TaskWeights, base_task, prepare

Array = npt.NDArray[np.float32]
HalfArray = npt.NDArray[np.float16]
BASE = "base"
_ByImage = tuple[Task, list[int], Tensor]  # a task, its images, and a row for each of them


class Bundle(Protocol):
    """What of a task bundle the model reads (`task_store.TaskBundle` is one)."""

    @property
    def head_weight(self) -> Array: ...
    @property
    def head_bias(self) -> Array | None: ...
    @property
    def head_projection(self) -> Array | None: ...
    @property
    def normalised(self) -> bool: ...
    @property
    def class_token(self) -> Array | None: ...
    @property
    def memory(self) -> Array | None: ...
    @property
    def adapter(self) -> Mapping[AdaptedMap, tuple[Array, Array]]: ...
    @property
    def known_means(self) -> HalfArray | None: ...
    @property
    def known_axes(self) -> HalfArray | None: ...
    @property
    def known_threshold(self) -> float | None: ...
    @property
    def placement(self) -> Placement: ...
    @property
    def digest(self) -> str: ...
    @property
    def extends(self) -> tuple[str, ...]: ...
    @property
    def backbone_fingerprint(self) -> str: ...


def weights_of(bundle: Bundle) -> TaskWeights:
    """A bundle's arrays as tensors."""

    def tensor(array: Array | None) -> Tensor | None:
        # A copy: a bundle's arrays are read-only, which torch cannot express.
        return None if array is None else torch.tensor(array)

    means, axes, threshold = bundle.known_means, bundle.known_axes, bundle.known_threshold
    known = None
    if means is not None and axes is not None and threshold is not None:
        known = Known(means, axes, threshold)
    return TaskWeights(
        head_weight=torch.tensor(bundle.head_weight),
        head_bias=tensor(bundle.head_bias),
        class_token=tensor(bundle.class_token),
        memory=tensor(bundle.memory),
        placement=bundle.placement,
        adapter={
            name: LowRank(torch.tensor(a), torch.tensor(b))
            for name, (a, b) in bundle.adapter.items()
        },
        known=known,
        normalised=bundle.normalised,
        head_projection=tensor(bundle.head_projection),
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    weights: TaskWeights
    parents: tuple[str, ...]  # names
    digest: str | None


class MultiTaskViT:
    """One frozen backbone and any number of named tasks, answered in one pass."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self._entries: dict[str, _Entry] = {}
        # Tasks in training are not kept here: their memory is prepared anew for each pass.
        self._ready: dict[str, Task] = {}
        self._base = base_task(backbone)
        self._stacks = StackCache()

    @property
    def tasks(self) -> list[str]:
        """Names that can be asked for; `base` is the backbone's own head, where it has one."""
        return ([] if self._base is None else [BASE]) + list(self._entries)

    def add(self, name: str, task: TaskWeights | Bundle, *, extends: Sequence[str] = ()) -> None:
        """Adds a task, or replaces the one of this name; its children then follow the new one.

        Parents are named in `extends`, or found by the digests a bundle carries; they must have
        been added before, which also rules out circles.
        """
        if name == BASE:
            raise TaskError("'base' is the backbone's own head; choose another name for this task")
        digest = None
        if not isinstance(task, TaskWeights):
            if task.backbone_fingerprint != self.backbone.fingerprint:
                raise TaskMismatch(
                    f"'{name}' was trained on the backbone {task.backbone_fingerprint}, but this "
                    f"is '{self.backbone.name}', {self.backbone.fingerprint}"
                )
            extends = tuple(extends) or tuple(self._name_of(name, one) for one in task.extends)
            digest, task = task.digest, weights_of(task)
        for parent in extends:
            if parent not in self._entries:
                raise ExtensionError(f"'{name}' extends '{parent}', which has not been added")
            if name in {parent, *self._ancestors(parent)}:
                raise ExtensionError(f"'{name}' cannot extend '{parent}', which extends '{name}'")
        fresh: dict[str, Task] = {}
        prepare(self.backbone, task, [self._prepared(parent, fresh) for parent in extends])
        self._drop_prepared(name)
        self._entries[name] = _Entry(task, tuple(extends), digest)

    def remove(self, name: str) -> None:
        self._entry(name)
        children = [child for child, entry in self._entries.items() if name in entry.parents]
        if children:
            raise ExtensionError(
                f"'{name}' cannot be removed while {', '.join(sorted(children))} extends it"
            )
        self._drop_prepared(name)
        del self._entries[name]

    def __call__(
        self, pixel_values: Tensor, tasks: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Logits (B, K) of each task. Differentiable in the weights of tasks that require it.

        `pixel_values` are normalised floats (B, 3, H, W), or the uint8 (B, H, W, 3) that the
        backbone's preprocessing gives.
        """
        names = self.tasks if tasks is None else list(tasks)
        fresh: dict[str, Task] = {}
        prepared = {name: self._prepared(name, fresh) for name in names}
        requested = [list(dict.fromkeys(prepared.values()))] * len(pixel_values)
        answers = self._run(self._pixels(pixel_values), None, requested)
        values = {task: rows for task, _, rows in answers}
        return {name: values[task] for name, task in prepared.items()}

    def encode(self, pixel_values: Tensor) -> list[Context]:
        """The context of each image, to be asked any task later without its pixels."""
        return encode(self.backbone, self._pixels(pixel_values)).unstack()

    def predict_pairs(
        self, images: Sequence[Tensor | Context], tasks: Sequence[Sequence[str]]
    ) -> list[dict[str, Tensor]]:
        """Logits (K,) of `tasks[i]` for each image i, given as pixels (3, H, W) or as a context."""
        return self._pairs(images, tasks, self._run)

    def attention_pairs(
        self, images: Sequence[Tensor | Context], tasks: Sequence[Sequence[str]]
    ) -> list[dict[str, Tensor]]:
        """Where `tasks[i]` look in each image i: weights on its patches, (rows, columns) each."""
        return self._pairs(images, tasks, self._explain)

    def _pairs(
        self,
        images: Sequence[Tensor | Context],
        tasks: Sequence[Sequence[str]],
        run: Callable[[Tensor | None, ContextBatch | None, list[list[Task]]], list[_ByImage]],
    ) -> list[dict[str, Tensor]]:
        """What `run` gives for each (image, task) pair, by image and name."""
        fresh: dict[str, Task] = {}
        prepared = {name: self._prepared(name, fresh) for names in tasks for name in names}
        # A pass takes cold images first.
        order = sorted(range(len(images)), key=lambda i: isinstance(images[i], Context))
        cold = [image for i in order if isinstance(image := images[i], Tensor)]
        contexts = [image for i in order if isinstance(image := images[i], Context)]
        requested = [list(dict.fromkeys(prepared[name] for name in tasks[i])) for i in order]
        warm = None
        if contexts:
            warm = ContextBatch.stack(contexts, self.backbone.device, self.backbone.dtype)
        pixels = self._pixels(torch.stack(cold)) if cold else None
        answers: list[dict[Task, Tensor]] = [{} for _ in images]
        for task, places, rows in run(pixels, warm, requested):
            for place, values in zip(places, rows, strict=True):
                answers[order[place]][task] = values
        return [
            {name: answers[i][prepared[name]] for name in names} for i, names in enumerate(tasks)
        ]

    def _run(
        self, pixels: Tensor | None, warm: ContextBatch | None, requested: list[list[Task]]
    ) -> list[_ByImage]:
        """Logits, differentiable where a requested task is being trained."""
        training = any(task.requires_grad for task in set().union(*requested))
        if training and torch.is_grad_enabled():
            if pixels is not None:
                # No gradient goes to base rows: run them apart, and the task rows on their context.
                contexts = encode(self.backbone, pixels)
                warm = contexts if warm is None else contexts.join(warm)
            result = masked_pass(self.backbone, None, warm, requested, self._stacks)
            return [(each.task, each.images, each.values) for each in result.logits]
        with torch.inference_mode():
            result = masked_pass(self.backbone, pixels, warm, requested, self._stacks)
        # Copies are ordinary tensors: people may do with them what inference mode forbids.
        return [(each.task, each.images, each.values.clone()) for each in result.logits]

    @torch.no_grad()
    def _explain(
        self, pixels: Tensor | None, warm: ContextBatch | None, requested: list[list[Task]]
    ) -> list[_ByImage]:
        result = masked_pass(self.backbone, pixels, warm, requested, self._stacks)
        maps = attention_maps(self.backbone, result, warm, requested)
        return [(each.task, each.images, each.grids) for each in maps]

    def _pixels(self, pixels: Tensor) -> Tensor:
        pixels = pixels.to(self.backbone.device, non_blocking=True)
        if pixels.dtype == torch.uint8:
            pixels = self.backbone.preprocessing.normalise(pixels, self.backbone.dtype)
        expected = (3, *self.backbone.image_size)
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != expected:
            raise TaskMismatch(
                f"the images are {tuple(pixels.shape)}, but backbone '{self.backbone.name}' "
                f"needs (B, {', '.join(map(str, expected))})"
            )
        return pixels

    def _prepared(self, name: str, fresh: dict[str, Task]) -> Task:
        """The task, ready for a pass. `fresh` holds those in training, so that all share them."""
        if name == BASE and self._base is not None:
            return self._base
        ready = self._ready.get(name) or fresh.get(name)
        if ready is not None:
            return ready
        entry = self._entry(name)
        parents = [self._prepared(parent, fresh) for parent in entry.parents]
        task = prepare(self.backbone, entry.weights, parents)
        kept = fresh if task.requires_grad else self._ready
        kept[name] = task
        return task

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            near = difflib.get_close_matches(name, self.tasks, n=1)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise UnknownTask(f"there is no task '{name}'{hint}")
        return self._entries[name]

    def _ancestors(self, name: str) -> set[str]:
        ancestors: set[str] = set()
        queue = list(self._entry(name).parents)
        while queue:
            parent = queue.pop()
            if parent not in ancestors:
                ancestors.add(parent)
                queue += self._entry(parent).parents
        return ancestors

    def _drop_prepared(self, name: str) -> None:
        for each in [name, *(one for one in self._entries if name in self._ancestors(one))]:
            self._ready.pop(each, None)

    def _name_of(self, child: str, digest: str) -> str:
        for name, entry in self._entries.items():
            if entry.digest == digest:
                return name
        raise ExtensionError(f"'{child}' extends {digest}, which has not been added")
