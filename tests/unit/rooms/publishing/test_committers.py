"""Test that requests which wait for locks of others let no further ones wait."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from rooms.db.pg_arrays import NULL_ELEMENT
from rooms.db.publish.insert import NO_CONFLICT, InsertConflict
from rooms.db.publish.request_rows import CallerId, InsertRows
from rooms.domain.ids import OrganisationId, RoomId
from rooms.errors import LockTimeoutError, StorageRefusedError, StorageUnavailableError
from rooms.publishing.commit_outcomes import CommitOutcome
from rooms.publishing.committers import CONTENDED_S, Committers
from rooms.publishing.group_commit import LARGE_ROWS, GroupCommitter

OURS, THEIRS = RoomId(1), RoomId(2)


def a_request(
    room: RoomId = OURS, *, key: str | None = None, rows: int = 1, organisation: str = ""
) -> InsertRows:
    found = InsertRows(room, 1)
    found.key, found.request_hash, found.answer = key, b"hash", b"answer"
    found.organisation = OrganisationId(organisation or f"of {room}")
    found.row_count = rows
    return found


@dataclass
class Store:
    """Write groups, but those with a room that is locked wait in vain."""

    locked: set[RoomId] = field(default_factory=set)
    written: list[InsertRows] = field(default_factory=list)
    waits: int = 0
    open: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, group: Sequence[InsertRows]) -> InsertConflict:
        await self.open.wait()
        if any(one.room_id in self.locked for one in group):
            self.waits += 1
            raise LockTimeoutError("canceling statement due to lock timeout")
        self.written += group
        return NO_CONFLICT


@dataclass
class Place:
    """Hold committers, with what each has written."""

    committers: Committers
    stores: dict[str, Store]
    now_s: list[float]

    def locks(self, *rooms: RoomId) -> None:
        for name, store in self.stores.items():
            store.locked = set() if name == "contended" else set(rooms)

    def name_of(self, rows: InsertRows) -> str:
        chosen = self.committers.choose(rows)
        return next(name for name in self.stores if getattr(self.committers, name) is chosen)


@asynccontextmanager
async def opened() -> AsyncIterator[Place]:
    """Open committers in the order of the service: the one for contended rooms closes last."""
    stores = {name: Store() for name in ("plain", "keyed", "large", "contended")}
    for store in stores.values():
        store.open.set()
    now_s = [100.0]

    def elsewhere(room: RoomId) -> GroupCommitter:
        return place.committers.choose_for_contended(room)

    def committer(name: str) -> GroupCommitter:
        own = None if name in {"plain", "contended"} else elsewhere
        return GroupCommitter(
            stores[name],
            on_commit=lambda _: None,
            choose_for_contended=own,
            is_contended=name == "contended",
        )

    async with (
        committer("contended") as contended,
        committer("large") as large,
        committer("keyed") as keyed,
        committer("plain") as plain,
    ):
        committers = Committers(
            plain=plain,
            keyed=keyed,
            large=large,
            contended=contended,
            monotonic=lambda: now_s[0],
        )
        place = Place(committers, stores, now_s)
        yield place


async def test_requests_go_apart_by_what_they_wait_for() -> None:
    with_id, ordered = a_request(), a_request()
    with_id.caller_ids = [CallerId("mine", bytes(20), b"hash", b"answer")]
    ordered.delivery_ordering = [(NULL_ELEMENT,)]
    async with opened() as place:
        for rows, name in (
            (a_request(), "plain"),
            (a_request(key="k"), "keyed"),
            (with_id, "keyed"),
            (ordered, "keyed"),
            (a_request(rows=LARGE_ROWS + 1), "large"),
            (a_request(key="k", rows=LARGE_ROWS + 1), "large"),
        ):
            assert place.name_of(rows) == name


@pytest.mark.parametrize("rows", [1, LARGE_ROWS + 1])
async def test_a_request_that_waits_for_a_lock_lets_no_other_room_wait(rows: int) -> None:
    """Only its own room's go elsewhere, for some seconds, and all are written."""
    async with opened() as place:
        place.locks(OURS)
        name = place.name_of(a_request(key="k", rows=rows))
        shared = place.stores[name]
        shared.open.clear()
        waiting = [
            asyncio.create_task(place.committers.choose(one).submit(one))
            for one in (
                a_request(THEIRS, key="first", rows=rows),
                *(
                    a_request(room, key=f"{n}", rows=rows)
                    for n in range(3)
                    for room in (OURS, THEIRS)
                ),
            )
        ]
        await asyncio.sleep(0)
        shared.open.set()
        assert await asyncio.gather(*waiting) == [None] * 7
        assert {one.room_id for one in shared.written} == {THEIRS}
        assert [one.room_id for one in place.stores["contended"].written] == [OURS] * 3
        assert shared.waits == 2
        assert place.name_of(a_request(key="again")) == "contended"
        assert place.name_of(a_request()) == "plain"
        assert place.name_of(a_request(THEIRS, key="again")) == "keyed"
        place.now_s[0] += CONTENDED_S
        assert place.name_of(a_request(key="again")) == "keyed"


@pytest.mark.parametrize("error", [StorageUnavailableError("gone"), StorageRefusedError("full")])
async def test_the_other_committer_decides_about_what_it_got(error: Exception) -> None:
    async with opened() as place:
        place.locks(OURS)
        contended = place.stores["contended"]

        async def fail(_group: Sequence[InsertRows]) -> InsertConflict:
            raise error

        place.committers.contended._write = fail
        with pytest.raises(type(error), match=str(error)):
            await place.committers.keyed.submit(a_request(key="k"))
        assert not contended.written


