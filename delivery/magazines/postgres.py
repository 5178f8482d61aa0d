"""PostgreSQL as the store of magazines: the embedded default, under the same contract as any other.

Differs from the port in nothing. What is claimed (fire, take, sweep) is committed without waiting for the disk: after a
crash of PostgreSQL it may be handed out once more, as it may after a crash of whoever had it.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from types import TracebackType
from typing import Any, Final, Self

from delivery.magazines import statements
from rooms.domain.magazine import (
    DEFAULT_SHARDS,
    MAX_BATCH,
    Entry,
    HandlerQueue,
    MagazineName,
    MagazineState,
    ShardState,
    Slot,
    Stored,
    Sweep,
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
from rooms.storage.literals import array, bytes_array, numbers, text_array
from rooms.storage.writer import Writer

_CONNECTIONS: Final = 3
_SHARDS_AT_A_TIME: Final = 32
_FEW: Final = 32
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Row = tuple[Any, ...]


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (StorageUnavailableError, StorageRefusedError) as exc:
        raise MagazineUnavailableError(str(exc)) from exc


def _time(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)


def _stored(row: Row) -> Stored:
    shard, pointer, identity, body, generation, shovels, reason, detail, expires_us, loaded_us, fired_us = row
    return Stored(
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


def _entries(rows: Sequence[Row]) -> list[Stored]:
    return sorted((_stored(row) for row in rows if row[0] is not None), key=lambda stored: stored.slot)


def _arrays(entries: Sequence[Entry]) -> dict[str, Any]:
    return {
        "id": text_array(entry.id for entry in entries),
        "body": bytes_array(entry.body for entry in entries),
        "generation": numbers(entry.generation for entry in entries),
        "shovels": numbers(entry.shovels for entry in entries),
        "reason": text_array(entry.reason for entry in entries),
        "detail": text_array(entry.detail for entry in entries),
        "expires_at": array(entry.expires_at and entry.expires_at.isoformat() for entry in entries),
    }


def _slots(slots: Sequence[Slot]) -> dict[str, str]:
    # In one order everywhere, so that no two statements wait for each other.
    ordered = sorted(set(slots))
    return {"shard": numbers(slot.shard for slot in ordered), "pointer": numbers(slot.pointer for slot in ordered)}


def _check(count: int) -> None:
    if count > MAX_BATCH:
        raise ValueError(f"{count} in one call; {MAX_BATCH} at most")


class _Writers:
    """A few connections that statements take turns on."""

    def __init__(self, url: str, *, durable: bool) -> None:
        self._writers = [Writer(url, kind="magazine", durable=durable) for _ in range(_CONNECTIONS)]
        self._free = list(self._writers)
        # A semaphore is fair; a queue of connections would give one back to whoever has just put it there.
        self._turn = asyncio.Semaphore(_CONNECTIONS)

    async def run(self, statement: str, parameters: dict[str, Any]) -> list[Row]:
        async with self._turn:
            writer = self._free.pop()
            try:
                with _translated():
                    return await writer.run(statement, parameters)
            finally:
                self._free.append(writer)

    async def close(self) -> None:
        for writer in self._writers:
            await writer.close()


class PostgresMagazine:
    """`rooms.magazines.Magazine` in PostgreSQL."""

    def __init__(
        self,
        name: MagazineName,
        row: Row,
        *,
        kept: _Writers,
        claimed: _Writers,
        loads: Iterator[int],
        fires: Iterator[int],
    ) -> None:
        """`kept` waits for the disk, `claimed` does not; `loads` and `fires` say which shard is next."""
        self.name = name
        self._id, self.shards, self._expires = row[:3]
        self._kept = kept
        self._claimed = claimed
        self._loads = loads
        self._fires = fires

    def _with(self, **more: Any) -> dict[str, Any]:
        return {"magazine": self._id, "expires": self._expires, **more}

    def _missing(self) -> MagazineMissingError:
        return MagazineMissingError(f"there is no magazine {self.name} any more")

    async def load(self, entries: Sequence[Entry]) -> Sequence[Slot]:
        """One statement; it stands whole or not at all."""
        _check(len(entries))
        if not entries:
            return []
        shard = next(self._loads) % self.shards
        rows = await self._kept.run(
            statements.LOAD_ENTRIES, self._with(shard=shard, count=len(entries)) | _arrays(entries)
        )
        if not rows:
            raise self._missing()
        return [Slot(shard, rows[0][0] + at) for at in range(len(entries))]

    async def fire(self, limit: int = 1) -> Sequence[Stored]:
        """From shards that nobody else fires from; only where there are none, from those that are free next."""
        _check(limit)
        taken: list[Stored] = []
        free = True
        while len(taken) < limit:
            wanted = limit - len(taken)
            rows = await self._claimed.run(
                statements.FIRE_FREE if free else statements.FIRE_ANY,
                self._with(
                    turn=next(self._fires),
                    shards=self.shards,
                    # Who waits for a shard holds no other: nobody waits in a circle.
                    most=_SHARDS_AT_A_TIME if free and wanted >= _FEW else 1,
                    limit=wanted,
                ),
            )
            found = _entries(rows)
            taken += found
            picked, seen = next((row[4], row[8]) for row in rows if row[0] is None)
            if not picked and (taken or not seen):
                break
            free = bool(picked)
        return taken

    async def take(self, slots: Sequence[Slot], *, older_than_s: float | None = None) -> Sequence[Stored]:
        """As the port says."""
        _check(len(slots))
        return _entries(await self._claimed.run(statements.TAKE, self._with(older=older_than_s) | _slots(slots)))

    async def find(self, slots: Sequence[Slot]) -> Sequence[Stored]:
        """As the port says."""
        _check(len(slots))
        return _entries(await self._claimed.run(statements.FIND, self._with() | _slots(slots)))

    async def peek(self, limit: int, *, after: Slot | None = None) -> Sequence[Stored]:
        """As the port says."""
        _check(limit)
        start = after or Slot(-1, 0)
        return _entries(
            await self._claimed.run(statements.PEEK, self._with(shard=start.shard, pointer=start.pointer, limit=limit))
        )

    async def delete(self, slots: Sequence[Slot], *, swept: bool = False) -> Sequence[Slot]:
        """As the port says."""
        _check(len(slots))
        rows = await self._kept.run(statements.DELETE, self._with(swept=swept) | _slots(slots))
        return [Slot(shard, pointer) for shard, pointer in rows]

    async def reload(self, taken: Sequence[Stored]) -> Sequence[Slot | None]:
        """One statement: an entry never stands in both."""
        _check(len(taken))
        if not taken:
            return []
        shard = next(self._loads) % self.shards
        rows = await self._kept.run(
            statements.RELOAD,
            self._with(
                shard=shard,
                count=len(taken),
                shards=numbers(stored.slot.shard for stored in taken),
                pointers=numbers(stored.slot.pointer for stored in taken),
            )
            | _arrays([stored.entry for stored in taken]),
        )
        if not rows:
            raise self._missing()
        done = {at: first for first, at in rows}
        return [Slot(shard, done[at] + at) if at in done else None for at in range(len(taken))]

    async def sweep(self, shard: int, *, epoch: int, older_than_s: float, limit: int = MAX_BATCH) -> Sweep:
        """One statement. What has expired goes here."""
        _check(limit)
        rows = await self._claimed.run(
            statements.SWEEP_SHARD, self._with(shard=shard, epoch=epoch, older=older_than_s, limit=limit)
        )
        _, pointer, _, _, looked, *_, held, young, _ = next(row for row in rows if row[0] is None)
        if held is None:
            raise self._missing()
        if pointer is None:
            raise StaleEpochError(f"shard {shard} of {self.name} is swept under epoch {held}, not {epoch}")
        return Sweep(taken=_entries(rows), pointer=pointer, more=looked == limit and young is None)

    async def state(self) -> MagazineState:
        """As the port says; nothing is ever in doubt."""
        rows = await self._claimed.run(statements.STATE, self._with())
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
        """As the port says, in one statement."""
        found, there = (await self._claimed.run(statements.COUNT, self._with()))[0]
        if not there:
            raise self._missing()
        return int(found)


class PostgresMagazines:
    """`rooms.magazines.Magazines` in PostgreSQL; farm and client are those of the database itself."""

    def __init__(self, url: str, *, start: int = 0) -> None:
        """`start`: which shard to begin with, so that processes begin with different ones."""
        self._kept = _Writers(url, durable=True)
        self._claimed = _Writers(url, durable=False)
        self._loads = count(start)
        self._fires = count(start)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._kept.close()
        await self._claimed.close()

    async def check(self) -> None:
        await self._kept.run("SELECT 0", {})

    async def _row(self, name: MagazineName) -> Row | None:
        rows = await self._kept.run(statements.OPEN, {"name": name})
        return rows[0] if rows else None

    async def create(
        self, name: MagazineName, *, shards: int = DEFAULT_SHARDS, expires: bool = False, beginning: int = 0
    ) -> PostgresMagazine:
        """One statement, after which it is there whole."""
        check_shards(shards)
        row = await self._row(name)
        if row is not None and not row[3]:
            await self._drop(row)  # a drop was broken off
            row = None
        if row is None:
            await self._kept.run(
                statements.CREATE, {"name": name, "shards": shards, "expires": expires, "beginning": beginning}
            )
        magazine = await self.open(name)
        if magazine.shards != shards:
            raise ConflictError(f"the magazine {name} is there, with {magazine.shards} shards and not {shards}")
        return magazine

    async def open(self, name: MagazineName) -> PostgresMagazine:
        """As the port says."""
        row = await self._row(name)
        if row is None or not row[3]:
            raise MagazineMissingError(f"there is no magazine {name}")
        return PostgresMagazine(name, row, kept=self._kept, claimed=self._claimed, loads=self._loads, fires=self._fires)

    async def drop(self, name: MagazineName) -> bool:
        """In steps of 10,000 entries; broken off, it is taken up by the next drop or create."""
        row = await self._row(name)
        if row is None:
            return False
        await self._drop(row)
        return True

    async def _drop(self, row: Row) -> None:
        one = {"magazine": row[0]}
        await self._kept.run(statements.DROP_POINTERS, one)
        while (await self._kept.run(statements.DROP_ENTRIES, one))[0][0]:
            pass
        await self._kept.run(statements.DROP_MAGAZINE, one)

    async def keep_queue(self, queue: HandlerQueue) -> None:
        """One row; it never expires by itself."""
        fields = {name: getattr(queue, name) for name in HandlerQueue.__dataclass_fields__}
        await self._kept.run(statements.KEEP_QUEUE, fields)

    async def queues(self, *, active: bool = True) -> Sequence[HandlerQueue]:
        """As the port says."""
        rows = await self._kept.run(statements.QUEUES, {"active": active})
        names = (
            "name", "handler_type", "active", "shards", "queue_expiry_s", "message_expiry_s", "concurrency",
            "shovel_concurrency", "shovel_interval_s", "sweep_duration_s", "max_batch", "max_wait_s",
        )  # fmt: skip
        return [HandlerQueue(**dict(zip(names, row[:-1], strict=True)), created_at=_time(row[-1])) for row in rows]

    async def forget_queue(self, name: str) -> bool:
        """As the port says."""
        return bool((await self._kept.run(statements.FORGET_QUEUE, {"name": name}))[0][0])
