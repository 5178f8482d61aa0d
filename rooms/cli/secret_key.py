"""Implement `rooms secret-key`: the keys that seal signing secrets and headers of subscriptions."""

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Final, TypeVar

import click
import psycopg

from rooms.cli.context import CliSession, Group, pass_session
from rooms.cli.errors import CliError
from rooms.cli.key_takeover import Use, await_takeover, sealing_processes
from rooms.db.connection import Connection, open_connection
from rooms.db.processes import SCHEMA_MISSING
from rooms.db.secret_rotation import (
    RotationProgress,
    count_by_key,
    current_transaction,
    encrypt_plain_headers,
    reencrypt_batch,
    reencrypt_receipt_keys,
    writers_ended,
)
from rooms.db.secrets import (
    KEY_FILE,
    MAX_KEYS,
    PENDING_FILE,
    PRUNED_FILE,
    Cipher,
    key_id,
    new_secret_key,
    open_cipher,
    read_kept_keys,
    read_secret_keys,
    remove_kept_keys,
    replace_key_file,
)

if TYPE_CHECKING:
    from rooms.cli.output import Output
    from rooms.settings import Settings

Result = TypeVar("Result")

_LOCK: Final = 0x726F6F6B
_WRITERS_WAIT_S: Final = 60.0
_POLL_S: Final = 0.1
_PROGRESS_BATCHES: Final = 10
_MAX_PASSES: Final = 10
_UNNAMED: Final = "(unnamed)"
_UNCHANGED: Final = "Nothing was sealed with the new key, and it was removed again"

_TWO_KEYS: Final = (
    "ROOMS_SECRET_KEY holds one key, and rotating takes two. Make one with `openssl rand -base64 "
    "32`; restart all processes one by one with ROOMS_SECRET_KEY=OLD,NEW, then again with NEW,OLD; "
    "then run this with NEW,OLD"
)


@click.group("secret-key", cls=Group)
def secret_key() -> None:
    """Show and rotate the keys that seal secrets in the database. Never shows a key itself."""


@secret_key.command()
@pass_session
def status(session: CliSession) -> None:
    """Show the keys, and how many values each of them sealed.

    `seals`: seals what is new. `opens`: opens what it sealed. `missing`: what it sealed is held.
    """

    async def work(connection: Connection) -> tuple[Cipher, Mapping[str | None, int]]:
        return _open(session), await count_by_key(connection)

    cipher, counts = _run(session, work)
    rows = [
        {"key": name, "role": role, "values": counts.get(None if name == _UNNAMED else name, 0)}
        for name, role in _roles(cipher, counts)
    ]
    output = session.output()
    if output.as_json:
        output.document({"keys": rows})
        return
    output.table(
        ["key", "role", "values"], [[one["key"], one["role"], one["values"]] for one in rows]
    )


@secret_key.command()
@click.option(
    "--file-is-shared",
    is_flag=True,
    help="Processes on other hosts read the same file secret-key.",
)
@pass_session
def rotate(session: CliSession, /, *, file_is_shared: bool) -> None:
    """Seal everything again with a new key, while all processes run.

    Where the key is in the file secret-key, this adds a new key to it, which running processes read
    within seconds. Where it is in ROOMS_SECRET_KEY, the first of the keys there is the new one.
    Nothing is sealed with the new key before every running process opens with it, and nothing is
    sealed again before every one seals with it: a process that does not is named after a minute.
    Run it again after an interruption: it continues. The former key stays valid until `prune`.
    """
    settings = session.settings()
    output = session.output()

    async def work(
        connection: Connection,
    ) -> tuple[Cipher, RotationProgress, Mapping[str | None, int]]:
        _restore_pruned(settings, output)
        cipher = _open(session)
        counts = await count_by_key(connection)
        _refuse_missing(cipher, counts)
        if settings.secret_key is None:
            await _check_hosts(connection, is_shared=file_is_shared)
            await _add_key(connection, settings, cipher, counts, output)
        elif len(cipher.key_ids) == 1 and not _left(cipher, counts):
            raise CliError(_TWO_KEYS)
        await await_takeover(
            connection, cipher.key_ids[0], Use.SEAL, output, remedy=_remedy(settings)
        )
        await encrypt_plain_headers(connection, cipher)
        progress = await _reseal(connection, cipher, output)
        return cipher, progress, await count_by_key(connection)

    cipher, progress, counts = _run(session, work)
    left = _left(cipher, counts)
    if output.as_json:
        output.document(
            {
                "key": cipher.key_ids[0],
                "sealed_again": progress.subscriptions,
                "receipt_keys_sealed_again": progress.receipt_keys,
                "left": left,
                "unreadable": progress.unreadable,
            }
        )
    if left:
        raise CliError(_left_problem(left, progress))
    if not output.as_json:
        also = " and the key of receipts" if progress.receipt_keys else ""
        output.line(
            f"{progress.subscriptions} subscriptions{also} were sealed again with "
            f"{cipher.key_ids[0]}; nothing is left that another key sealed"
        )
    if settings.secret_key is None:
        output.note(
            f"back up {settings.data / KEY_FILE}. The former key opens older cursors and backups; "
            "`rooms secret-key prune` removes it"
        )
    else:
        output.note("the other keys can be removed from ROOMS_SECRET_KEY, process by process")


