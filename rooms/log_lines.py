"""Log lines: what is in a message begins no other line, and no control character reaches a terminal."""

import logging
import sys
from typing import Any, Final

from rooms.terminal import lines_safe, terminal_safe

_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_INDENT: Final = "  "


class LineFormatter(logging.Formatter):
    """Write each record as one line; a traceback follows on lines that are indented, as no record is."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the record's line."""
        record.message = terminal_safe(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        """Return the traceback, indented."""
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802 - logging's name
        """Return the stack, indented."""
        return _indented(super().formatStack(stack_info))


def log_to_stderr(level: str) -> None:
    """Send the log of a process to standard error, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


def warn_safely() -> None:
    """Let a command, which has no log of its own, write warnings as safe lines."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LineFormatter())


def _indented(text: str) -> str:
    return _INDENT + lines_safe(text).replace("\n", f"\n{_INDENT}")
