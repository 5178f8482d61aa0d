"""Test that the hours in which keys were used are written, in few statements."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rooms.db import authentication
from rooms.db.authentication import ApiKeyAuthenticator
from rooms.db.catalog.api_keys import create_key, new_key
from rooms.db.catalog.organisations import ensure_organisation
from rooms.db.connection import open_engine, transaction
from rooms.domain.state_machine import Scope
from rooms.errors import StorageUnavailableError, UnauthenticatedError
from tests.support.installation import Installation, now_ms, until


class Keys:
    """Keys of one organisation, and the authenticator that knows them."""

    def __init__(self, installation: Installation, engine: Any) -> None:
        self._installation = installation
        self._engine = engine

    async def make(self, **restrictions: Any) -> tuple[str, bytes]:
        """Create a key; its id, and the header that presents it."""
        text = new_key(os.urandom)
        identity = self._installation.ids.generate_global(now_ms())
        async with transaction(self._engine) as connection:
            organisation = await ensure_organisation(
                connection, "ours", self._installation.ids.generate_global(now_ms())
            )
            await create_key(
                connection, new_id=identity, organisation=organisation, name="key",
                scopes=[Scope.PUBLISH], text=text, restrictions=restrictions,
            )  # fmt: skip
        return identity, f"Bearer {text}".encode()

    async def used_at(self, identity: str) -> datetime | None:
        found: datetime | None = await self._installation.value(
            "SELECT last_used_at FROM api_keys WHERE id = %s", identity
        )
        return found

    def authenticator(self, **settings: Any) -> ApiKeyAuthenticator:
        return ApiKeyAuthenticator(self._engine, asyncio.get_running_loop().time, **settings)


@pytest.fixture
async def keys(installation: Installation) -> AsyncIterator[Keys]:
    engine = open_engine(installation.url, size=2)
    yield Keys(installation, engine)
    await engine.dispose()


def this_hour() -> datetime:
    return datetime.now(UTC).replace(minute=0, second=0, microsecond=0)


async def test_the_use_of_a_key_is_written_to_the_hour(keys: Keys) -> None:
    identity, header = await keys.make()
    async with keys.authenticator(record_use_s=0.01) as authenticator:
        before = this_hour()
        await authenticator.authenticate(header)

        async def look() -> datetime | None:
            return await keys.used_at(identity)

        written = await until(look, "the use to be written")
        assert written is not None
        assert before <= written <= this_hour()


async def test_what_is_not_written_yet_is_written_at_the_end(keys: Keys) -> None:
    identity, header = await keys.make()
    async with keys.authenticator(record_use_s=3600.0) as authenticator:
        await authenticator.authenticate(header)
        assert await keys.used_at(identity) is None
    assert await keys.used_at(identity) is not None


async def test_a_key_that_was_not_used_or_was_refused_has_no_hour(keys: Keys) -> None:
    idle, _ = await keys.make()
    elsewhere, header = await keys.make(networks=["192.0.2.0/24"])
    async with keys.authenticator() as authenticator:
        with pytest.raises(UnauthenticatedError):
            await authenticator.authenticate(header, ("198.51.100.1", 1))
    assert await keys.used_at(idle) is None
    assert await keys.used_at(elsewhere) is None


async def test_requests_cost_no_statement_and_an_hour_is_written_once(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = 0

    @asynccontextmanager
    async def counted(engine: Any) -> AsyncIterator[Any]:
        nonlocal transactions
        transactions += 1
        async with transaction(engine) as connection:
            yield connection

    made = [await keys.make() for _ in range(3)]
    monkeypatch.setattr(authentication, "transaction", counted)
    authenticator = keys.authenticator()
    for _ in range(20):
        for _, header in made:
            await authenticator.authenticate(header)
    assert transactions == 3  # one look-up of each
    await authenticator.record_use()
    assert transactions == 4
    await authenticator.record_use()
    authenticator.forget()
    await authenticator.authenticate(made[0][1])
    await authenticator.record_use()
    assert transactions == 5  # the look-up; its hour is written


async def test_a_use_is_kept_while_the_database_is_away(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity, header = await keys.make()
    authenticator = keys.authenticator()
    await authenticator.authenticate(header)

    def away(_engine: Any) -> Any:
        raise StorageUnavailableError("away")

    with monkeypatch.context() as patched:
        patched.setattr(authentication, "transaction", away)
        await authenticator.record_use()
    assert await keys.used_at(identity) is None
    await authenticator.record_use()
    assert await keys.used_at(identity) is not None


async def test_an_older_hour_never_replaces_a_newer_one(
    keys: Keys, installation: Installation
) -> None:
    identity, header = await keys.make()
    newer = this_hour() + timedelta(hours=1)
    await installation.rows("UPDATE api_keys SET last_used_at = %s WHERE id = %s", newer, identity)
    async with keys.authenticator() as authenticator:
        await authenticator.authenticate(header)
    assert await keys.used_at(identity) == newer
