"""The rooms of `server.engine.tasks` put together on a tiny backbone."""

from collections.abc import Callable

import torch

from server.engine.tasks.changes import TaskChanges
from server.engine.tasks.follower import StoreFollower
from server.engine.tasks.loader import TaskLoader, TaskPreparer
from server.engine.tasks.slots import Residency
from server.model import Backbone
from task_store import TaskStore, open_store
from tests.engine.bundles import Listener, Runner, make_bundle

CPU = torch.device("cpu")
SECOND = torch.device("cpu", 0)


class Clock:
    """Stands still until it is told otherwise."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Lab:
    """A store that is followed, with everything a test looks at."""

    def __init__(
        self,
        backbone: Backbone,
        store: TaskStore,
        devices: tuple[torch.device, ...] = (CPU,),
        poll_seconds: float = 3600.0,
        resident_bytes: int | None = None,
        pinned: frozenset[str] = frozenset(),
        replay: Callable | None = None,
    ) -> None:
        self.backbone = backbone
        self.store = store
        self.listener = Listener()
        self.clock = Clock()
        self.runner = Runner(dict.fromkeys(devices, backbone))
        self.residency = Residency(resident_bytes, self.listener)
        preparer = TaskPreparer(self.runner.backbones, replay or self.runner.replay)
        self.loader = TaskLoader(store, preparer, self.residency, self.listener, self.clock)
        self.follower = StoreFollower(
            store,
            self.loader,
            self.listener,
            poll_seconds=poll_seconds,
            pinned=pinned,
            clock=self.clock,
        )
        self.changes = TaskChanges(store, self.follower, self.loader)

    def publish(self, name: str, seed: int, **options):
        labels = options.pop("to", ("default",))
        bundle = make_bundle(self.backbone, seed, **options)
        self.store.publish(name, bundle, labels=labels)
        return bundle

    def sync(self):
        return self.follower.sync()

    def resident(self, *refs: str) -> dict:
        """What is resident for these references right now; nothing may need to be loaded."""
        resolved = self.loader.resolve(self.follower.snapshot, refs)
        assert resolved is not None
        return dict(resolved)

    def load(self, *refs: str) -> dict:
        return dict(self.loader.resolve_loading(self.follower.snapshot, refs))

    def version(self, ref: str) -> int:
        return self.resident(ref)[ref].served.version

    def state(self, ref: str):
        name, _, version = ref.partition("@")
        states = self.follower.snapshot.states()
        state = next(s for s in states if (s.name, s.version) == (name, int(version)))
        assert self.follower.snapshot.state_of(name, int(version)) == state
        return state

    def residents(self) -> set[str]:
        states = self.follower.snapshot.states()
        return {f"{s.name}@{s.version}" for s in states if s.resident and s.name != "base"}

    def versions_failed(self) -> int:
        """As readiness counts them, which looks at no other task."""
        counted = self.follower.snapshot.versions_of(self.loader.failed)
        states = self.follower.snapshot.states()
        assert counted == sum(state.status == "failed" for state in states)
        return counted

    def size_of_one(self) -> int:
        """Bytes on a device of one bundle of `make_bundle`'s default shape."""
        other = Lab(self.backbone, open_store("memory://"))
        other.publish("one", 0)
        other.sync()
        return other.residency.nbytes
