"""Encrypt everything again when the secret key is rotated, and what older versions left in clear.

Encrypted are signing secrets, headers, and the key that signs receipts. Each statement writes a
value only if it is still the one that was read, so no change that is made meanwhile is lost. The
version of a subscription stays: what it does is the same.
"""

# ruff: noqa: E501 - SQL statements keep their lines

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import psycopg

from rooms.db.connection import Connection
from rooms.db.encrypted_headers import encrypt_headers, headers_purpose
from rooms.db.secrets import KEY_ID_BYTES, MARK, PREFIX_BYTES, Cipher
from rooms.domain.ids import SubscriptionId
from rooms.errors import SettingsError

_log = logging.getLogger(__name__)

BATCH: Final = 200
_SAMPLE: Final = 20
_MAX_NAMED: Final = 20
_COLUMNS: Final = ("secret", "previous_secret", "sealed_headers")
_ENDED: Final = "('deleted', 'rejected', 'terminated')"
_FIRST_ROOM: Final = -1
_FIRST_ID: Final = "00000000-0000-0000-0000-000000000000"

_PLAIN: Final = """
SELECT room_id, id::text, headers::text FROM subscriptions
WHERE headers <> '{}' AND (room_id, id) > (%(room)s, %(id)s::uuid) ORDER BY room_id, id LIMIT %(limit)s
"""
_SEAL: Final = """
UPDATE subscriptions s SET headers = '{}', sealed_headers = v.sealed,
    header_names = ARRAY(SELECT jsonb_object_keys(s.headers))
FROM unnest(%(room)s::int4[], %(id)s::uuid[], %(plain)s::text[], %(sealed)s::bytea[]) AS v (room_id, id, plain, sealed)
WHERE s.room_id = v.room_id AND s.id = v.id AND s.headers = v.plain::jsonb
"""
_PREVIOUS: Final = "CASE WHEN previous_secret_until > now() THEN previous_secret END"
"""The previous secret while it signs; it is not used, and so not counted, afterwards."""
_VALUES: Final = ("secret", _PREVIOUS, "sealed_headers")
_OTHER_KEY: Final = " OR ".join(
    f"({value} IS NOT NULL AND substring({value} for {PREFIX_BYTES}) <> %(prefix)s)"
    for value in _VALUES
)
_SEALED_BY_OTHERS: Final = f"""
SELECT room_id, id::text, {", ".join(_VALUES)} FROM subscriptions
WHERE (room_id, id) > (%(room)s, %(id)s::uuid) AND ({_OTHER_KEY}) ORDER BY room_id, id LIMIT %(limit)s
"""  # noqa: S608 - constants of this module
_PAIRS: Final = ", ".join(f"{name}, new_{name}" for name in _COLUMNS)
_ARRAYS: Final = ", ".join(f"%({name})s::bytea[], %(new_{name})s::bytea[]" for name in _COLUMNS)
_ASSIGNMENTS: Final = ", ".join(
    f"{name} = CASE WHEN s.{name} = v.{name} THEN v.new_{name} ELSE s.{name} END"
    for name in _COLUMNS
)
_RESEAL: Final = f"""
UPDATE subscriptions s SET {_ASSIGNMENTS}
FROM unnest(%(room)s::int4[], %(id)s::uuid[], {_ARRAYS}) AS v (room_id, id, {_PAIRS})
WHERE s.room_id = v.room_id AND s.id = v.id
"""  # noqa: S608 - constants of this module
_COUNT: Final = f"""
SELECT CASE WHEN substring(x for {len(MARK)}) = %(mark)s THEN encode(substring(x from {len(MARK) + 1} for {KEY_ID_BYTES}), 'hex') END, count(*)
FROM subscriptions CROSS JOIN LATERAL (VALUES ({"), (".join(_VALUES)})) AS v (x) WHERE x IS NOT NULL AND status NOT IN {_ENDED} GROUP BY 1
"""  # noqa: S608 - constants of this module
_COUNT_RECEIPT_KEYS: Final = f"""
SELECT encode(substring(encrypted_key from {len(MARK) + 1} for {KEY_ID_BYTES}), 'hex'), count(*)
FROM receipt_keys WHERE encrypted_key IS NOT NULL GROUP BY 1
"""  # noqa: S608 - constants of this module
_RECEIPT_KEYS: Final = f"""
SELECT kid, encrypted_key FROM receipt_keys
WHERE encrypted_key IS NOT NULL AND substring(encrypted_key for {PREFIX_BYTES}) <> %(prefix)s
"""  # noqa: S608 - constants of this module
_RESEAL_RECEIPT_KEY: Final = """
UPDATE receipt_keys SET encrypted_key = %(new)s WHERE kid = %(kid)s AND encrypted_key = %(old)s
"""
_UNNAMED: Final = f"""
SELECT secret FROM subscriptions
WHERE secret IS NOT NULL AND substring(secret for {len(MARK)}) <> %(mark)s AND status NOT IN {_ENDED} LIMIT %(limit)s
"""  # noqa: S608 - constants of this module


