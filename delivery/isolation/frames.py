"""What a worker and its wards say to each other: three sizes, a JSON object, and the bytes that JSON cannot hold."""

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any, Final

_SIZES: Final = struct.Struct("!III")

Frame = tuple[dict[str, Any], bytes, bytes]


def packed(said: Mapping[str, Any], first: bytes = b"", second: bytes = b"") -> bytes:
    """A frame, as it goes through the pipe."""
    text = json.dumps(said).encode()
    return b"".join((_SIZES.pack(len(text), len(first), len(second)), text, first, second))


async def read(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None where the other side is gone."""
    try:
        sizes = _SIZES.unpack(await reader.readexactly(_SIZES.size))
        text, first, second = [await reader.readexactly(size) for size in sizes]
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return json.loads(text), first, second
