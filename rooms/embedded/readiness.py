"""Waiting until a child serves."""

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from rooms.embedded.errors import StartError
from rooms.embedded.keeper import Keeper

_POLL_S = 0.05
_PROBE_TIMEOUT_S = 2.0
_DEATHS_ALLOWED = 2


def http_ready(url: str) -> Callable[[], Awaitable[bool]]:
    """Asks whether a GET of this http address is answered with 200."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "") or "/"
    request = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode()

    async def ready() -> bool:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
                try:
                    writer.write(request)
                    status = await reader.readline()
                finally:
                    writer.close()
        except (OSError, TimeoutError, ValueError):
            return False
        return status.split()[1:2] == [b"200"]

    return ready


async def unanswered(keeper: Keeper) -> None:
    """Raises StartError when somebody already serves what this child, which is not started yet, is to serve."""
    if keeper.child.ready is not None and await keeper.child.ready():
        raise StartError(
            f"something else already answers in the place of {keeper.child.name}: stop it, or set ROOMS_LISTEN"
        )


async def until_ready(keeper: Keeper) -> None:
    """Wait for a started child; at once for one that has no way to tell.

    Raises StartError with the end of its log when it keeps dying or takes too long, and whatever kept it from starting at all.
    """
    child = keeper.child
    if child.ready is None:
        return
    try:
        async with asyncio.timeout(child.ready_timeout_s):
            while keeper.failure is None and keeper.deaths <= _DEATHS_ALLOWED:
                if await child.ready():
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError as exc:
        raise StartError(_unready(keeper, f"was not ready within {child.ready_timeout_s:g} s")) from exc
    if keeper.failure is not None:
        raise keeper.failure
    raise StartError(_unready(keeper, f"died {keeper.deaths} times before it was ready"))


def _unready(keeper: Keeper, what: str) -> str:
    return f"{keeper.child.name} {what}; its log is {keeper.book.path} and ends with:\n{keeper.book.tail()}"
