"""What the engine reports about itself. `server.metrics` counts it; tests may listen too."""

from typing import Protocol


class BankObserver(Protocol):
    """What the task bank reports."""

    def task_loaded(self, name: str, version: int, seconds: float) -> None: ...
    def task_failed(self, name: str, version: int) -> None: ...
    def task_evicted(self, name: str, version: int) -> None: ...
    def tasks_resident(self, tasks: int, nbytes: int) -> None: ...
    def catalog_served(self, generation: int) -> None: ...
    def catalog_seen(self, generation: int) -> None: ...
    def store_read(self) -> None: ...
    def store_failed(self) -> None: ...
    def heartbeat_sent(self) -> None: ...


class EngineObserver(BankObserver, Protocol):
    """What the engine as a whole reports. Called from any thread."""

    def admitted(self, images: int) -> None: ...
    def rejected(self, reason: str) -> None: ...
    def stage(self, name: str, seconds: float) -> None: ...  # queue, decode, forward
    def batch(self, images: int, rows: int, seconds: float) -> None: ...
    def batch_failed(self) -> None: ...
    def queue_depth(self, images: int) -> None: ...
    def predicted(self, task: str, version: int | None) -> None: ...
    def cache_hit(self) -> None: ...
    def cache_miss(self) -> None: ...
    def cache_evicted(self, contexts: int) -> None: ...
    def cache_size(self, contexts: int, nbytes: int) -> None: ...


class NullObserver:
    """Listens to nothing."""

    def task_loaded(self, name: str, version: int, seconds: float) -> None:
        pass

    def task_failed(self, name: str, version: int) -> None:
        pass

    def task_evicted(self, name: str, version: int) -> None:
        pass

    def tasks_resident(self, tasks: int, nbytes: int) -> None:
        pass

    def catalog_served(self, generation: int) -> None:
        pass

    def catalog_seen(self, generation: int) -> None:
        pass

    def store_read(self) -> None:
        pass

    def store_failed(self) -> None:
        pass

    def heartbeat_sent(self) -> None:
        pass

    def admitted(self, images: int) -> None:
        pass

    def rejected(self, reason: str) -> None:
        pass

    def stage(self, name: str, seconds: float) -> None:
        pass

    def batch(self, images: int, rows: int, seconds: float) -> None:
        pass

    def batch_failed(self) -> None:
        pass

    def queue_depth(self, images: int) -> None:
        pass

    def predicted(self, task: str, version: int | None) -> None:
        pass

    def cache_hit(self) -> None:
        pass

    def cache_miss(self) -> None:
        pass

    def cache_evicted(self, contexts: int) -> None:
        pass

    def cache_size(self, contexts: int, nbytes: int) -> None:
        pass
