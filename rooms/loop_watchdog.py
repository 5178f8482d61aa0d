"""A watchdog for the event loop: a callback that runs too long delays every request and every delivery of its process.

A timer on the loop records that it turns; a thread samples what runs when it does not. Time in which the process could not run
is not counted: a stopped process has no stall, nor has one that waits for a processor (Linux' schedstat).
"""

import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final

_INTERVAL_S: Final = 0.1
_FRAMES: Final = 6
COLLECTION: Final = "garbage collection"
UNSEEN: Final = "unknown: an extension module kept the interpreter's lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """One time that the loop did not turn."""

    seconds: float
    running: str
    """The innermost calls, outermost first; or COLLECTION; or UNSEEN where nothing could be sampled."""


class LoopWatchdog:
    """Watches the running loop. `on_stall` is called on the loop, once after each stall longer than `threshold_s`."""

    def __init__(
        self, on_stall: Callable[[Stall], None], *, threshold_s: float, interval_s: float = _INTERVAL_S
    ) -> None:
        self._on_stall = on_stall
        self._threshold_s = threshold_s
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_stalls, name="loop watchdog", daemon=True)
        self._beats = 0
        self._unbeaten_s = 0.0
        """How long the sampling thread has been running without seeing a beat."""
        self._running = UNSEEN
        self._collecting_since = self._collected_s = 0.0

    def start(self) -> None:
        """Begin, on the loop that runs."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._schedule = _ThreadSchedule()
        gc.callbacks.append(self._time_collection)
        self._record_beat()
        self._timer = self._loop.call_later(self._interval_s, self._beat)
        self._thread.start()

    def stop(self) -> None:
        """Stop. A stall that is under way is reported, as the loop turns again."""
        self._timer.cancel()
        gc.callbacks.remove(self._time_collection)
        self._check()
        self._stopped.set()
        self._thread.join()
        self._schedule.close()

    def _beat(self) -> None:
        self._check()
        self._record_beat()
        self._timer = self._loop.call_later(self._interval_s, self._beat)

    def _check(self) -> None:
        late_s = time.monotonic() - self._beat_at - self._interval_s
        if late_s <= self._threshold_s:
            return
        # Busy for certain, or seen to block while the sampling thread ran. Anything else was not the loop's doing.
        busy_s = time.thread_time() - self._cpu_s
        blocked_s = min(self._unbeaten_s, late_s - (self._schedule.waited_s() - self._waited_s))
        stalled_s = min(late_s, max(busy_s, blocked_s))
        if stalled_s > self._threshold_s:
            running = COLLECTION if self._collected_s > stalled_s / 2 else self._running
            self._on_stall(Stall(seconds=stalled_s, running=running))

    def _record_beat(self) -> None:
        self._beat_at = time.monotonic()
        self._cpu_s = time.thread_time()
        self._waited_s = self._schedule.waited_s()
        self._beats += 1
        self._unbeaten_s = self._collected_s = 0.0
        self._running = UNSEEN

    def _time_collection(self, phase: str, _: Mapping[str, int]) -> None:
        if threading.get_ident() != self._loop_thread:
            return
        if phase == "start":
            self._collecting_since = time.monotonic()
        else:
            self._collected_s += time.monotonic() - self._collecting_since

    def _sample_stalls(self) -> None:
        beats = -1
        while not self._stopped.wait(self._interval_s):
            if self._beats != beats:
                beats = self._beats
                continue
            self._unbeaten_s += self._interval_s
            # Sampled once, in the middle of what takes too long rather than at its end.
            if self._unbeaten_s >= self._threshold_s / 2 and self._running is UNSEEN:
                frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - documented, and the only way
                self._running = UNSEEN if frame is None else _calls(frame)


@contextmanager
def watching(on_stall: Callable[[Stall], None], *, threshold_s: float) -> Iterator[None]:
    """Watch the running loop within the block."""
    watchdog = LoopWatchdog(on_stall, threshold_s=threshold_s)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


def _calls(frame: FrameType | None) -> str:
    found: list[str] = []
    while frame is not None and len(found) < _FRAMES:
        name = frame.f_globals.get("__name__", "?")
        found.append(f"{name}.{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " > ".join(reversed(found))


class _ThreadSchedule:
    """How long the calling thread has been ready to run and had no processor. Kept open: it is read ten times a second."""

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            # Nanoseconds on a processor, nanoseconds of waiting for one, turns.
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def waited_s(self) -> float:
        """Return seconds; 0 where the system does not say."""
        return 0.0 if self._file is None else int(os.pread(self._file, 64, 0).split()[1]) / 1e9

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
