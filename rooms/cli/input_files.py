"""Read files that an operator names: of a bounded size, and without hanging in a FIFO."""

import os
import select
import stat
from errno import ETIMEDOUT
from pathlib import Path
from typing import BinaryIO, Final

from rooms.cli.errors import CliError

WRITER_S: Final = 10.0
"""Seconds for which a FIFO may lack a writer. That of `<(…)` has opened it before the command."""


def open_input(path: str | Path) -> BinaryIO:
    """Open a file for reading. OSError: it cannot be opened, or is a FIFO without a writer."""
    return open(path, "rb", opener=_open)  # Path.open takes no opener


def read_input(path: str, limit: int) -> bytes:
    """Return the content of a file. CliError: it cannot be read, or has more than `limit` bytes."""
    try:
        with open_input(path) as file:
            found = file.read(limit + 1)
    except OSError as exc:
        raise CliError(f"{path} cannot be read: {exc.strerror}") from exc
    return check_size(path, found, limit)


def check_size(path: str, content: bytes, limit: int) -> bytes:
    """Return the content. CliError: it has more than `limit` bytes."""
    if len(content) > limit:
        raise CliError(f"{path} has more than {limit} bytes")
    return content


def _open(path: str, flags: int) -> int:
    # A blocking open of a FIFO would wait for a writer without end.
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    try:
        if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            _wait_for_writer(descriptor)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _wait_for_writer(descriptor: int) -> None:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    if poller.poll(WRITER_S * 1000):
        return
    try:
        os.read(descriptor, 1)
    except BlockingIOError:
        return  # there is a writer, which has written nothing yet
    raise TimeoutError(ETIMEDOUT, f"it is a FIFO, and no process wrote to it in {WRITER_S:g} s")