@secret_key.command()
@pass_session
def prune(session: CliSession) -> None:
    """Remove keys from the file secret-key with which nothing is sealed any more.

    It refuses while a running process seals with one of them.
    Backups of the database from before the rotation need them: keep a copy as long as those.
    """
    settings = session.settings()
    output = session.output()
    if settings.secret_key is not None:
        raise CliError("the keys are in ROOMS_SECRET_KEY: change that, and restart the processes")

    async def work(connection: Connection) -> Sequence[str]:
        _restore_pruned(settings, output)
        cipher = _open(session)
        keys = read_secret_keys(None, settings.data)
        if len(keys) == 1:
            await _refuse_left(connection, cipher)
            return []
        await await_takeover(
            connection, cipher.key_ids[0], Use.SEAL, output, remedy=_remedy(settings)
        )
        await _refuse_left(connection, cipher)
        # This process may be killed while it looks again.
        replace_key_file(settings.data, keys, name=PRUNED_FILE)
        replace_key_file(settings.data, keys[:1])
        try:
            # What a request had sealed before its process took the key over may be written later.
            await _refuse_left(connection, cipher)
        except BaseException:
            _restore_pruned(settings, output)
            raise
        remove_kept_keys(settings.data, PRUNED_FILE)
        remove_kept_keys(settings.data, PENDING_FILE)
        return [key_id(key) for key in keys[1:]]

    removed = _run(session, work)
    if output.as_json:
        output.document({"removed": removed})
    else:
        output.line(f"removed {', '.join(removed)}" if removed else "nothing to remove")


def _open(session: CliSession) -> Cipher:
    settings = session.settings()
    if settings.secret_key is None and not (settings.data / KEY_FILE).exists():
        raise CliError(
            f"there is no {settings.data / KEY_FILE}: set ROOMS_DATA or ROOMS_SECRET_KEY as the "
            "processes of the service have it"
        )
    return open_cipher(settings.secret_key, settings.data)


def _restore_pruned(settings: "Settings", output: "Output") -> None:
    """Put back the keys that a prune removed without being certain that none is needed."""
    if settings.secret_key is not None:
        return
    former = read_kept_keys(settings.data, PRUNED_FILE)
    if not former:
        return
    present = read_secret_keys(None, settings.data)
    replace_key_file(settings.data, [*present, *(key for key in former if key not in present)])
    remove_kept_keys(settings.data, PRUNED_FILE)
    output.note("the keys that an interrupted prune had removed are back")


def _roles(cipher: Cipher, counts: Mapping[str | None, int]) -> list[tuple[str, str]]:
    present = [(name, "opens" if place else "seals") for place, name in enumerate(cipher.key_ids)]
    missing = [
        (name, "missing") for name in sorted(filter(None, counts)) if name not in cipher.key_ids
    ]
    return [*present, *missing, *([(_UNNAMED, "opens")] if None in counts else [])]


def _left(cipher: Cipher, counts: Mapping[str | None, int]) -> int:
    return sum(count for name, count in counts.items() if name != cipher.key_ids[0])


async def _refuse_left(connection: Connection, cipher: Cipher) -> None:
    await _wait_for_writers(connection, await current_transaction(connection))
    if left := _left(cipher, await count_by_key(connection)):
        raise CliError(f"{left} values are sealed with other keys: run `rooms secret-key rotate`")


def _left_problem(left: int, progress: RotationProgress) -> str:
    problems = []
    if progress.unreadable_count:
        problems.append(
            f"no key opens those of {progress.unreadable_count} subscriptions: "
            f"{', '.join(progress.unreadable)}. Put their key back, or rotate their secrets and "
            "set their headers"
        )
    if progress.has_unreadable_receipt_key:
        problems.append(
            "no key opens the key of receipts. Put its key back, or run "
            "`rooms receipt-key rotate --replace-lost`"
        )
    if problems:
        return f"{left} values are left; {'; '.join(problems)}"
    return (
        f"{left} values were sealed with another key meanwhile: processes still seal with it. "
        "Restart those, and run this again"
    )


def _refuse_missing(cipher: Cipher, counts: Mapping[str | None, int]) -> None:
    if missing := [name for name in counts if name and name not in cipher.key_ids]:
        raise CliError(
            f"values are sealed with {', '.join(sorted(missing))}, which is not among the keys: "
            "put it back first, or rotate the secrets of the subscriptions that are held, and the "
            "key of receipts by `rooms receipt-key rotate --replace-lost`"
        )


async def _check_hosts(connection: Connection, *, is_shared: bool) -> None:
    others = {
        one.host for one in await sealing_processes(connection) if one.host != socket.gethostname()
    }
    if others and not is_shared:
        raise CliError(
            f"processes run on other hosts ({', '.join(sorted(others))}), which would not get the "
            "new key: use ROOMS_SECRET_KEY for all, or say --file-is-shared if they read this file"
        )


