"""Test that keys in use are looked up again in time, and that what ended is forgotten."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from rooms.db import authentication, known_keys
from rooms.db.authentication import ApiKeyAuthenticator
from rooms.db.catalog.api_keys import hash_key, new_key
from rooms.db.connection import autocommit
from rooms.db.known_keys import CACHE_S, RENEW_S, KnownKeys
from rooms.domain.ids import KeyId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope
from rooms.errors import StorageUnavailableError
from tests.integration.rooms.db.conftest import Keys
from tests.support.installation import Installation, until

ROUNDS = 15


class Time:
    """A monotonic clock that the test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Statements:
    """Count what authentication asks PostgreSQL for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lookups = self.renewals = 0
        monkeypatch.setattr(authentication, "autocommit", self._counted("lookups"))
        monkeypatch.setattr(known_keys, "autocommit", self._counted("renewals"))

    def _counted(self, kind: str) -> Any:
        @asynccontextmanager
        async def counted(engine: Any) -> AsyncIterator[Any]:
            setattr(self, kind, getattr(self, kind) + 1)
            async with autocommit(engine) as connection:
                yield connection

        return counted


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Statements:
    return Statements(monkeypatch)


def known(authenticator: ApiKeyAuthenticator) -> KnownKeys:
    return authenticator._known


@pytest.fixture
def authenticator(keys: Keys, time: Time) -> ApiKeyAuthenticator:
    return ApiKeyAuthenticator(keys.engine, time)


async def test_a_key_that_comes_once_a_second_is_looked_up_by_no_request(
    keys: Keys, authenticator: ApiKeyAuthenticator, time: Time, statements: Statements
) -> None:
    used = [header for _, header in [await keys.make() for _ in range(5)]]
    for header in used:
        await authenticator.authenticate(header)
    assert (statements.lookups, statements.renewals) == (5, 0)
    for _ in range(10):
        for _ in range(2):
            time.now += RENEW_S
            await known(authenticator).renew()
        for header in used:
            assert authenticator.find_cached(header, None) is not None
    assert (statements.lookups, statements.renewals) == (5, 20), "one statement for all keys"


async def test_a_key_is_renewed_for_some_seconds_after_its_last_use(
    keys: Keys, authenticator: ApiKeyAuthenticator, time: Time, statements: Statements
) -> None:
    _, header = await keys.make()
    await authenticator.authenticate(header)
    for _ in range(ROUNDS + 5):
        time.now += RENEW_S
        await known(authenticator).renew()
    assert statements.renewals == ROUNDS
    assert authenticator.find_cached(header, None) is None
    await authenticator.authenticate(header)
    assert statements.lookups == 2, "the next request looks it up"


async def test_a_revoked_key_works_for_a_second_at_most_while_it_is_renewed(
    keys: Keys, authenticator: ApiKeyAuthenticator, time: Time, installation: Installation
) -> None:
    identity, header = await keys.make()
    await authenticator.authenticate(header)
    time.now += RENEW_S
    await known(authenticator).renew()
    await installation.rows("UPDATE api_keys SET revoked_at = now() WHERE id = %s", identity)
    time.now += CACHE_S * 0.9
    assert authenticator.find_cached(header, None) is not None, "it was asked for before that"
    await known(authenticator).renew()
    assert authenticator.find_cached(header, None) is None
    assert len(known(authenticator)) == 0


async def test_a_renewal_brings_what_changed_about_the_key(
    keys: Keys, authenticator: ApiKeyAuthenticator, installation: Installation
) -> None:
    identity, header = await keys.make()
    await authenticator.authenticate(header)
    await installation.rows("UPDATE api_keys SET scopes = ARRAY['manage'] WHERE id = %s", identity)
    await known(authenticator).renew()
    found = authenticator.find_cached(header, None)
    assert found is not None
    assert found.scopes == {Scope.MANAGE}


async def test_a_key_of_a_suspended_organisation_is_looked_up_by_its_requests(
    keys: Keys, authenticator: ApiKeyAuthenticator, installation: Installation
) -> None:
    """Let the end of a suspension count for the next request, as if the key had not been used."""
    _, header = await keys.make()
    await authenticator.authenticate(header)
    await installation.rows("UPDATE organisations SET status = 'suspended'")
    await known(authenticator).renew()
    assert authenticator.find_cached(header, None) is None
    assert (await authenticator.authenticate(header)).suspended


async def test_what_this_process_changes_about_an_organisation_counts_at_once(
    keys: Keys, authenticator: ApiKeyAuthenticator
) -> None:
    _, header = await keys.make()
    _, other = await keys.make(organisation="another")
    principal = await authenticator.authenticate(header)
    await authenticator.authenticate(other)
    authenticator.forget_organisation(principal.organisation_id)
    assert authenticator.find_cached(header, None) is None
    assert authenticator.find_cached(other, None) is not None


async def test_the_former_text_of_a_rotated_key_ends_though_the_new_one_is_renewed(
    keys: Keys, authenticator: ApiKeyAuthenticator, installation: Installation
) -> None:
    identity, former = await keys.make()
    text = new_key(lambda size: b"n" * size).encode()
    await installation.rows(
        "UPDATE api_keys SET previous_key_hash = key_hash, key_hash = %s,"
        " previous_until = now() + interval '1 hour' WHERE id = %s",
        hash_key(text),
        identity,
    )
    for header in (former, b"Bearer " + text):
        await authenticator.authenticate(header)
    await known(authenticator).renew()
    assert len(known(authenticator)) == 2
    await installation.rows("UPDATE api_keys SET previous_until = now() - interval '1 s'")
    await known(authenticator).renew()
    assert authenticator.find_cached(former, None) is None
    assert authenticator.find_cached(b"Bearer " + text, None) is not None


@pytest.mark.parametrize("looked_up", [0, 1])
async def test_what_is_forgotten_during_a_renewal_stays_forgotten(
    keys: Keys,
    authenticator: ApiKeyAuthenticator,
    monkeypatch: pytest.MonkeyPatch,
    looked_up: int,
) -> None:
    _, header = await keys.make()
    await authenticator.authenticate(header)
    found: list[Principal] = []

    @asynccontextmanager
    async def slow(engine: Any) -> AsyncIterator[Any]:
        async with autocommit(engine) as connection:
            yield connection
        authenticator.forget()
        if looked_up:
            found.append(await authenticator.authenticate(header))

    monkeypatch.setattr(known_keys, "autocommit", slow)
    await known(authenticator).renew()
    assert len(known(authenticator)) == len(found) == looked_up
    # What was asked for later stays.
    assert [authenticator.find_cached(header, None) is one for one in found] == [True] * looked_up


async def test_the_hour_of_a_key_that_no_request_looks_up_is_noted(
    keys: Keys, authenticator: ApiKeyAuthenticator, installation: Installation
) -> None:
    identity, header = await keys.make()
    await authenticator.authenticate(header)
    await authenticator.record_use()

    async def is_noted_by_a_renewal() -> bool:
        """Let the last use be two hours ago, renew, and write what was noted."""
        await installation.rows(
            "UPDATE api_keys SET last_used_at = now() - interval '2 h' WHERE id = %s", identity
        )
        authenticator._written_hours.clear()
        await known(authenticator).renew()
        await authenticator.record_use()
        written = await keys.used_at(identity)
        return written is not None and datetime.now(UTC) - written < timedelta(hours=1)

    assert await is_noted_by_a_renewal(), "it was used by `authenticate`"
    assert not await is_noted_by_a_renewal(), "a renewal is no use"
    assert authenticator.find_cached(header, None) is not None
    assert await is_noted_by_a_renewal()


@pytest.mark.parametrize(
    "error", [StorageUnavailableError("away"), ValueError("a scope of a later version")]
)
async def test_no_error_ends_the_renewals(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, statements: Statements, error: Exception
) -> None:
    _, header = await keys.make()
    counted, failures = vars(known_keys)["autocommit"], 3

    def away_at_first(engine: Any) -> Any:
        nonlocal failures
        if failures:
            failures -= 1
            raise error
        return counted(engine)

    monkeypatch.setattr(known_keys, "autocommit", away_at_first)
    monkeypatch.setattr(known_keys, "RENEW_S", 0.01)
    async with keys.authenticator() as authenticator:
        await authenticator.authenticate(header)

        async def renewed() -> bool:
            return statements.renewals > 0

        await until(renewed, "a renewal after the outage")
    assert failures == 0


async def test_organisations_take_turns_if_too_many_keys_are_in_use(
    keys: Keys, authenticator: ApiKeyAuthenticator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with thousands of keys in use leaves the others their renewals."""
    monkeypatch.setattr(known_keys, "MAX_RENEWED", 3)
    many = [await keys.make() for _ in range(6)]
    few, own = await keys.make(organisation="another")
    await authenticator.authenticate(own)
    await asyncio.gather(*(authenticator.authenticate(header) for _, header in many))
    digests = known(authenticator)._take_in_use()
    assert len(digests) == 3
    found = [known(authenticator).get(digest) for digest in digests]
    assert KeyId(few) in {entry[0].principal.key_id for entry in found if entry is not None}
