"""Provide httpx without its own command line, which would load rich and pygments.

They are a quarter of the time of a command that shows no table.
"""

import sys

_COMMAND_LINE = "httpx._main"

_is_new = _COMMAND_LINE not in sys.modules
if _is_new:
    # httpx takes an import that fails for a command line that is not installed.
    sys.modules[_COMMAND_LINE] = None  # type: ignore[assignment]
try:
    import httpx
finally:
    if _is_new:
        del sys.modules[_COMMAND_LINE]

__all__ = ["httpx"]
