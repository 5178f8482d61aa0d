"""One log file a process, bounded in size, its warnings repeated where a person looks."""

import re
from asyncio import StreamReader, StreamReaderProtocol, create_task, get_running_loop, wait
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from rooms.terminal import terminal_safe

WARNINGS = re.compile(
    r"\b(WARN|WARNING|ERROR|CRITICAL|FATAL|PANIC)\b|\"level\": ?\"(warning|error|critical)\"|^Traceback"
)
_CHUNK_BYTES = 65536
_TAIL_LINES = 20


class Logbook:
    """Appends to `path`; beyond `limit_bytes` the file becomes `<path>.1` and a new one begins."""

    def __init__(
        self,
        path: Path,
        *,
        echo: Callable[[str], None],
        warnings: re.Pattern[str] = WARNINGS,
        limit_bytes: int = 10_000_000,
    ) -> None:
        self.path = path
        self._echo = echo
        self._warnings = warnings
        self._limit_bytes = limit_bytes
        self._last: deque[str] = deque(maxlen=_TAIL_LINES)
        self._file = path.open("ab", buffering=0)

    def write(self, line: str) -> None:
        """Write one line, without its end; what tenants sent may be in it."""
        line = terminal_safe(line.removesuffix("\r"))
        self._last.append(line)
        # On a full disk the process must go on: a pipe that nobody empties would block it.
        with suppress(OSError):
            if self._file.tell() > self._limit_bytes:
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
                self._file.close()
                self._file = self.path.open("ab", buffering=0)
            self._file.write(f"{line}\n".encode(errors="replace"))
        if self._warnings.search(line):
            self._echo(line)

    def tail(self) -> str:
        """The last lines that were written."""
        return "\n".join(self._last)

    @asynccontextmanager
    async def following(self, pipe: BinaryIO, *, patience_s: float) -> AsyncIterator[None]:
        """Write what the pipe brings; in the end wait so long for its last words, and close it."""
        stream = StreamReader()
        transport, _ = await get_running_loop().connect_read_pipe(lambda: StreamReaderProtocol(stream), pipe)
        writing = create_task(self._follow(stream))
        try:
            yield
            await wait([writing], timeout=patience_s)
        finally:
            writing.cancel()
            transport.close()

    def close(self) -> None:
        self._file.close()

    async def _follow(self, stream: StreamReader) -> None:
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
