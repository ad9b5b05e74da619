"""A background thread that prepares the next items while the current one is used.

    thread: make(key) -> queue (bounded) -> consumer: next()
    depth 0: no thread, next() makes the item

Rule: the items are the same as without the thread. Order, errors and the end pass through the
queue; an error is raised in the consumer at the item that failed; `close` (or leaving the `with`)
always ends the thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetch(Generic[Item]):
    """Iterates over make(key) for the keys, at most `depth` items ahead. Use as a context manager,
    or call `close`.
    """

    def __init__(self, make: Callable[[int], Item], keys: Iterable[int], depth: int):
        self._make, self._keys = make, iter(keys)
        self._is_closed = threading.Event()
        self._queue: queue.Queue = queue.Queue(maxsize=max(depth, 1))
        self._thread = None
        if depth > 0:
            self._thread = threading.Thread(target=self._work, name="data-prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._is_closed.is_set():
            raise StopIteration
        if self._thread is None:
            return self._make(next(self._keys))
        item, error = self._queue.get()
        if error is None:
            return item
        self.close()
        raise error

    def close(self) -> None:
        """End the thread and drop what it prepared. May be called twice."""
        self._is_closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            while self._thread.is_alive():
                self._drain()  # lets a thread that waits for room see that it is closed
                self._thread.join(timeout=0.01)
            self._drain()

    def __enter__(self) -> Prefetch[Item]:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _work(self) -> None:
        try:
            for key in self._keys:
                item = self._make(key)
                if self._is_closed.is_set():
                    return
                self._queue.put((item, None))
                if self._is_closed.is_set():
                    return
            self._queue.put((None, StopIteration()))
        except BaseException as error:  # handed over, raised in the consumer
            self._queue.put((None, error))

    def _drain(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass
