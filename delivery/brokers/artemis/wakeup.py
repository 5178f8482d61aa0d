"""Wake a thread that waits in a selector: many notifications, at most one byte in a pipe."""

import contextlib
import socket

_CHUNK_BYTES = 4096


class WakeUp:
    """Wake the thread whose selector watches this object for reading.

    The order of both sides decides. A notifier makes its work visible, then calls `notify`. The
    waiting thread calls `clear`, then checks for work. `clear` empties the pipe before it allows
    the next byte: a byte written in between would be read as an old one while its flag stays set,
    and no later notification would write another.
    """

    def __init__(self) -> None:
        self._writer, self._reader = socket.socketpair()
        self._writer.setblocking(False)
        self._reader.setblocking(False)
        self._notified = False
        """A byte is in the pipe, or about to be, that no `clear` has read."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reader.fileno()

    def notify(self) -> None:
        """Make the waiting thread check for work.

        Any thread may call it; a closed wake-up ignores it.
        """
        if not self._notified:
            self._notified = True
            with contextlib.suppress(OSError):
                self._writer.send(b"!")

    def clear(self) -> None:
        """Clear the notifications so far. Check for work after this call, never before it."""
        self._drain()
        self._notified = False

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(_CHUNK_BYTES):
                pass

    def close(self) -> None:
        """Close the pipe; the selector must not watch it any more."""
        self._writer.close()
        self._reader.close()
