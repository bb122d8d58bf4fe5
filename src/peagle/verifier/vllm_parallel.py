"""Requests side by side: a bounded number under way, results as they come, everything ended when one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

Result = TypeVar("Result")


def in_parallel(jobs: Iterator[Callable[[], Result]], concurrency: int, abort: Callable[[], None]) -> Iterator[Result]:
    """Run jobs in threads and yield their results in the order in which they end.

    Args:
        jobs: taken one at a time, so that at most `concurrency` results are held at once.
        concurrency: jobs under way at once.
        abort: makes the jobs under way end soon; called when one raises, or when the caller stops listening.

    Raises:
        Whatever a job raises first.
    """
    workers = ThreadPoolExecutor(concurrency, thread_name_prefix="requests")
    under_way: set[Future[Result]] = set()
    try:
        while True:
            while len(under_way) < concurrency and (job := next(jobs, None)) is not None:
                under_way.add(workers.submit(job))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    except BaseException:
        abort()
        raise
    finally:
        workers.shutdown(wait=True, cancel_futures=True)
