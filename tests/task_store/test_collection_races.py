"""Collections against publishes: every order of their steps on the store, one after another.

A scheduler lets exactly one of several threads make its next call to the object store. It either
goes through all orders there are, or plays dice for many threads, and kills some on the way.
"""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from engram_store import StoreUnavailable, TaskStore, open_store
from engram_store.layout import BLOBS, CLOCK, LOG, blob_at, blob_path
from engram_store.objects import Objects

from tests.bundles import bundle

ALL_IS_OLD = timedelta(days=-1)
MADE = bundle(1)


class Killed(BaseException):
    """The process of a thread was killed before its next call."""


@dataclass
class Actor:
    """One thread: what it does, and whether it waits for its next step."""

    work: Callable[[], None]
    waiting: bool = False
    over: bool = False
    killed: bool = False
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Stage:
    """Actors, of whom `choose` says which one steps next, and whether it is killed instead."""

    def __init__(self, choose: Callable[[int], tuple[int, bool]]) -> None:
        self._choose = choose
        self._changed = threading.Condition()
        self._of_thread: dict[int, Actor] = {}

    def turn(self) -> None:
        """Called by an actor before each of its steps."""
        actor = self._of_thread.get(threading.get_ident())
        if actor is None:
            return
        with self._changed:
            actor.waiting = True
            self._changed.notify_all()
        actor.go.acquire()
        if actor.killed:
            raise Killed

    def play(self, works: list[Callable[[], None]], after_step: Callable[[], None]) -> None:
        actors = [Actor(work) for work in works]
        threads = [threading.Thread(target=self._run, args=(actor,)) for actor in actors]
        for thread in threads:
            thread.start()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: all(a.waiting or a.over for a in actors), 30)
                ready = [actor for actor in actors if not actor.over]
            if not ready:
                break
            number, kill = self._choose(len(ready))
            ready[number].waiting, ready[number].killed = False, kill
            ready[number].go.release()
            with self._changed:
                self._changed.wait_for(lambda a=ready[number]: a.waiting or a.over, 30)
            after_step()
        for thread in threads:
            thread.join()

    def _run(self, actor: Actor) -> None:
        self._of_thread[threading.get_ident()] = actor
        try:
            actor.work()
        except Killed:
            pass
        finally:
            with self._changed:
                actor.over = True
                self._changed.notify_all()


class Stepped(Objects):
    """A store in memory whose calls for the log and for bundles wait for their turn."""

    def __init__(self, objects: Objects, stage: Stage) -> None:
        super().__init__(objects.backend, objects.url, remote=False)
        self._stage = stage

    def _step(self, path: str) -> None:
        if path.startswith((LOG.folder, BLOBS.folder)):
            self._stage.turn()

    def get(self, path):
        self._step(path)
        return super().get(path)

    def stat(self, path):
        self._step(path)
        return super().stat(path)

    def listing(self, prefix, *, after=None):
        self._step(prefix)
        return super().listing(prefix, after=after)

    def create(self, path, data):
        self._step(path)
        return super().create(path, data)

    def put(self, path, data):
        self._step(path)
        super().put(path, data)

    def delete(self, path):
        self._step(path)
        super().delete(path)


class Play:
    """One performance: a new store with an old orphan, publishers of its bytes, collectors."""

    def __init__(self, stage: Stage, publishers: int, collectors: int) -> None:
        self.stage = stage
        self.plain = open_store("memory://").objects
        self.plain.put(blob_path(MADE.digest), MADE.to_bytes())
        self.acknowledged: list[str] = []
        self._works = [self._publisher(f"t{number}") for number in range(publishers)]
        self._works += [self._collector() for _ in range(collectors)]

    def _publisher(self, task: str) -> Callable[[], None]:
        store = TaskStore(Stepped(self.plain, self.stage))

        def publish() -> None:
            version = store.publish(task, MADE).version
            self.acknowledged.append(f"{task}@{version}")

        return publish

    def _collector(self) -> Callable[[], None]:
        store = TaskStore(Stepped(self.plain, self.stage))
        return lambda: store.collect_garbage(ALL_IS_OLD)

    def perform(self) -> None:
        self.stage.play(self._works, self.check)
        self.check()
        # Whatever was left half done, one more collection brings the store in order.
        TaskStore(self.plain).collect_garbage(ALL_IS_OLD)
        self.check()
        reader = TaskStore(self.plain)
        catalog = reader.catalog()
        blobs = {catalog.blob_path(digest) for digest in catalog.by_digest}
        assert {info.path for info in self.plain.named(BLOBS).values()} == blobs
        assert self.plain.named(CLOCK) == {}
        assert reader.verify().damages == ()

    def check(self) -> None:
        """What a reader sees at this moment: every version, whole, and all that was promised."""
        reader = TaskStore(self.plain)
        catalog = reader.catalog(refresh=False)
        for digest in catalog.by_digest:
            assert reader.read_bytes(digest) == MADE.to_bytes()
        for ref in self.acknowledged:
            assert catalog.resolve(ref).digest == MADE.digest


