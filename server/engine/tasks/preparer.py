"""From a bundle to tasks on every device: does it fit, is it prepared, does it answer as it should.

Golden examples are a bundle's own questions and answers. Replaying them through the server as it
runs catches what no shape tells: another preprocessing, the wrong placement of memory, a backbone
that only claims to be the right one.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from server.engine.tasks.slots import HostCopy, Key, Loaded
from server.engine.types import Floats, Pixels, ResidentTask
from server.errors import TaskMismatch
from server.model.backbone import Backbone
from server.model.multitask import weights_of
from server.model.tasks import Task, base_task, prepare
from task_store import GOLDEN_TOLERANCE, TaskBundle, check_compatible

Replay = Callable[[ResidentTask, Sequence[Pixels]], Floats]

# Relative to the largest golden logit, as GOLDEN_TOLERANCE is: bfloat16 keeps 8 bits, and a dozen
# layers add up their roundings.
HALF_PRECISION_TOLERANCE: Final = 5e-2
_PASSED_REMEMBERED: Final = 4096


class TaskPreparer:
    """Binds bundles to the backbone on every device and replays their golden examples."""

    def __init__(self, backbones: Mapping[torch.device, Backbone], replay: Replay) -> None:
        self._backbones = dict(backbones)
        self._replay = replay
        whole = all(one.dtype.itemsize >= 4 for one in self._backbones.values())
        self._tolerance = GOLDEN_TOLERANCE if whole else HALF_PRECISION_TOLERANCE
        # Digests that answered right: a bundle that is loaded again is not replayed again.
        self._passed: OrderedDict[str | None, None] = OrderedDict()

    @property
    def backbone(self) -> Backbone:
        """The backbone on one of the devices; they are the same but for precision."""
        return next(iter(self._backbones.values()))

    def base(self) -> Loaded | None:
        """The backbone's own head, where it has one."""
        head = self.backbone.base
        if head is None:
            return None
        tasks = {device: base_task(backbone) for device, backbone in self._backbones.items()}
        on = {device: task for device, task in tasks.items() if task is not None}
        return Loaded(None, head.problem, head.labels, MappingProxyType(on))

    def check(self, bundle: TaskBundle) -> HostCopy:
        """What of a bundle is kept in host memory; IncompatibleBundle if it is not for us."""
        backbone = self.backbone
        check_compatible(
            bundle,
            fingerprint=backbone.fingerprint,
            layers=backbone.layers,
            width=backbone.width,
            preprocessing=backbone.preprocessing.to_json(),
            image_size=backbone.image_size,
        )
        return HostCopy(weights_of(bundle), bundle.problem, bundle.labels)

    def prepare(self, digest: str, host: HostCopy, parents: tuple[Loaded, ...]) -> Loaded:
        """Tensors on every device. Parents are shared: their tasks are these very objects."""
        on: dict[torch.device, Task] = {}
        for device, backbone in self._backbones.items():
            with torch.no_grad():
                on[device] = prepare(backbone, host.weights, [one.on[device] for one in parents])
            if device.type == "cuda":
                # The worker may use another stream: hand over nothing that is still on its way.
                torch.cuda.current_stream(device).synchronize()
        return self.bind(digest, host, on, parents)

    def bind(
        self,
        digest: str,
        host: HostCopy,
        on: dict[torch.device, Task],
        parents: tuple[Loaded, ...],
    ) -> Loaded:
        """Tasks that are prepared already, as a bundle's."""
        return Loaded(digest, host.problem, host.labels, MappingProxyType(on), parents)

    def replay_golden(self, bundle: TaskBundle, loaded: Loaded, key: Key) -> None:
        """TaskMismatch unless the bundle's golden examples, if any, are answered right."""
        pixels, expected = bundle.golden_pixels, bundle.golden_logits
        if pixels is None or expected is None or loaded.digest in self._passed:
            return
        # Copies: a bundle's arrays are read-only, which torch cannot express.
        got = self._replay(loaded.served_as(key), [image.copy() for image in pixels])
        check_golden(got, expected, self._tolerance)
        self._passed[loaded.digest] = None
        while len(self._passed) > _PASSED_REMEMBERED:
            self._passed.popitem(last=False)


def check_golden(got: Floats, expected: Floats, tolerance: float) -> None:
    """Raise TaskMismatch unless the logits agree within `tolerance` of the largest (at least 1)."""
    if got.shape != expected.shape:
        raise TaskMismatch(
            f"its golden answers have the shape {expected.shape}, and the replay gave {got.shape}"
        )
    allowed = tolerance * max(1.0, float(np.abs(expected).max()))
    difference = float(np.abs(got - expected).max())
    # Written so that NaN is refused too.
    if not difference <= allowed:
        raise TaskMismatch(
            f"its golden answers differ by {difference:.3g}, and at most {allowed:.3g} is allowed: "
            f"it was trained with another backbone, placement of memory or preprocessing"
        )
