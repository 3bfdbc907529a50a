"""A cache of image contexts, so that further tasks on an image need no backbone pass.

A key consists of the owner, the image's bytes, the preprocessing and the backbone. Equal keys
therefore mean equal contexts, and a caller cannot find out which images other callers sent.
Contexts are kept in half precision by default, which halves their size;
`docs/reference/configuration.md` states the effect on answers.
"""

import threading
from collections import OrderedDict
from typing import NamedTuple

import torch

from engram_server.engine import observer as metrics
from engram_server.model.context import Context, ContextBatch


class ContextKey(NamedTuple):
    owner: str | None  # None: shared by all requests without an owner
    image: str


class ContextCache:
    """An LRU cache with a capacity in bytes; 0 disables it."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        dtype: torch.dtype | None,
        device: torch.device | None,
        observer: metrics.EngineObserver,
    ) -> None:
        self._capacity = capacity_bytes
        self.enabled = capacity_bytes > 0
        self._dtype = dtype
        self._device = device
        self.on_device = device is None  # contexts stay on the device that computed them
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
        self._report_size()

    def keep(self, keys: list[ContextKey], contexts: ContextBatch) -> None:
        """Keep the context of each image of a pass, in the order of `keys`."""
        for key, context in zip(
            keys, contexts.unstack(device=self._device, dtype=self._dtype), strict=True
        ):
            self._put(key, context)
        self._report_size()

    def _report_size(self) -> None:
        self._observer.record(metrics.CACHE_CONTEXTS, len(self))
        self._observer.record(metrics.CACHE_BYTES, self.nbytes)

    def _put(self, key: ContextKey, context: Context) -> None:
        evicted = 0
        with self._lock:
            previous = self._contexts.pop(key, None)
            self.nbytes += context.nbytes - (previous.nbytes if previous is not None else 0)
            self._contexts[key] = context
            while self.nbytes > self._capacity:
                _, oldest = self._contexts.popitem(last=False)
                self.nbytes -= oldest.nbytes
                evicted += 1
        if evicted:
            self._observer.record(metrics.CACHE_EVICTIONS, evicted)