def all_orders() -> Iterator[Callable[[int], tuple[int, bool]]]:
    """A chooser for each order there is, found by going back to the last choice left open."""
    path: list[tuple[int, int]] = []  # what was chosen, of how many
    while True:
        position = 0

        def choose(options: int) -> tuple[int, bool]:
            nonlocal position
            if position == len(path):
                path.append((0, options))
            chosen = path[position][0]
            position += 1
            return chosen, False

        yield choose
        del path[position:]
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        path[-1] = (path[-1][0] + 1, path[-1][1])


@pytest.mark.long
def test_no_order_of_a_publish_and_a_collection_loses_the_bundle():
    orders = 0
    for choose in all_orders():
        Play(Stage(choose), publishers=1, collectors=1).perform()
        orders += 1
    assert orders > 100, "there are that many"


def test_a_collection_may_come_before_during_and_after():
    """The orders do reach the cases that matter: the bundle at its old place, and at a new one."""
    places = set()
    for choose in all_orders():
        play = Play(Stage(choose), publishers=1, collectors=1)
        play.perform()
        (path,) = (info.path for info in play.plain.named(BLOBS).values())
        places.add(blob_at(path))
        if len(places) > 1:
            break
    assert {collected > 0 for _, collected in places} == {False, True}


@pytest.mark.parametrize("seed", range(150))
def test_many_publishers_and_collectors_some_killed_lose_nothing(seed):
    dice = random.Random(seed)
    play = Play(Stage(lambda n: (dice.randrange(n), dice.random() < 0.03)), 3, 2)
    play.perform()


def test_deletion_that_arrives_hours_late_hits_nothing_that_is_published(open_memory):
    """The request was sent, and the bundle is published again before the store carries it out."""
    store, collector = open_memory(), open_memory()
    store.objects.put(blob_path(MADE.digest), MADE.to_bytes())
    late: list[str] = []
    collector.objects = _holding_back(collector.objects, late)
    collector.collect_garbage(ALL_IS_OLD)
    store.publish("t", MADE)
    assert late == [blob_path(MADE.digest)]
    for path in late:
        store.objects.delete(path)
    assert store.read_bundle(MADE.digest) == MADE
    assert open_memory().verify().damages == ()


def _holding_back(objects: Objects, late: list[str]) -> Objects:
    class Held(Objects):
        def delete(self, path):
            if BLOBS.in_folder(path):
                late.append(path)
            else:
                super().delete(path)

    return Held(objects.backend, objects.url, remote=False)


def test_reader_from_before_a_collection_finds_what_was_published_after_it(open_memory):
    store, reader = open_memory(), open_memory()
    store.objects.put(blob_path(MADE.digest), MADE.to_bytes())
    store.collect_garbage(ALL_IS_OLD)
    store.publish("t", MADE)
    assert reader.read_bundle(MADE.digest) == MADE


def test_interrupted_deletion_is_finished_by_the_next_collection(open_memory, monkeypatch):
    store = open_memory()
    orphan = blob_path(MADE.digest)
    store.objects.put(orphan, MADE.to_bytes())
    delete = store.objects.delete

    def down(path):
        if BLOBS.in_folder(path):
            raise StoreUnavailable("The bucket is down.")
        delete(path)

    monkeypatch.setattr(store.objects, "delete", down)
    with pytest.raises(StoreUnavailable):
        store.collect_garbage(ALL_IS_OLD)
    monkeypatch.setattr(store.objects, "delete", delete)
    # Its age no longer matters, because its path was released.
    assert store.collect_garbage(timedelta(days=30)).blobs == (orphan,)
    assert store.catalog().generation == 1, "nothing new to say in the log"