async def _add_key(
    connection: Connection,
    settings: "Settings",
    cipher: Cipher,
    counts: Mapping[str | None, int],
    output: "Output",
) -> None:
    """Make a new key the first one, unless an interrupted rotation has done that.

    It is the last one until every process opens with it. Nothing is sealed with it until then, so
    it can be taken back. A run that is killed leaves it to the next one.
    """
    keys = read_secret_keys(None, settings.data)
    pending = read_kept_keys(settings.data, PENDING_FILE)
    if pending and (pending[0] == keys[0] or counts.get(key_id(pending[0]))):
        remove_kept_keys(settings.data, PENDING_FILE)
        pending = []
    keys = [key for key in keys if key not in pending]
    is_full = len(keys) == MAX_KEYS
    if any(counts.get(name) for name in cipher.key_ids[1:]) or (is_full and _left(cipher, counts)):
        output.note(f"continuing the rotation to {cipher.key_ids[0]}")
        return
    if is_full:
        raise CliError(
            f"{settings.data / KEY_FILE} has {MAX_KEYS} keys, and takes no more: remove those that "
            "seal nothing by `rooms secret-key prune`"
        )
    new = pending[0] if pending else new_secret_key()
    replace_key_file(settings.data, [new], name=PENDING_FILE)
    replace_key_file(settings.data, [*keys, new])
    try:
        await await_takeover(
            connection, key_id(new), Use.OPEN, output, remedy=f"{_remedy(settings)}. {_UNCHANGED}"
        )
    except BaseException:
        replace_key_file(settings.data, keys)
        remove_kept_keys(settings.data, PENDING_FILE)
        raise
    replace_key_file(settings.data, [new, *keys])
    remove_kept_keys(settings.data, PENDING_FILE)
    cipher.reload()
    output.note(f"the new key is {cipher.key_ids[0]}")


def _remedy(settings: "Settings") -> str:
    if settings.secret_key is not None:
        return "Restart them with the same ROOMS_SECRET_KEY as here, and run this again"
    return (
        f"Let them read {settings.data / KEY_FILE} (their logs say what prevents it) or restart "
        "them, and run this again"
    )


async def _reseal(connection: Connection, cipher: Cipher, output: "Output") -> RotationProgress:
    """Seal again what other keys sealed, until a pass finds nothing."""
    total = RotationProgress()
    since = await current_transaction(connection)
    for number in range(_MAX_PASSES):
        found = RotationProgress()
        await reencrypt_receipt_keys(connection, cipher, found)
        batches = 0
        while await reencrypt_batch(connection, cipher, found):
            batches += 1
            if batches % _PROGRESS_BATCHES == 0:
                output.note(f"{total.subscriptions + found.subscriptions} sealed again")
        total.subscriptions += found.subscriptions
        total.receipt_keys += found.receipt_keys
        total.unreadable, total.unreadable_count = found.unreadable, found.unreadable_count
        total.has_unreadable_receipt_key = found.has_unreadable_receipt_key
        if number == 0:
            # One that began before may write what it sealed with the former key.
            await _wait_for_writers(connection, since)
        elif not (found.subscriptions or found.receipt_keys):
            break
    return total


async def _wait_for_writers(connection: Connection, since: int) -> None:
    try:
        async with asyncio.timeout(_WRITERS_WAIT_S):
            while not await writers_ended(connection, since):  # noqa: ASYNC110 - in PostgreSQL
                await asyncio.sleep(_POLL_S)
    except TimeoutError as exc:
        raise CliError(
            f"a transaction has been writing for more than {_WRITERS_WAIT_S:.0f} s: run this again "
            "when it has ended"
        ) from exc


def _run(session: CliSession, work: Callable[[Connection], Awaitable[Result]]) -> Result:
    database_url = session.wait_for_database_url()

    async def within() -> Result:
        with _cancelling_at_sigterm():
            async with _locked(database_url) as connection:
                return await work(connection)

    try:
        return asyncio.run(within())
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    except SCHEMA_MISSING as exc:
        raise CliError("the database has an older schema: run `rooms migrate`") from exc
    except psycopg.Error as exc:
        raise CliError(f"the database: {str(exc).strip()}") from exc


@contextmanager
def _cancelling_at_sigterm() -> Iterator[None]:
    """Cancel the task at SIGTERM as asyncio does at SIGINT: it puts the file in order, and ends."""
    task = asyncio.current_task()
    if task is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@asynccontextmanager
async def _locked(url: str) -> AsyncIterator[Connection]:
    async with open_connection(url, name="rooms secret-key") as connection:
        cursor = await connection.execute("SELECT pg_try_advisory_lock(%s)", (_LOCK,))
        row = await cursor.fetchone()
        if row is None or not row[0]:
            raise CliError("another `rooms secret-key` is running")
        yield connection
