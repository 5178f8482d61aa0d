"""Read how long a thread ran and how long it waited for a processor, from Linux' schedstat."""

import os
import weakref
from contextlib import suppress


class ThreadSchedule:
    """Read the times of the thread that creates it; elsewhere than on Linux they are 0.

    The file stays open, since it is read many times a second, until the object is deleted.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            # Nanoseconds on a processor, nanoseconds of waiting for one, time slices.
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._file)

    def times_s(self) -> tuple[float, float]:
        """Return the time on a processor and the time of waiting for one, in seconds.

        Both are 0 where they are unknown, as after the thread's end.
        """
        if self._file is not None:
            # An error would end publishing and claiming, which only pace themselves by this.
            with suppress(OSError, ValueError):
                ran, waited, *_ = map(int, os.pread(self._file, 64, 0).split())
                return ran / 1e9, waited / 1e9
        return 0.0, 0.0
