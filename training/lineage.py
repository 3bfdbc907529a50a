"""Parents that a task in training extends: bundles on disk, as tasks of the pass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from server.model import Backbone
from server.model.multitask import weights_of
from server.model.tasks import Task, prepare
from task_store import TaskBundle, check_compatible
from training.errors import SettingsConflict


@dataclass(frozen=True, slots=True)
class Loaded:
    """Bundles on a backbone, every one with what it extends."""

    bundles: list[TaskBundle]  # in the order given
    tasks: list[Task]

    @property
    def youngest(self) -> tuple[list[str], list[Task]]:
        """Digests and tasks of those that no other extends: the fewest that bring all along."""
        old = {ancestor for task in self.tasks for ancestor in task.ancestors}
        kept = [
            (b.digest, t) for b, t in zip(self.bundles, self.tasks, strict=True) if t not in old
        ]
        return [digest for digest, _ in kept], [task for _, task in kept]


def load_tasks(backbone: Backbone, paths: Sequence[Path | str]) -> Loaded:
    """Bundles and their parents, which must be among them."""
    found = {str(path): TaskBundle.load(path) for path in paths}
    names = {bundle.digest: path for path, bundle in found.items()}
    bundles = list(dict.fromkeys(found.values()))
    for bundle in bundles:
        check_compatible(
            bundle,
            fingerprint=backbone.fingerprint,
            layers=backbone.layers,
            width=backbone.width,
            preprocessing=backbone.preprocessing,
            image_size=backbone.image_size,
        )
    by_digest = {bundle.digest: bundle for bundle in bundles}
    ready: dict[str, Task] = {}
    for bundle in bundles:
        _prepare(backbone, bundle.digest, by_digest, names, ready)
    return Loaded(bundles, [ready[bundle.digest] for bundle in bundles])


def _prepare(
    backbone: Backbone,
    digest: str,
    bundles: Mapping[str, TaskBundle],
    names: Mapping[str, str],
    ready: dict[str, Task],
) -> Task:
    # A digest covers the digests it names, so there are no circles.
    if digest in ready:
        return ready[digest]
    bundle = bundles[digest]
    for parent in bundle.extends:
        if parent not in bundles:
            raise SettingsConflict(
                f"'{names.get(digest, digest)}' extends the bundle {parent}, which is not among "
                "those given; give that one too"
            )
    parents = [_prepare(backbone, parent, bundles, names, ready) for parent in bundle.extends]
    ready[digest] = prepare(backbone, weights_of(bundle), parents)
    return ready[digest]