def receipt_key_purpose(kid: str) -> bytes:
    """Return the purpose for which a key of receipts is encrypted."""
    return b"receipt-key " + kid.encode()


async def prepare_secrets(connection: Connection, cipher: Cipher, *, refuse_unknown: bool) -> None:
    """Check the keys of a process that starts, and seal what older versions stored in clear text.

    SettingsError: `refuse_unknown`, and something was sealed with a key that is not there.
    """
    problem = await find_unknown_keys(connection, cipher)
    if problem is not None and refuse_unknown:
        raise SettingsError([problem])
    if problem is not None:
        _log.error("%s", problem)
    if sealed := await encrypt_plain_headers(connection, cipher):
        _log.info("the headers of %d subscriptions are sealed now", sealed)


async def find_unknown_keys(connection: Connection, cipher: Cipher) -> str | None:
    """Describe the keys that sealed something and are not there; None: there are none."""
    counts = await count_by_key(connection)
    cipher.reload()
    unknown = {name: n for name, n in counts.items() if name and name not in cipher.key_ids}
    if None in counts and not await _opens_some(connection, cipher):
        unknown["of an earlier version, which has no name"] = counts[None]
    if not unknown:
        return None
    missing = ", ".join(f"{name} ({count} values)" for name, count in sorted(unknown.items()))
    return (
        f"secrets were sealed with a key that is not there: {missing}. This process "
        f"has {', '.join(cipher.key_ids)}. Put the key back (ROOMS_SECRET_KEY, or the file "
        "secret-key), after the one that seals. If it is lost, set ROOMS_UNKNOWN_SECRET_KEYS=hold, "
        "rotate the secrets and set the headers of the subscriptions that are held, and run "
        "`rooms receipt-key rotate --replace-lost`"
    )


async def _opens_some(connection: Connection, cipher: Cipher) -> bool:
    cursor = await connection.execute(_UNNAMED, {"mark": MARK, "limit": _SAMPLE})
    sample = [secret for (secret,) in await cursor.fetchall()]
    return not sample or any(map(cipher.opens, sample))


async def count_by_key(connection: Connection) -> dict[str | None, int]:
    """Count the sealed values by the key that sealed them.

    Not those of ended subscriptions, and no previous secret that signs no longer.

    None: an earlier version sealed them, which did not name its key.
    """
    cursor = await connection.execute(_COUNT, {"mark": MARK})
    counts: dict[str | None, int] = dict(await cursor.fetchall())
    cursor = await connection.execute(_COUNT_RECEIPT_KEYS)
    for name, count in await cursor.fetchall():
        counts[name] = counts.get(name, 0) + count
    return counts


async def encrypt_plain_headers(connection: Connection, cipher: Cipher) -> int:
    """Seal the headers that are stored in clear text, and return of how many subscriptions.

    Several processes may do this at once.
    """
    done, after = 0, (_FIRST_ROOM, _FIRST_ID)
    while True:
        cursor = await connection.execute(
            _PLAIN, {"room": after[0], "id": after[1], "limit": BATCH}
        )
        rows = await cursor.fetchall()
        if not rows:
            return done
        after = rows[-1][0], rows[-1][1]
        updated = await connection.execute(
            _SEAL,
            {
                "room": [room for room, _, _ in rows],
                "id": [identity for _, identity, _ in rows],
                "plain": [plain for _, _, plain in rows],
                "sealed": [
                    encrypt_headers(
                        cipher,
                        SubscriptionId(identity),
                        msgspec.json.decode(plain, type=dict[str, str]),
                    )["sealed_headers"]
                    for _, identity, plain in rows
                ],
            },
        )
        done += updated.rowcount


