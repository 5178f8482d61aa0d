"""Actions: several things that Spark is asked for at once, so that one is planned while another one runs."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, Protocol, TypeVar

from pyspark.sql import SparkSession
from pyspark.util import inheritable_thread_target

T = TypeVar("T")


class Start(Protocol):
    """Has something done: in its turn, in a thread of its own."""

    def __call__(self, work: Callable[[], T], /) -> Future[T]: ...


_AT_ONCE: Final = 3
"""Planning a query takes one core; of tasks there are no more than cores, and so no more memory is needed."""


@contextmanager
def side_by_side(session: SparkSession) -> Iterator[Start]:
    """What is started inside is done by the end, some of it at a time, in the order in which it was started.

    The first error is raised; what has not begun by then never does.
    """
    started: list[Future[Any]] = []
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="analysis") as pool:

        def start(work: Callable[[], T], /) -> Future[T]:
            # What Spark keeps a thread, such as the group that a stream cancels when it is stopped, holds for this one too.
            future: Future[T] = pool.submit(inheritable_thread_target(session)(work))
            started.append(future)
            return future

        try:
            yield start
            for one in started:
                one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