async def test_what_waits_elsewhere_is_written_before_the_committers_are_closed() -> None:
    """So is a request with the same key behind it, where the first one fails."""
    async with opened() as place:
        place.locks(OURS)
        contended = place.stores["contended"]
        contended.open.clear()
        keyed = place.committers.keyed
        first, behind = (asyncio.create_task(keyed.submit(a_request(key="k"))) for _ in range(2))
        other = asyncio.create_task(keyed.submit(a_request(THEIRS, key="k")))
        assert await other is None
        asyncio.get_running_loop().call_later(0.05, contended.open.set)
    assert await first is None
    assert (await behind).answer == b"answer"  # type: ignore[union-attr]
    assert [one.room_id for one in contended.written] == [OURS]


async def submitted_together(
    committer: GroupCommitter, store: Store, requests: Sequence[InsertRows]
) -> list[asyncio.Task[CommitOutcome]]:
    """Submit requests that wait while the first one is written: the others are one group."""
    store.open.clear()
    tasks = []
    for one in requests:
        tasks.append(asyncio.create_task(committer.submit(one)))
        await asyncio.sleep(0)
    store.open.set()
    return tasks


async def test_an_organisation_with_many_locked_rooms_delays_others_as_one_with_a_few() -> None:
    rooms = [RoomId(number) for number in range(10, 60)]
    async with opened() as place:
        place.locks(*rooms)
        keyed = place.stores["keyed"]
        tasks = await submitted_together(
            place.committers.keyed,
            keyed,
            [
                a_request(THEIRS, key="first"),
                *(a_request(room, key="k", organisation="ours") for room in rooms),
                a_request(THEIRS, key="last"),
            ],
        )
        assert await asyncio.gather(*tasks) == [None] * 52
        assert keyed.waits == 4, "the group, its organisation, and two rooms"
        assert [one.room_id for one in keyed.written] == [THEIRS] * 2
        assert {one.room_id for one in place.stores["contended"].written} == set(rooms)


@pytest.mark.parametrize(
    ("error", "writes"), [(StorageUnavailableError("gone"), 1), (StorageRefusedError("full"), 3)]
)
async def test_an_outage_after_a_lock_ends_all_requests_at_once(
    error: Exception, writes: int
) -> None:
    async with opened() as place:
        tried: list[int] = []

        async def write(group: Sequence[InsertRows]) -> InsertConflict:
            tried.append(len(group))
            raise LockTimeoutError("a lock") if len(tried) == 1 else error

        place.committers.keyed._write = write
        tasks = [
            asyncio.create_task(place.committers.keyed.submit(a_request(RoomId(number), key="k")))
            for number in range(50)
        ]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert found == [error] * 50
        assert tried == [50, *[1] * writes]


async def test_requests_of_a_room_stay_in_order_where_one_waits_for_a_lock() -> None:
    """Those behind it go with it, so that none which comes later is written before them."""
    async with opened() as place:
        place.locks(OURS)
        keyed = place.stores["keyed"]
        tasks = await submitted_together(
            place.committers.keyed, keyed, [a_request(key=f"{number}") for number in range(2)]
        )
        # The first group has one: the second request waits until it was written in vain.
        while place.name_of(a_request(key="x")) == "keyed":  # noqa: ASYNC110 - a decision
            await asyncio.sleep(0)
        for number in range(2, 4):
            later = a_request(key=f"{number}")
            tasks.append(asyncio.create_task(place.committers.choose(later).submit(later)))
        assert await asyncio.gather(*tasks) == [None] * 4
        assert keyed.waits == 1
        assert [one.key for one in place.stores["contended"].written] == ["0", "1", "2", "3"]


async def test_a_room_stays_apart_while_its_requests_wait() -> None:
    async with opened() as place:
        place.locks(OURS)
        contended = place.stores["contended"]
        contended.open.clear()
        waiting = asyncio.create_task(place.committers.keyed.submit(a_request(key="first")))
        while place.name_of(a_request(key="x")) == "keyed":  # noqa: ASYNC110 - a decision
            await asyncio.sleep(0)
        place.now_s[0] += 2 * CONTENDED_S
        assert place.name_of(a_request(key="later")) == "contended"
        contended.open.set()
        assert await waiting is None
        await asyncio.sleep(0)
        assert place.name_of(a_request(key="later")) == "keyed"


async def test_contended_rooms_wait_apart_in_turns_of_their_organisations() -> None:
    """A room that waits in vain fails as a whole, and others wait for no more than that."""
    # The first request is a group by itself: the next ones arrive while it waits.
    async with opened() as place:
        contended = place.stores["contended"]
        contended.locked = {OURS}
        tasks = await submitted_together(
            place.committers.contended,
            contended,
            [
                *(a_request(OURS, key=f"{number}") for number in range(4)),
                *(a_request(THEIRS, key=f"{number}") for number in range(4)),
            ],
        )
        waits = []
        for task in tasks[4:]:
            assert await task is None
            waits.append(contended.waits)
        assert waits == [1] * 4
        found = await asyncio.gather(*tasks[:4], return_exceptions=True)
        assert [type(one) for one in found] == [LockTimeoutError] * 4
        assert contended.waits == 2
        assert not place.committers.contended._rooms
