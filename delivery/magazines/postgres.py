"""Store magazines in PostgreSQL, the default.

Claims (fire, take, sweep) are committed without waiting for the disk. After a crash of PostgreSQL
an entry may be handed out again, as after a crash of its consumer.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final, Self

from delivery.magazines import postgres_sql
from rooms.db.pg_arrays import bytes_array, literal_array, number_array, text_array
from rooms.db.writer import LogWriter
from rooms.domain.magazine import (
    DEFAULT_SHARDS,
    MAX_BATCH,
    MAX_BATCH_BYTES,
    Entry,
    HandlerQueueRecord,
    MagazineName,
    MagazineState,
    ShardState,
    Slot,
    StoredEntry,
    SweepBatch,
    check_shards,
)
from rooms.errors import (
    ConflictError,
    MagazineMissingError,
    MagazineUnavailableError,
    StaleEpochError,
    StorageRefusedError,
    StorageUnavailableError,
)

_CONNECTIONS: Final = 3
_MAX_SHARDS_PER_CALL: Final = 32
_MANY_ENTRIES: Final = 32
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Row = tuple[Any, ...]


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except (StorageUnavailableError, StorageRefusedError) as exc:
        raise MagazineUnavailableError(str(exc)) from exc


def _time(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)


def _to_stored_entry(row: Row) -> StoredEntry:
    (
        shard,
        pointer,
        identity,
        body,
        generation,
        shovels,
        reason,
        detail,
        expires_us,
        loaded_us,
        fired_us,
    ) = row
    return StoredEntry(
        slot=Slot(shard, pointer),
        entry=Entry(
            id=identity,
            body=body,
            generation=generation,
            shovels=shovels,
            reason=reason,
            detail=detail,
            expires_at=None if expires_us is None else _time(expires_us),
        ),
        loaded_at=_time(loaded_us),
        fire_ts=None if fired_us is None else _time(fired_us),
    )


def _to_sorted_entries(rows: Sequence[Row]) -> list[StoredEntry]:
    return sorted(
        (_to_stored_entry(row) for row in rows if row[0] is not None),
        key=lambda stored: stored.slot,
    )


def _entry_arrays(entries: Sequence[Entry]) -> dict[str, Any]:
    return {
        "id": text_array(entry.id for entry in entries),
        "body": bytes_array(entry.body for entry in entries),
        "generation": number_array(entry.generation for entry in entries),
        "shovels": number_array(entry.shovels for entry in entries),
        "reason": text_array(entry.reason for entry in entries),
        "detail": text_array(entry.detail for entry in entries),
        "expires_at": literal_array(
            entry.expires_at and entry.expires_at.isoformat() for entry in entries
        ),
    }


def _slot_arrays(slots: Sequence[Slot]) -> dict[str, str]:
    # In one order everywhere, so that no two statements deadlock.
    ordered = sorted(set(slots))
    return {
        "shard": number_array(slot.shard for slot in ordered),
        "pointer": number_array(slot.pointer for slot in ordered),
    }


def _check_batch(count: int) -> None:
    if count > MAX_BATCH:
        raise ValueError(f"{count} in one call; {MAX_BATCH} at most")


class _ConnectionPool:
    """Share a few connections among statements."""

    def __init__(self, url: str, *, durable: bool) -> None:
        self._writers = [
            LogWriter(url, kind="magazine", durable=durable) for _ in range(_CONNECTIONS)
        ]
        self._free = list(self._writers)
        # A semaphore is fair; a queue would give a connection back to the task that returned it.
        self._slots = asyncio.Semaphore(_CONNECTIONS)

    async def run(self, statement: str, parameters: dict[str, Any]) -> list[Row]:
        async with self._slots:
            writer = self._free.pop()
            try:
                with _translate_errors():
                    return await writer.run(statement, parameters)
            finally:
                self._free.append(writer)

    async def close(self) -> None:
        for writer in self._writers:
            await writer.close()


class PostgresMagazine:
    """Implement `rooms.ports.Magazine` in PostgreSQL."""

    def __init__(
        self,
        name: MagazineName,
        row: Row,
        *,
        durable: _ConnectionPool,
        relaxed: _ConnectionPool,
        loads: Iterator[int],
        fires: Iterator[int],
    ) -> None:
        """Create it; `durable` waits for the disk; `loads` and `fires` choose the next shard."""
        self.name = name
        self._id, self.shards, self._expires = row[:3]
        self._durable = durable
        self._relaxed = relaxed
        self._loads = loads
        self._fires = fires

    def _parameters(self, **more: Any) -> dict[str, Any]:
        return {"magazine": self._id, "expires": self._expires, **more}

    def _missing(self) -> MagazineMissingError:
        return MagazineMissingError(f"the magazine {self.name} does not exist any more")

    async def load(self, entries: Sequence[Entry]) -> Sequence[Slot]:
        """Load in one statement: all entries or none."""
        _check_batch(len(entries))
        if not entries:
            return []
        shard = next(self._loads) % self.shards
        rows = await self._durable.run(
            postgres_sql.LOAD_ENTRIES,
            self._parameters(shard=shard, count=len(entries)) | _entry_arrays(entries),
        )
        if not rows:
            raise self._missing()
        return [Slot(shard, rows[0][0] + at) for at in range(len(entries))]

    async def fire(
        self, limit: int = 1, *, below: Mapping[int, int] | None = None
    ) -> Sequence[StoredEntry]:
        """Fire from shards without another firer, or else wait for the next free shard."""
        _check_batch(limit)
        if below is None:
            fire_free, fire_any, bound = postgres_sql.FIRE_FREE, postgres_sql.FIRE_ANY, {}
        else:
            fire_free, fire_any = postgres_sql.FIRE_FREE_BELOW, postgres_sql.FIRE_ANY_BELOW
            bound = {"below": number_array(below.get(at, 0) for at in range(self.shards))}
        taken: list[StoredEntry] = []
        size, free = 0, True
        while len(taken) < limit and size < MAX_BATCH_BYTES:
            wanted = limit - len(taken)
            rows = await self._relaxed.run(
                fire_free if free else fire_any,
                self._parameters(
                    turn=next(self._fires),
                    shards=self.shards,
                    # A call that waits for a shard holds no other, so that there is no deadlock.
                    most=_MAX_SHARDS_PER_CALL if free and wanted >= _MANY_ENTRIES else 1,
                    limit=wanted,
                    bytes=MAX_BATCH_BYTES - size,
                    **bound,
                ),
            )
            found = _to_sorted_entries(rows)
            taken += found
            size += sum(len(one.entry.body) for one in found)
            picked, seen = next((row[4], row[8]) for row in rows if row[0] is None)
            if not picked and (taken or not seen):
                break
            free = bool(picked)
        return taken

    async def take(
        self, slots: Sequence[Slot], *, older_than_s: float | None = None
    ) -> Sequence[StoredEntry]:
        """Do as the port says."""
        _check_batch(len(slots))
        return _to_sorted_entries(
            await self._relaxed.run(
                postgres_sql.TAKE, self._parameters(older=older_than_s) | _slot_arrays(slots)
            )
        )

    async def find(self, slots: Sequence[Slot]) -> Sequence[StoredEntry]:
        """Do as the port says."""
        _check_batch(len(slots))
        return _to_sorted_entries(
            await self._relaxed.run(postgres_sql.FIND, self._parameters() | _slot_arrays(slots))
        )

    async def peek(self, limit: int, *, after: Slot | None = None) -> Sequence[StoredEntry]:
        """Do as the port says."""
        _check_batch(limit)
        start = after or Slot(-1, 0)
        return _to_sorted_entries(
            await self._relaxed.run(
                postgres_sql.PEEK,
                self._parameters(shard=start.shard, pointer=start.pointer, limit=limit),
            )
        )

    async def peek_slots(self, limit: int, *, after: Slot | None = None) -> Sequence[Slot]:
        """Do as the port says."""
        _check_batch(limit)
        start = after or Slot(-1, 0)
        rows = await self._relaxed.run(
            postgres_sql.PEEK_SLOTS,
            self._parameters(shard=start.shard, pointer=start.pointer, limit=limit),
        )
        return sorted(Slot(shard, pointer) for shard, pointer in rows)

    async def delete(self, slots: Sequence[Slot], *, swept: bool = False) -> Sequence[Slot]:
        """Do as the port says."""
        _check_batch(len(slots))
        rows = await self._durable.run(
            postgres_sql.DELETE, self._parameters(swept=swept) | _slot_arrays(slots)
        )
        return [Slot(shard, pointer) for shard, pointer in rows]

    async def reload(self, taken: Sequence[StoredEntry]) -> Sequence[Slot | None]:
        """Move in one statement: an entry is never in both slots."""
        _check_batch(len(taken))
        if not taken:
            return []
        shard = next(self._loads) % self.shards
        rows = await self._durable.run(
            postgres_sql.RELOAD,
            self._parameters(
                shard=shard,
                count=len(taken),
                shards=number_array(stored.slot.shard for stored in taken),
                pointers=number_array(stored.slot.pointer for stored in taken),
            )
            | _entry_arrays([stored.entry for stored in taken]),
        )
        if not rows:
            raise self._missing()
        done = {at: first for first, at in rows}
        return [Slot(shard, done[at] + at) if at in done else None for at in range(len(taken))]

    async def sweep(
        self, shard: int, *, epoch: int, older_than_s: float, limit: int = MAX_BATCH
    ) -> SweepBatch:
        """Sweep in one statement, which also deletes expired entries."""
        _check_batch(limit)
        rows = await self._relaxed.run(
            postgres_sql.SWEEP_SHARD,
            self._parameters(
                shard=shard,
                epoch=epoch,
                older=older_than_s,
                limit=limit,
                bytes=MAX_BATCH_BYTES,
            ),
        )
        _, pointer, _, _, scanned, *_, held, young, _ = next(row for row in rows if row[0] is None)
        if held is None:
            raise self._missing()
        if pointer is None:
            raise StaleEpochError(
                f"shard {shard} of {self.name} is swept under epoch {held}, not {epoch}"
            )
        return SweepBatch(
            entries=_to_sorted_entries(rows),
            pointer=pointer,
            is_full=scanned == limit and young is None,
        )

    async def state(self) -> MagazineState:
        """Do as the port says; every counter is exact."""
        rows = await self._relaxed.run(postgres_sql.STATE, self._parameters())
        if not rows:
            raise self._missing()
        return MagazineState(
            name=self.name,
            shards=tuple(
                ShardState(
                    shard=row[0],
                    load_pointer=row[1],
                    fire_pointer=row[2],
                    sweep_pointer=row[3],
                    epoch=row[4],
                    loaded=row[5],
                    fired=row[6],
                    deleted=row[7],
                    reloaded=row[8],
                )
                for row in rows
            ),
            swept=sum(row[9] for row in rows),
        )

    async def count(self) -> int:
        """Count in one statement."""
        found, exists = (await self._relaxed.run(postgres_sql.COUNT, self._parameters()))[0]
        if not exists:
            raise self._missing()
        return int(found)

    async def oldest_loaded_at(self) -> datetime | None:
        """Look in one statement."""
        rows = await self._relaxed.run(postgres_sql.OLDEST, self._parameters())
        return _time(rows[0][0]) if rows else None


class PostgresMagazines:
    """Implement `rooms.ports.Magazines` in PostgreSQL; farm and client are the database's own."""

    def __init__(self, url: str, *, start: int = 0) -> None:
        """Create them; `start`: the first shard, which should differ between processes."""
        self._durable = _ConnectionPool(url, durable=True)
        self._relaxed = _ConnectionPool(url, durable=False)
        self._loads = count(start)
        self._fires = count(start)
        # A step may take seconds: those of several drops take turns on one connection.
        self._drop_turns = asyncio.Semaphore(1)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._durable.close()
        await self._relaxed.close()

    async def check(self) -> None:
        await self._durable.run("SELECT 0", {})

    async def _row(self, name: MagazineName) -> Row | None:
        rows = await self._durable.run(postgres_sql.OPEN, {"name": name})
        return rows[0] if rows else None

    async def create(
        self,
        name: MagazineName,
        *,
        shards: int = DEFAULT_SHARDS,
        expires: bool = False,
        first_pointer: int = 0,
    ) -> PostgresMagazine:
        """Create in one statement."""
        check_shards(shards)
        row = await self._row(name)
        if row is not None and not row[3]:
            await self._drop_steps(row)  # an earlier drop was interrupted
            row = None
        if row is None:
            await self._durable.run(
                postgres_sql.CREATE,
                {"name": name, "shards": shards, "expires": expires, "beginning": first_pointer},
            )
        magazine = await self.open(name)
        if magazine.shards != shards:
            raise ConflictError(
                f"the magazine {name} exists with {magazine.shards} shards, not {shards}"
            )
        return magazine

    async def open(self, name: MagazineName) -> PostgresMagazine:
        """Do as the port says."""
        row = await self._row(name)
        if row is None or not row[3]:
            raise MagazineMissingError(f"there is no magazine {name}")
        return PostgresMagazine(
            name,
            row,
            durable=self._durable,
            relaxed=self._relaxed,
            loads=self._loads,
            fires=self._fires,
        )

    async def drop(self, name: MagazineName) -> bool:
        """Drop in steps of 1,000 entries; the next drop or create completes an interrupted one."""
        row = await self._row(name)
        if row is None:
            return False
        await self._drop_steps(row)
        return True

    async def _drop_steps(self, row: Row) -> None:
        one = {"magazine": row[0]}
        await self._durable.run(postgres_sql.DROP_POINTERS, one)
        last: Row | None = (-1, 0)
        while last is not None:
            step = one | {"shard": last[0], "pointer": last[1]}
            async with self._drop_turns:
                rows = await self._durable.run(postgres_sql.DROP_ENTRIES, step)
            last = next(iter(rows), None)
        await self._durable.run(postgres_sql.DROP_MAGAZINE, one)

    async def save_queue_record(self, queue: HandlerQueueRecord) -> None:
        """Write one row, which never expires by itself."""
        fields = {name: getattr(queue, name) for name in HandlerQueueRecord.__dataclass_fields__}
        await self._durable.run(postgres_sql.KEEP_QUEUE, fields)

    async def list_queue_records(self, *, active: bool = True) -> Sequence[HandlerQueueRecord]:
        """Do as the port says."""
        rows = await self._durable.run(postgres_sql.QUEUES, {"active": active})
        names = (
            "name",
            "handler_type",
            "active",
            "shards",
            "queue_expiry_s",
            "message_expiry_s",
            "concurrency",
            "shovel_concurrency",
            "shovel_interval_s",
            "sweep_duration_s",
            "max_batch",
            "max_wait_s",
        )
        return [
            HandlerQueueRecord(**dict(zip(names, row[:-1], strict=True)), created_at=_time(row[-1]))
            for row in rows
        ]

    async def delete_queue_record(self, name: str) -> bool:
        """Do as the port says."""
        return bool((await self._durable.run(postgres_sql.FORGET_QUEUE, {"name": name}))[0][0])
