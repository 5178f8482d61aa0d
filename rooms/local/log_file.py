"""Write one bounded log file for each process, and report the warnings in it."""

import re
from asyncio import StreamReader, StreamReaderProtocol, create_task, get_running_loop, wait
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rooms.safe_text import terminal_safe

WARNING_PATTERN = re.compile(
    r"\b(WARN|WARNING|ERROR|CRITICAL|FATAL|PANIC)\b"
    r"|\"level\": ?\"(warning|error|critical)\"|^Traceback"
)
_CHUNK_BYTES = 65536
_TAIL_LINES = 20


class RotatingLog:
    """Append lines to `path`, which becomes `<path>.1` when it exceeds `limit_bytes`."""

    def __init__(
        self,
        path: Path,
        *,
        echo: Callable[[str], None],
        warning_pattern: re.Pattern[str] = WARNING_PATTERN,
        limit_bytes: int = 10_000_000,
    ) -> None:
        self.path = path
        self._echo = echo
        self._warning_pattern = warning_pattern
        self._limit_bytes = limit_bytes
        self._last_lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Write one line, without its line end. It may contain text of tenants."""
        line = terminal_safe(line.removesuffix("\r"))
        self._last_lines.append(line)
        # On a full disk the process must continue: a pipe that is not read would block it.
        with suppress(OSError):
            if self._file.tell() > self._limit_bytes:
                self._rotate()
        with suppress(OSError):
            self._file.write(f"{line}\n".encode(errors="replace"))
        if self._warning_pattern.search(line):
            self._echo(line)

    def _rotate(self) -> None:
        """Begin a new file. OSError: the old one goes on, and the next line tries again."""
        if self.path.exists():
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        new = self.path.open("ab", buffering=0)
        self._file.close()
        self._file = new

    def tail(self) -> str:
        """Return the last lines that were written."""
        return "\n".join(self._last_lines)

    @asynccontextmanager
    async def copy_output(self, pipe: BinaryIO, *, drain_s: float) -> AsyncIterator[None]:
        """Write what the pipe delivers. At the end, wait `drain_s` for its last lines."""
        stream = StreamReader()
        transport, _ = await get_running_loop().connect_read_pipe(
            lambda: StreamReaderProtocol(stream), pipe
        )
        writing = create_task(self._copy(stream))
        try:
            yield
            await wait([writing], timeout=drain_s)
        finally:
            writing.cancel()
            transport.close()

    def close(self) -> None:
        self._file.close()

    async def _copy(self, stream: StreamReader) -> None:
        rest = ""
        while chunk := await stream.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk.decode(errors="replace")).split("\n")
            for line in lines:
                self.write(line)
            if len(rest) > _CHUNK_BYTES:
                self.write(rest)
                rest = ""
        if rest:
            self.write(rest)
