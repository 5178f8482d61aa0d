"""Seal what an older version or another key has left, also while it changes."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from delivery.push.endpoints import Endpoint
from rooms.db import secret_rotation
from rooms.db.encrypted_headers import decrypt_headers, encrypt_headers
from rooms.db.queue.endpoints import load_endpoints
from rooms.db.secret_rotation import (
    RotationProgress,
    count_by_key,
    encrypt_plain_headers,
    prepare_secrets,
    reencrypt_batch,
)
from rooms.db.secrets import PREFIX_BYTES, Cipher
from rooms.domain.ids import SubscriptionId
from rooms.errors import SettingsError
from tests.support.installation import SEAL, SECRET, Installation, ago

OLD, NEW = bytes(32), bytes(range(32))
ROTATING = Cipher(NEW, OLD)
LATER = datetime(2999, 1, 1, tzinfo=UTC)
HEADERS = {"Authorization": "Bearer s3cret-value", "X-Team": "a b"}


async def subscribe(
    installation: Installation, headers: Mapping[str, str] = HEADERS, **columns: Any
) -> SubscriptionId:
    """Return a subscription with sealed headers."""
    identity = await installation.subscribe(**columns)
    sealed = encrypt_headers(SEAL, identity, headers)
    await installation.rows(
        "UPDATE subscriptions SET header_names = %s, sealed_headers = %s WHERE id = %s",
        sealed["header_names"],
        sealed["sealed_headers"],
        identity,
    )
    return identity


async def reseal(installation: Installation, cipher: Cipher = ROTATING) -> RotationProgress:
    progress = RotationProgress()
    while await reencrypt_batch(installation.connection, cipher, progress):
        pass
    return progress


async def endpoint(
    installation: Installation, identity: SubscriptionId, cipher: Cipher = SEAL
) -> str:
    """Return the lines that do not change between the calls of a subscription."""
    pairs = [(installation.room, identity)]
    records = await load_endpoints(installation.connection, pairs)
    return Endpoint(records[identity], cipher)._static_headers


async def test_headers_of_an_older_version_are_sent_and_then_sealed(
    installation: Installation,
) -> None:
    identity = await installation.subscribe(headers=json.dumps(HEADERS))
    without = await installation.subscribe()
    before = await endpoint(installation, identity)
    assert "Authorization: Bearer s3cret-value\r\n" in before
    assert await encrypt_plain_headers(installation.connection, SEAL) == 1
    assert await encrypt_plain_headers(installation.connection, SEAL) == 0
    assert sorted(await endpoint(installation, identity)) == sorted(before)
    (row,) = await installation.rows("SELECT * FROM subscriptions WHERE id = %s", identity)
    assert (row["headers"], sorted(row["header_names"]), row["version"]) == ({}, sorted(HEADERS), 1)
    assert "s3cret" not in str(row)
    (row,) = await installation.rows("SELECT * FROM subscriptions WHERE id = %s", without)
    assert (row["headers"], row["header_names"], row["sealed_headers"]) == ({}, [], None)


async def test_what_an_older_process_writes_later_counts(installation: Installation) -> None:
    """It knows nothing of sealed headers: those in clear text are newer."""
    identity = await subscribe(installation)
    await installation.change(identity, headers='{"X-New": "1"}')
    for _ in range(2):
        lines = await endpoint(installation, identity)
        assert "X-New: 1\r\n" in lines
        assert "Authorization" not in lines
        await encrypt_plain_headers(installation.connection, SEAL)
    (row,) = await installation.rows("SELECT * FROM subscriptions")
    assert (row["headers"], row["header_names"]) == ({}, ["X-New"])


async def test_many_are_sealed_in_batches(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_rotation, "BATCH", 2)
    for _ in range(5):
        await installation.subscribe(headers=json.dumps(HEADERS))
    assert await encrypt_plain_headers(installation.connection, SEAL) == 5


async def test_sealed_headers_open_only_for_their_subscription(installation: Installation) -> None:
    one, other = await subscribe(installation), await subscribe(installation)
    sealed = await installation.value("SELECT sealed_headers FROM subscriptions WHERE id = %s", one)
    assert decrypt_headers(SEAL, one, sealed) == HEADERS
    with pytest.raises(ValueError):
        decrypt_headers(SEAL, other, sealed)


async def test_everything_is_sealed_again(installation: Installation) -> None:
    named = SEAL.encrypt(SECRET.encode())
    kept = [
        await subscribe(installation, previous_secret=named, previous_secret_until=LATER),
        await subscribe(installation, secret=named[PREFIX_BYTES:]),
        await subscribe(installation, status="terminated"),
        await installation.subscribe(),
    ]
    await installation.subscribe(secret=None)
    assert (await reseal(installation)).subscriptions == len(kept)
    assert await count_by_key(installation.connection) == {Cipher(NEW).key_ids[0]: 6}
    rows = await installation.rows(
        "SELECT * FROM subscriptions WHERE secret IS NOT NULL ORDER BY id"
    )
    for row in rows:
        assert row["version"] == 1
        assert Cipher(NEW).decrypt(row["secret"]).decode() == SECRET
    assert Cipher(NEW).decrypt(rows[0]["previous_secret"]).decode() == SECRET
    for identity in kept[:2]:
        lines = await endpoint(installation, identity, Cipher(NEW))
        assert "Authorization: Bearer s3cret-value\r\n" in lines
    assert (await reseal(installation)).subscriptions == 0


async def test_a_pass_that_dies_is_continued(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secret_rotation, "BATCH", 2)
    for _ in range(5):
        await subscribe(installation)
    first = RotationProgress()
    assert await reencrypt_batch(installation.connection, ROTATING, first)
    assert await count_by_key(installation.connection) == {
        SEAL.key_ids[0]: 6,
        Cipher(NEW).key_ids[0]: 4,
    }
    assert (await reseal(installation)).subscriptions == 3
    assert await count_by_key(installation.connection) == {Cipher(NEW).key_ids[0]: 10}


async def test_what_changes_meanwhile_is_kept(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret that is rotated between reading and writing is not replaced by the one before."""
    identity = await subscribe(installation)
    columns = secret_rotation._reencrypted_columns
    newer = Cipher(OLD).encrypt(b"whsec_newer")

    def changed_meanwhile(*arguments: Any) -> Any:
        with psycopg.connect(installation.url) as other:
            other.execute(
                "UPDATE subscriptions SET previous_secret = secret, previous_secret_until = %s, secret = %s"
                " WHERE id = %s",
                (LATER, newer, identity),
            )
        monkeypatch.setattr(secret_rotation, "_reencrypted_columns", columns)
        return columns(*arguments)

    monkeypatch.setattr(secret_rotation, "_reencrypted_columns", changed_meanwhile)
    await reseal(installation)
    (row,) = await installation.rows("SELECT * FROM subscriptions")
    assert row["secret"] == newer
    assert SEAL.decrypt(row["previous_secret"]).decode() == SECRET
    assert decrypt_headers(Cipher(NEW), identity, row["sealed_headers"]) == HEADERS
    assert (await reseal(installation)).subscriptions == 1
    (row,) = await installation.rows("SELECT * FROM subscriptions")
    assert Cipher(NEW).decrypt(row["secret"]) == b"whsec_newer"
    assert Cipher(NEW).decrypt(row["previous_secret"]).decode() == SECRET


