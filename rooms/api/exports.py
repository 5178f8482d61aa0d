"""Write exports: tables as CSV, in which no cell is a formula, while their key may read them."""

import csv
import io
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from datetime import datetime
from functools import partial
from typing import Final

import msgspec

from rooms.api.deps import ApiServices
from rooms.api.openapi import CSV
from rooms.db.connection import wait_for_share
from rooms.db.principals import KeyStanding
from rooms.domain.principal import Principal
from rooms.errors import UnauthenticatedError

CHECK_INTERVAL_S: Final = 1.0
"""The shortest time between two checks of a stream's key."""
CSV_MEDIA_TYPE: Final = f"{CSV}; charset=utf-8"
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n", *"＝＋－＠")  # noqa: RUF001 - full-width
# Programs that take these as separators, as some countries' do, begin a cell after them.
_INNER_START: Final = re.compile(f"([;\t][\"' ]*)([{re.escape(''.join(_FORMULA_STARTS))}])")


async def while_key_lasts(
    services: ApiServices, principal: Principal, chunks: AsyncIterator[bytes]
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of an answer, while its key is neither revoked, nor narrowed, nor over.

    A key of a suspended organisation goes on, because it may read.

    UnauthenticatedError: the key is over. StorageUnavailableError, StorageRefusedError,
    RateLimitedError: it could not be checked.
    """
    checked_s = services.clock.monotonic()
    async for chunk in chunks:
        now_s = services.clock.monotonic()
        if now_s - checked_s >= CHECK_INTERVAL_S:
            checked_s = now_s
            standings = await wait_for_share(partial(services.keys.check_keys, [principal]))
            if standings[principal] is KeyStanding.OVER:
                raise UnauthenticatedError("the key of this answer was revoked, or has ended")
        yield chunk


def csv_lines(rows: Iterable[Iterable[object]]) -> bytes:
    """Return lines of cells: text as it is, None empty, times in RFC 3339, all else as JSON."""
    text = io.StringIO()
    csv.writer(text).writerows(map(_cell, row) for row in rows)
    return text.getvalue().encode()


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case datetime():
            return value.isoformat().replace("+00:00", "Z")
        case str():
            text = _INNER_START.sub(r"\1'\2", value)
            return f"'{text}" if text.startswith(_FORMULA_STARTS) else text
        case _:
            return msgspec.json.encode(value).decode().replace(";", "\\u003b")
