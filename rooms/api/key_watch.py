"""Break off a streamed answer once its key may not read it any more."""

from collections.abc import AsyncIterator
from functools import partial
from typing import Final

from rooms.api.deps import ApiServices
from rooms.db.connection import wait_for_share
from rooms.db.principals import KeyStanding
from rooms.domain.principal import Principal
from rooms.errors import UnauthenticatedError

CHECK_INTERVAL_S: Final = 1.0
"""The shortest time between two checks of a stream's key."""


async def while_key_lasts(
    services: ApiServices, principal: Principal, chunks: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
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