@dataclass(slots=True, kw_only=True)
class RotationProgress:
    """Count what a pass over everything that is sealed did."""

    subscriptions: int = 0
    """Those that were sealed again."""
    receipt_keys: int = 0
    """The same of keys of receipts: there is one at most."""
    unreadable: list[SubscriptionId] = field(default_factory=list)
    """Those with a value that no key opens; the first of them."""
    unreadable_count: int = 0
    has_unreadable_receipt_key: bool = False
    after: tuple[int, str] = (_FIRST_ROOM, _FIRST_ID)
    """Where the next batch begins."""


async def reencrypt_batch(
    connection: Connection, cipher: Cipher, progress: RotationProgress
) -> bool:
    """Seal the next subscriptions with the present key; return False if there are none.

    One statement: a process that dies leaves each subscription as it was, or sealed again. Raises
    psycopg's errors; a deadlock loses nothing, and the batch can be repeated.
    """
    cursor = await connection.execute(
        _SEALED_BY_OTHERS,
        {
            "prefix": cipher.prefix,
            "room": progress.after[0],
            "id": progress.after[1],
            "limit": BATCH,
        },
    )
    rows = await cursor.fetchall()
    if not rows:
        return False
    columns, unreadable = _reencrypted_columns(cipher, rows)
    if columns["room"]:
        try:
            updated = await connection.execute(_RESEAL, columns)
        except psycopg.errors.DeadlockDetected:
            return True  # its victim: the batch is next again
        progress.subscriptions += updated.rowcount
    progress.unreadable_count += len(unreadable)
    progress.unreadable = [*progress.unreadable, *unreadable][:_MAX_NAMED]
    progress.after = rows[-1][0], rows[-1][1]
    return True


async def reencrypt_receipt_keys(
    connection: Connection, cipher: Cipher, progress: RotationProgress
) -> None:
    """Seal the key of receipts with the present secret key, and record whether it opened."""
    cursor = await connection.execute(_RECEIPT_KEYS, {"prefix": cipher.prefix})
    for kid, sealed in await cursor.fetchall():
        purpose = receipt_key_purpose(kid)
        try:
            again = cipher.encrypt(cipher.decrypt(sealed, purpose), purpose)
        except ValueError:
            progress.has_unreadable_receipt_key = True
            continue
        updated = await connection.execute(
            _RESEAL_RECEIPT_KEY, {"kid": kid, "old": sealed, "new": again}
        )
        progress.receipt_keys += updated.rowcount


def _reencrypted_columns(
    cipher: Cipher, rows: Sequence[Sequence[Any]]
) -> tuple[dict[str, list[Any]], list[SubscriptionId]]:
    """Return the arrays of the statement, and the subscriptions with values that do not open."""
    names = ("room", "id", *(f"{new}{name}" for name in _COLUMNS for new in ("", "new_")))
    columns: dict[str, list[Any]] = {name: [] for name in names}
    unreadable = []
    for room, text, *values in rows:
        identity = SubscriptionId(text)
        found = list(_reencrypt_values(cipher, identity, values))
        if any(old is not None and new is None for old, new in found):
            unreadable.append(identity)
        if not any(new is not None and new != old for old, new in found):
            continue
        columns["room"].append(room)
        columns["id"].append(identity)
        for name, (old, new) in zip(_COLUMNS, found, strict=True):
            columns[name].append(old)
            columns[f"new_{name}"].append(old if new is None else new)
    return columns, unreadable


def _reencrypt_values(
    cipher: Cipher, identity: SubscriptionId, values: Sequence[bytes | None]
) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Yield each value with the same one sealed by the present key; None: no key opens it."""
    purposes = (b"", b"", headers_purpose(identity))
    for old, purpose in zip(values, purposes, strict=True):
        if old is None or old.startswith(cipher.prefix):
            yield old, old
            continue
        try:
            yield old, cipher.encrypt(cipher.decrypt(old, purpose), purpose)
        except ValueError:
            yield old, None


async def writers_ended(connection: Connection, since: int) -> bool:
    """Return whether every transaction that wrote something before `since` has ended."""
    cursor = await connection.execute("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::int8")
    row = await cursor.fetchone()
    assert row is not None
    return bool(row[0] > since)


async def current_transaction(connection: Connection) -> int:
    """Return the number of a new transaction: those that write later have higher ones."""
    cursor = await connection.execute("SELECT pg_current_xact_id()::text::int8")
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])
