"""Watch the event loop for callbacks that run too long and delay the whole process.

A timer on the loop records each turn. A thread samples the stack while the loop does not turn. Time
in which the process could not run is not counted: when it is stopped, or waits for a processor
(from Linux' schedstat).
"""

import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

from rooms.thread_schedule import ThreadSchedule

_INTERVAL_S: Final = 0.1
_MAX_FRAMES: Final = 6
COLLECTION: Final = "garbage collection"
UNKNOWN_CAUSE: Final = "unknown: an extension module kept the interpreter's lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Describe one stall of the loop."""

    seconds: float
    cause: str
    """Innermost calls, outermost first; or COLLECTION; or UNKNOWN_CAUSE without a sample."""


class LoopWatchdog:
    """Watch the running loop, and call `on_stall` on it after each stall over `threshold_s`."""

    def __init__(
        self,
        on_stall: Callable[[Stall], None],
        *,
        threshold_s: float,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._on_stall = on_stall
        self._threshold_s = threshold_s
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=self._sample_stalls, name="loop watchdog", daemon=True
        )
        self._beats = 0
        self._missed_beat_s = 0.0
        """Time for which the sampling thread has seen no beat."""
        self._sampled_cause = UNKNOWN_CAUSE
        self._collecting_since = self._collected_s = 0.0

    def start(self) -> None:
        """Begin to watch the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._schedule = ThreadSchedule()
        gc.callbacks.append(self._time_collection)
        self._record_beat()
        self._timer = self._loop.call_later(self._interval_s, self._beat)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and report a stall that has just ended."""
        self._timer.cancel()
        gc.callbacks.remove(self._time_collection)
        self._check()
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        self._check()
        self._record_beat()
        self._timer = self._loop.call_later(self._interval_s, self._beat)

    def _check(self) -> None:
        late_s = time.monotonic() - self._beat_at - self._interval_s
        if late_s <= self._threshold_s:
            return
        # The loop used the processor, or blocked while the sampling thread ran. Other delays are
        # those of the process.
        busy_s = time.thread_time() - self._cpu_s
        _, waited_s = self._schedule.times_s()
        blocked_s = min(self._missed_beat_s, late_s - (waited_s - self._waited_s))
        stalled_s = min(late_s, max(busy_s, blocked_s))
        if stalled_s > self._threshold_s:
            running = COLLECTION if self._collected_s > stalled_s / 2 else self._sampled_cause
            self._on_stall(Stall(seconds=stalled_s, cause=running))

    def _record_beat(self) -> None:
        self._beat_at = time.monotonic()
        self._cpu_s = time.thread_time()
        _, self._waited_s = self._schedule.times_s()
        self._beats += 1
        self._missed_beat_s = self._collected_s = 0.0
        self._sampled_cause = UNKNOWN_CAUSE

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
            self._missed_beat_s += self._interval_s
            # Sample once, in the middle of the stall.
            if (
                self._missed_beat_s >= self._threshold_s / 2
                and self._sampled_cause is UNKNOWN_CAUSE
            ):
                frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 - documented
                self._sampled_cause = UNKNOWN_CAUSE if frame is None else _format_frames(frame)


@contextmanager
def watch_loop(on_stall: Callable[[Stall], None], *, threshold_s: float) -> Iterator[None]:
    """Watch the running loop within the block."""
    watchdog = LoopWatchdog(on_stall, threshold_s=threshold_s)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.stop()


def _format_frames(frame: FrameType | None) -> str:
    found: list[str] = []
    # A collection calls `_time_collection` from whatever the loop was running.
    while frame is not None and frame.f_code is LoopWatchdog._time_collection.__code__:  # noqa: SLF001
        frame = frame.f_back
    while frame is not None and len(found) < _MAX_FRAMES:
        name = frame.f_globals.get("__name__", "?")
        found.append(f"{name}.{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " > ".join(reversed(found))
