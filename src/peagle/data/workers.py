"""The same function over many rows, in one process or several: the order and content of the result never differ."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from peagle.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")
_CHUNK = 32
_SMALL = 256
"""Fewer rows than this are not worth starting processes for."""
_LOOK_EVERY_S = 0.5
_function: Callable[[Any], Any] | None = None


def default_workers() -> int:
    """The CPUs that this process may use, at most 16."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cpus, 16)


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], num_workers: int | None) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order.

    Args:
        function: picklable where processes are spawned (macOS, Windows); it may keep caches that change no result.
        items: read lazily, a bounded number ahead of the results.
        num_workers: processes; None takes `default_workers()` and none at all for few items.

    Raises:
        DataError: a process was killed (out of memory, usually).
    """
    rows = iter(items)
    if num_workers is not None and num_workers > 1:  # no more processes than there is work for
        head = list(itertools.islice(rows, _CHUNK * num_workers))
        num_workers = max(1, min(num_workers, -(-len(head) // _CHUNK)))
        rows = itertools.chain(head, rows)
    if num_workers is None:
        head = list(itertools.islice(rows, _SMALL))
        num_workers = default_workers() if len(head) == _SMALL else 1
        rows = itertools.chain(head, rows)
    if num_workers == 1:
        yield from map(function, rows)
        return
    # The tokenizers library warns in every forked process otherwise; processes are the parallelism here.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    chunks = iter(lambda: list(itertools.islice(rows, _CHUNK)), [])
    with ProcessPoolExecutor(num_workers, mp_context=context, initializer=_start, initargs=(function,)) as pool:
        waiting: deque[Future[list[Result]]] = deque()
        try:
            for chunk in chunks:
                waiting.append(pool.submit(_work, chunk))
                if len(waiting) > 3 * num_workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError("a worker process was killed, probably for memory; try fewer --num-workers") from None
        finally:
            for future in waiting:
                future.cancel()


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    """End this process when its parent is gone: killed, it cannot tell its workers, and they would wait for ever."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os._exit(1)


def _work(chunk: list[Any]) -> list[Any]:
    assert _function is not None
    return [_function(item) for item in chunk]
