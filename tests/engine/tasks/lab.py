"""The parts of `engram_server.engine.tasks` on a tiny backbone."""

from collections.abc import Callable

import torch
from engram_server.engine.tasks.follower import StoreFollower
from engram_server.engine.tasks.loader import TaskLoader, TaskPreparer
from engram_server.engine.tasks.service import TaskService
from engram_server.engine.tasks.slots import Residency
from engram_server.model import Backbone
from engram_store import TaskStore, open_store

from tests.engine.bundles import Listener, Runner, make_bundle

CPU = torch.device("cpu")
SECOND = torch.device("cpu", 0)


class Clock:
    """A clock that a test sets."""

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
        self.tasks = TaskService(store, self.follower, self.loader)

    def publish(self, name: str, seed: int, **options):
        aliases = options.pop("to", ("default",))
        bundle = make_bundle(self.backbone, seed, **options)
        self.store.publish(name, bundle, aliases=aliases)
        return bundle

    def sync(self):
        return self.follower.sync()

    def served(self, refs, snapshot=None):
        """The served tasks of references; None if one must be loaded first."""
        return self.loader.served_tasks((snapshot or self.follower.snapshot).resolve(refs))

    def resident(self, *refs: str) -> dict:
        """What is resident for these references right now; nothing may need to be loaded."""
        served = self.served(refs)
        assert served is not None
        return served

    def load(self, *refs: str) -> dict:
        return self.loader.load_served_tasks(self.follower.snapshot.resolve(refs))

    def version(self, ref: str) -> int:
        return self.resident(ref)[ref].version

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
        count = self.follower.snapshot.count_versions(self.loader.failed)
        states = self.follower.snapshot.states()
        assert count == sum(state.status == "failed" for state in states)
        return count

    def size_of_one(self) -> int:
        """Bytes on a device of one bundle of `make_bundle`'s default shape."""
        other = Lab(self.backbone, open_store("memory://"))
        other.publish("one", 0)
        other.sync()
        return other.residency.nbytes
