"""Prepare the next step in a thread while the current one computes.

Why a thread, and why no process: docs/decisions/0041-the-next-step-is-planned-in-a-thread.md.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Prepares one value ahead in a thread.

    Only one ``prepare`` runs at any time: ``take`` waits for the thread before it prepares a value
    itself. The thread starts when it is first needed, and ends with ``close``.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._next: tuple[Hashable, Future[T]] | None = None

    def start(self, key: Hashable, prepare: Callable[[], T]) -> None:
        """Prepare the value of a key in the thread. ``take`` returns it, or raises its error."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "valence-prefetch")
        self._next = key, self._executor.submit(prepare)

    def take(self, key: Hashable, prepare: Callable[[], T]) -> T:
        """Return the value of a key. If another one was started, discard that and prepare now."""
        if self._next is not None and self._next[0] != key:
            self.discard()
        if self._next is None:
            return prepare()
        (_, future), self._next = self._next, None
        return future.result()

    def discard(self) -> None:
        """Wait for the thread, and forget its value or error."""
        if self._next is not None:
            (_, future), self._next = self._next, None
            if not future.cancel():
                future.exception()

    def close(self) -> None:
        """End the thread. A later ``start`` starts another one."""
        executor, self._executor, self._next = self._executor, None, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)
