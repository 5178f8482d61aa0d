"""Test that the hours in which keys were used are written, in few statements."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from rooms.db import authentication
from rooms.db.connection import transaction
from rooms.errors import StorageUnavailableError, UnauthenticatedError
from tests.integration.rooms.db.conftest import Keys
from tests.support.installation import Installation, until


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


async def test_no_error_ends_the_writing(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    identity, header = await keys.make()
    failing = [ValueError("a column of a later version")]

    def fails_at_first(engine: AsyncEngine) -> AbstractAsyncContextManager[AsyncConnection]:
        if failing:
            raise failing.pop()
        return transaction(engine)

    async with keys.authenticator(record_use_s=0.01) as authenticator:
        monkeypatch.setattr(authentication, "transaction", fails_at_first)
        await authenticator.authenticate(header)

        async def look() -> datetime | None:
            return await keys.used_at(identity)

        await until(look, "the use to be written")
    assert not failing


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
    monkeypatch.setattr(authentication, "autocommit", counted)
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
