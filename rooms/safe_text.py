"""Escape untrusted text for terminals, logs and pages.

No control character reaches a terminal, nothing is invisible, and no log message begins a new line.
"""

import logging
import re
import sys
from typing import Any, Final

# Invisible characters that Python calls printable: fillers, joiners, selectors.
_INVISIBLE: Final = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_INDENT: Final = "  "
_BRIEF: Final = 60
_BRIEF_BITS: Final = 64


def terminal_safe(text: str) -> str:
    """Return the text as one line, with control and invisible characters escaped.

    These are C0 (without the tab), C1, DEL, line ends, bidi marks and overrides, zero-width
    characters, lone surrogates and characters without glyphs.
    """
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(
        char if char == "\t" or _is_printable(char) else ascii(char)[1:-1] for char in text
    )


def lines_safe(text: str) -> str:
    """Return text of several lines, each of them safe for a terminal."""
    return "\n".join(map(terminal_safe, text.split("\n")))


def json_safe(text: str) -> str:
    """Return a JSON text of the same meaning that is safe for a terminal.

    Unsafe characters occur only in strings, where an escape means the same. Carriage returns occur
    only between values.
    """
    text = text.replace("\r", " ")
    if text.isprintable() and not _INVISIBLE.search(text):
        return text
    return "".join(
        char if char in "\t\n" or _is_printable(char) else _escape(char) for char in text
    )


def brief_repr(value: object) -> str:
    """Return a value from elsewhere for an error: texts are cut, and nothing is nested."""
    if isinstance(value, str):
        return repr(value if len(value) <= _BRIEF else f"{value[:_BRIEF]}…")
    if isinstance(value, int) and value.bit_length() > _BRIEF_BITS:
        return "a large number"
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def _is_printable(char: str) -> bool:
    # `ascii` escapes every invisible character, since none is ASCII.
    return char.isprintable() and not _INVISIBLE.match(char)


def _escape(char: str) -> str:
    units = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


class LineFormatter(logging.Formatter):
    """Format each record as one line. Lines of a traceback are indented, unlike records."""

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
    """Write the log of a process to standard error, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


def log_warnings_safely() -> None:
    """Write the warnings of a command, which has no log, as safe lines."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LineFormatter())


def _indented(text: str) -> str:
    return _INDENT + lines_safe(text).replace("\n", f"\n{_INDENT}")
