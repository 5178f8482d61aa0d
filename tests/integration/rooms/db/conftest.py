"""Keys of one organisation, for the tests of authentication."""

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import pytest

from rooms.db.authentication import ApiKeyAuthenticator
from rooms.db.catalog.api_keys import create_key, new_key
from rooms.db.catalog.organisations import ensure_organisation
from rooms.db.connection import open_engine, transaction
from rooms.domain.state_machine import Scope
from tests.support.installation import Installation, now_ms


class Keys:
    """Keys of one organisation, and the authenticator that knows them."""

    def __init__(self, installation: Installation, engine: Any) -> None:
        self._installation = installation
        self.engine = engine

    async def make(self, *, organisation: str = "ours", **restrictions: Any) -> tuple[str, bytes]:
        """Create a key; its id, and the header that presents it."""
        text = new_key(os.urandom)
        identity = self._installation.ids.generate_global(now_ms())
        async with transaction(self.engine) as connection:
            owner = await ensure_organisation(
                connection, organisation, self._installation.ids.generate_global(now_ms())
            )
            await create_key(
                connection, new_id=identity, organisation=owner, name="key",
                scopes=[Scope.PUBLISH], text=text, restrictions=restrictions,
            )  # fmt: skip
        return identity, f"Bearer {text}".encode()

    async def used_at(self, identity: str) -> datetime | None:
        found: datetime | None = await self._installation.value(
            "SELECT last_used_at FROM api_keys WHERE id = %s", identity
        )
        return found

    def authenticator(self, **settings: Any) -> ApiKeyAuthenticator:
        return ApiKeyAuthenticator(self.engine, asyncio.get_running_loop().time, **settings)


@pytest.fixture
async def keys(installation: Installation) -> AsyncIterator[Keys]:
    engine = open_engine(installation.url, size=2)
    yield Keys(installation, engine)
    await engine.dispose()
