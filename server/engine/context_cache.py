"""Contexts of recent images, so that more tasks can answer for them without the backbone.

The key is whose image it is, its bytes, how they were preprocessed and by which backbone they were
read: the same key can only mean the same context, and nobody learns from the cache what another
has sent. Kept in half precision by default, which halves the bytes;
`docs/reference/configuration.md` states what that does to the answers.
"""

import threading
from collections import OrderedDict
from typing import NamedTuple

import torch

from server.engine.observer import EngineObserver
from server.model.context import Context, ContextBatch


class ContextKey(NamedTuple):
    owner: str | None  # None: shared by all who have no owner
    image: str


class ContextCache:
    """A least-recently-used cache bounded in bytes. A capacity of 0 switches it off."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        dtype: torch.dtype | None,
        device: torch.device | None,
        observer: EngineObserver,
    ) -> None:
        self._capacity = capacity_bytes
        self.enabled = capacity_bytes > 0
        self._dtype = dtype
        self._device = device
        self.on_device = device is None  # contexts stay on the device that made them
        self._observer = observer
        self._contexts: OrderedDict[ContextKey, Context] = OrderedDict()
        self.nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._contexts)

    def get(self, key: ContextKey) -> Context | None:
        with self._lock:
            context = self._contexts.get(key)
            if context is not None:
                self._contexts.move_to_end(key)
            return context

    def clear(self) -> None:
        with self._lock:
            self._contexts.clear()
            self.nbytes = 0
        self._observer.cache_size(0, 0)

    def keep(self, keys: list[ContextKey], contexts: ContextBatch) -> None:
        """Keeps the context of each image of a pass, in the order of `keys`."""
        for key, context in zip(
            keys, contexts.unstack(device=self._device, dtype=self._dtype), strict=True
        ):
            self._put(key, context)
        self._observer.cache_size(len(self), self.nbytes)

    def _put(self, key: ContextKey, context: Context) -> None:
        evicted = 0
        with self._lock:
            known = self._contexts.pop(key, None)
            self.nbytes += context.nbytes - (known.nbytes if known is not None else 0)
            self._contexts[key] = context
            while self.nbytes > self._capacity:
                _, oldest = self._contexts.popitem(last=False)
                self.nbytes -= oldest.nbytes
                evicted += 1
        if evicted:
            self._observer.cache_evicted(evicted)