async def test_values_of_a_lost_key_are_named_and_stay(installation: Installation) -> None:
    lost = await subscribe(installation, secret=Cipher(b"x" * 32).encrypt(b"whsec_lost"))
    await subscribe(installation)
    progress = await reseal(installation)
    assert (progress.subscriptions, progress.unreadable) == (2, [lost])
    found = await installation.value("SELECT secret FROM subscriptions WHERE id = %s", lost)
    assert Cipher(b"x" * 32).decrypt(found) == b"whsec_lost"


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "of an earlier version"])
async def test_a_process_with_another_key_does_not_start(
    installation: Installation, caplog: pytest.LogCaptureFixture, *, is_named: bool
) -> None:
    sealed = SEAL.encrypt(SECRET.encode())
    await installation.subscribe(secret=sealed if is_named else sealed[PREFIX_BYTES:])
    connection, wrong = installation.connection, Cipher(NEW)
    with pytest.raises(SettingsError, match="ROOMS_SECRET_KEY") as refused:
        await prepare_secrets(connection, wrong, refuse_unknown=True)
    assert ("earlier version" in str(refused.value)) is not is_named
    assert wrong.key_ids[0] in str(refused.value)
    await prepare_secrets(connection, wrong, refuse_unknown=False)
    assert "not there" in caplog.text
    await prepare_secrets(connection, ROTATING, refuse_unknown=True)
    await prepare_secrets(connection, SEAL, refuse_unknown=True)


async def test_what_has_ended_refuses_no_start(installation: Installation) -> None:
    """Neither an ended subscription nor a secret whose overlap is over is used any more."""
    lost = Cipher(b"x" * 32).encrypt(b"whsec_lost")
    await installation.subscribe(secret=lost, status="terminated")
    over = await subscribe(installation, previous_secret=lost, previous_secret_until=ago())
    await prepare_secrets(installation.connection, SEAL, refuse_unknown=True)
    assert await count_by_key(installation.connection) == {SEAL.key_ids[0]: 2}
    progress = await reseal(installation)
    assert progress.subscriptions == 1
    assert over not in progress.unreadable
    assert await count_by_key(installation.connection) == {Cipher(NEW).key_ids[0]: 2}
    await installation.change(over, previous_secret_until=LATER)
    with pytest.raises(SettingsError, match=Cipher(b"x" * 32).key_ids[0]):
        await prepare_secrets(installation.connection, ROTATING, refuse_unknown=True)
