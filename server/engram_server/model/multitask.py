"""`MultiTaskViT`: a backbone and named tasks, for notebooks, training and tests.

    model = MultiTaskViT(load_backbone("google/vit-base-patch32-224-in21k"))
    model.add("cifar", TaskBundle.load("cifar.safetensors"))
    logits = model(pixel_values, tasks=["cifar"])

The server manages its tasks separately and calls the same `masked_pass`.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from engram_bundle import BASE_TASK, TaskBundle
from torch import Tensor

from engram_server.errors import ExtensionError, TaskError, TaskMismatch, UnknownTask
from engram_server.model.backbone import Backbone
from engram_server.model.context import Context, ContextBatch
from engram_server.model.explaining import attention_maps
from engram_server.model.masked_pass import encode, masked_pass
from engram_server.model.tasks import StackCache, Task, TaskWeights, base_task, prepare

_ByImage = tuple[Task, list[int], Tensor]  # a task, its images, and a row for each of them


@dataclass(frozen=True, slots=True)
class _Entry:
    weights: TaskWeights
    parents: tuple[str, ...]  # names
    digest: str | None


class MultiTaskViT:
    """One frozen backbone and any number of named tasks, predicted in one pass."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self._entries: dict[str, _Entry] = {}
        # Without tasks in training, whose memory is prepared again for each pass.
        self._ready: dict[str, Task] = {}
        self._base = base_task(backbone)
        self._stacks = StackCache()

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks, with `base` if the backbone has a classifier."""
        return ([] if self._base is None else [BASE_TASK]) + list(self._entries)

    def add(
        self, name: str, task: TaskWeights | TaskBundle, *, extends: Sequence[str] = ()
    ) -> None:
        """Add a task, or replace the task of this name; its children then extend the new one.

        Parents are named in `extends`, or found by the digests in a bundle. They must have been
        added before, which rules out cycles.
        """
        if name == BASE_TASK:
            raise TaskError("'base' is reserved for the backbone's classifier; choose another name")
        digest = None
        if not isinstance(task, TaskWeights):
            trained_on = task.manifest.backbone.fingerprint
            if trained_on != self.backbone.fingerprint:
                raise TaskMismatch(
                    f"'{name}' was trained on the backbone {trained_on}, but this is "
                    f"'{self.backbone.name}', {self.backbone.fingerprint}"
                )
            extends = tuple(extends) or tuple(self._name_of(name, one) for one in task.extends)
            digest, task = task.digest, TaskWeights.from_bundle(task)
        for parent in extends:
            if parent not in self._entries:
                raise ExtensionError(
                    f"Task '{name}' extends '{parent}', which does not exist. Add it first."
                )
            if name in {parent, *self._ancestors(parent)}:
                raise ExtensionError(
                    f"Task '{name}' cannot extend '{parent}', which extends '{name}'."
                )
        fresh: dict[str, Task] = {}
        prepare(self.backbone, task, [self._prepared(parent, fresh) for parent in extends])
        self._drop_prepared(name)
        self._entries[name] = _Entry(task, tuple(extends), digest)

    def remove(self, name: str) -> None:
        self._entry(name)
        children = [child for child, entry in self._entries.items() if name in entry.parents]
        if children:
            raise ExtensionError(
                f"Task '{name}' cannot be removed: {', '.join(sorted(children))} extends it."
            )
        self._drop_prepared(name)
        del self._entries[name]

    def __call__(
        self, pixel_values: Tensor, tasks: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """Return logits (B, K) of each task, differentiable in weights that require gradients.

        `pixel_values` are normalised floats (B, 3, H, W), or the uint8 (B, H, W, 3) output of the
        backbone's preprocessing.
        """
        names = self.tasks if tasks is None else list(tasks)
        fresh: dict[str, Task] = {}
        prepared = {name: self._prepared(name, fresh) for name in names}
        requested = [list(dict.fromkeys(prepared.values()))] * len(pixel_values)
        results = self._run(self._pixels(pixel_values), None, requested)
        values = {task: rows for task, _, rows in results}
        return {name: values[task] for name, task in prepared.items()}

    def encode(self, pixel_values: Tensor) -> list[Context]:
        """Return the context of each image, from which any task can be predicted without pixels."""
        return encode(self.backbone, self._pixels(pixel_values)).unstack()

    def predict_pairs(
        self, images: Sequence[Tensor | Context], tasks: Sequence[Sequence[str]]
    ) -> list[dict[str, Tensor]]:
        """Return logits (K,) of `tasks[i]` for each image i: pixels (3, H, W) or a context."""
        return self._pairs(images, tasks, self._run)

    def attention_pairs(
        self, images: Sequence[Tensor | Context], tasks: Sequence[Sequence[str]]
    ) -> list[dict[str, Tensor]]:
        """Return attention maps of `tasks[i]` on the patches of each image i, (rows, columns)."""
        return self._pairs(images, tasks, self._explain)

    def _pairs(
        self,
        images: Sequence[Tensor | Context],
        tasks: Sequence[Sequence[str]],
        run: Callable[[Tensor | None, ContextBatch | None, list[list[Task]]], list[_ByImage]],
    ) -> list[dict[str, Tensor]]:
        """Return the result of `run` for each (image, task) pair, by image and name."""
        fresh: dict[str, Task] = {}
        prepared = {name: self._prepared(name, fresh) for names in tasks for name in names}
        # A pass takes cold images (pixels) before warm ones (contexts).
        order = sorted(range(len(images)), key=lambda i: isinstance(images[i], Context))
        cold = [image for i in order if isinstance(image := images[i], Tensor)]
        contexts = [image for i in order if isinstance(image := images[i], Context)]
        requested = [list(dict.fromkeys(prepared[name] for name in tasks[i])) for i in order]
        warm = None
        if contexts:
            warm = ContextBatch.stack(contexts, self.backbone.device, self.backbone.dtype)
        pixels = self._pixels(torch.stack(cold)) if cold else None
        results: list[dict[Task, Tensor]] = [{} for _ in images]
        for task, places, rows in run(pixels, warm, requested):
            for place, values in zip(places, rows, strict=True):
                results[order[place]][task] = values
        return [
            {name: results[i][prepared[name]] for name in names} for i, names in enumerate(tasks)
        ]

    def _run(
        self, pixels: Tensor | None, warm: ContextBatch | None, requested: list[list[Task]]
    ) -> list[_ByImage]:
        """Return logits, differentiable if a requested task is being trained."""
        training = any(task.requires_grad for task in set().union(*requested))
        if training and torch.is_grad_enabled():
            if pixels is not None:
                # Base rows need no gradients: encode them first, then run the task rows.
                contexts = encode(self.backbone, pixels)
                warm = contexts if warm is None else contexts.join(warm)
            result = masked_pass(self.backbone, None, warm, requested, self._stacks)
            return [(each.task, each.images, each.values) for each in result.logits]
        with torch.inference_mode():
            result = masked_pass(self.backbone, pixels, warm, requested, self._stacks)
        # Copies are ordinary tensors, without the restrictions of inference mode.
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
        size = self.backbone.image_size
        expected = (*size, 3) if pixels.dtype == torch.uint8 else (3, *size)
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != expected:
            raise TaskMismatch(
                f"The images are {tuple(pixels.shape)}, but backbone '{self.backbone.name}' "
                f"needs (B, {', '.join(map(str, expected))})."
            )
        return pixels

    def _prepared(self, name: str, fresh: dict[str, Task]) -> Task:
        """Return a task ready for a pass. `fresh` shares tasks in training within one call."""
        if name == BASE_TASK and self._base is not None:
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
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise UnknownTask(f"Task '{name}' does not exist.{hint}")
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
        raise ExtensionError(
            f"Task '{child}' extends {digest}, which does not exist. Add it first."
        )
