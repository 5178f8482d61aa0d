"""The contract of `rooms.ports.Magazines`, for every adapter."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from delivery.magazines.kv_magazines import AsyncKvMagazine
from delivery.magazines.postgres import PostgresMagazine
from rooms.domain.magazine import (
    DEFAULT_SHARDS,
    MAX_SHARDS,
    Entry,
    HandlerQueueRecord,
    MagazineName,
    Slot,
    main_magazine_name,
    queue_from_magazine,
    sideline_name,
)
from rooms.errors import ConflictError, MagazineMissingError, StaleEpochError
from rooms.ports import Magazine, Magazines
from rooms.settings import SCHEMES
from tests.conftest import administer, at
from tests.support.installation import until
from tests.support.magazines import (
    ALL_STUCK_S,
    EPOCH,
    NAME,
    NONE_STUCK_S,
    drained,
    entries,
    ids,
    opened,
    slots,
    sweep_all,
)


@pytest.fixture(scope="module")
def shared_database(postgres_url: str, template: str) -> Iterator[str]:
    name = f"magazines_{os.getpid()}"
    administer(postgres_url, "CREATE DATABASE {} TEMPLATE {}", name, template)
    yield at(postgres_url, name)
    administer(postgres_url, "DROP DATABASE {} WITH (FORCE)", name)


@pytest.fixture(params=SCHEMES["MAGAZINE_URL"])
def url(request: pytest.FixtureRequest) -> str:
    """Yield an empty store."""
    if request.param != "postgresql":
        address: str = request.getfixturevalue(f"{request.param}_url")
        return address
    address = request.getfixturevalue("shared_database")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute(
            "TRUNCATE magazines, magazine_pointers, magazine_entries, handler_queues"
        )
    return address


@pytest.fixture
async def magazines(url: str) -> AsyncIterator[Magazines]:
    async with opened(url) as magazines:
        yield magazines


@pytest.fixture
async def magazine(magazines: Magazines) -> Magazine:
    return await magazines.create(NAME, shards=4)


@pytest.fixture
async def one_shard(magazines: Magazines) -> Magazine:
    return await magazines.create(NAME, shards=1)


async def test_a_loaded_entry_is_fired_once_unchanged(magazine: Magazine) -> None:
    whole = Entry(
        id="ein/Schlüssel '\"\\{}", body=bytes(range(256)), generation=3, shovels=2, reason="stuck",
        detail='HTTP 500, said {"a"}', expires_at=datetime(2035, 1, 2, 3, 4, 5, 678000, tzinfo=UTC),
    )  # fmt: skip
    bare = Entry(id="b", body=b"")
    before = datetime.now(UTC) - timedelta(seconds=60)
    homes = await magazine.load([whole, bare])
    found = await drained(magazine)
    assert [one.entry for one in found] == [whole, bare]
    assert slots(found) == list(homes)
    assert all(
        one.loaded_at > before and one.fire_ts is not None and one.fire_ts >= one.loaded_at
        for one in found
    )
    assert await magazine.fire(10) == []


async def test_a_batch_is_in_one_shard_in_its_order(
    magazine: Magazine,
) -> None:
    homes = await magazine.load(entries(*(f"{number}" for number in range(1000))))
    assert {slot.shard for slot in homes} == {homes[0].shard}
    assert [slot.pointer for slot in homes] == list(range(1000))
    others = [(await magazine.load(entries("more")))[0].shard for _ in range(3)]
    assert len({homes[0].shard, *others}) == 4
    found = [*await magazine.fire(1000), *await magazine.fire(1000)]
    assert len(found) == 1003
    of_the_batch = [one.entry.id for one in found if one.slot.shard == homes[0].shard]
    assert of_the_batch == [f"{number}" for number in range(1000)]


async def test_a_call_is_limited_to_a_thousand(magazine: Magazine) -> None:
    many = [Slot(0, pointer) for pointer in range(1001)]
    with pytest.raises(ValueError, match="1000"):
        await magazine.load(entries(*("x" for _ in range(1001))))
    for asked in (magazine.fire(1001), magazine.peek(1001), magazine.peek_slots(1001)):
        with pytest.raises(ValueError, match="1000"):
            await asked
    for named in (magazine.take(many), magazine.find(many), magazine.delete(many)):
        with pytest.raises(ValueError, match="1000"):
            await named


async def test_empty_calls_do_nothing(magazine: Magazine) -> None:
    assert list(await magazine.load([])) == []
    assert list(await magazine.take([])) == []
    assert list(await magazine.find([])) == []
    assert list(await magazine.delete([])) == []
    assert list(await magazine.reload([])) == []
    assert await magazine.count() == 0


async def test_a_firer_gets_no_more_than_it_asks_for(magazine: Magazine) -> None:
    for number in range(6):
        await magazine.load(entries(f"{number}a", f"{number}b"))
    first, second = await magazine.fire(5), await magazine.fire(100)
    assert (len(first), len(second)) == (5, 7)
    assert {*ids(first), *ids(second)} == {
        f"{number}{letter}" for number in range(6) for letter in "ab"
    }


async def test_a_firer_gets_what_is_below_the_slots_that_it_names(magazine: Magazine) -> None:
    """Name the first two slots of the first shard, one of the second, and no other."""
    for number in range(4):
        await magazine.load(entries(*(f"{number}{letter}" for letter in "abc")))
    everything = {one.slot: one.entry.id for one in await magazine.peek(100)}
    below = {0: 2, 1: 1}
    expected = sorted(everything[slot] for slot in (Slot(0, 0), Slot(0, 1), Slot(1, 0)))
    assert await magazine.fire(100, below={}) == []
    assert sorted(ids(await magazine.fire(100, below=below))) == expected
    await magazine.load(entries("later"))
    assert await magazine.fire(100, below=below) == []
    assert len(await magazine.fire(100)) == 10


async def test_a_firer_passes_deleted_entries_below_the_slots_that_it_names(
    one_shard: Magazine,
) -> None:
    homes = await one_shard.load(entries(*(f"{at}" for at in range(10))))
    await one_shard.delete([*homes[:4], *homes[6:8]])
    assert ids(await one_shard.fire(100, below={0: 8})) == ["4", "5"]
    assert await one_shard.fire(100, below={0: 8}) == []
    assert ids(await one_shard.fire(100, below={0: 10})) == ["8", "9"]


async def test_concurrent_firers_get_each_entry_below_a_slot_once(magazine: Magazine) -> None:
    for number in range(20):
        await magazine.load(entries(*(f"{number}-{at}" for at in range(25))))
    below = dict.fromkeys(range(4), 60)
    handed: Counter[str] = Counter()

    async def firer() -> None:
        while found := await magazine.fire(7, below=below):
            handed.update(ids(found))

    await asyncio.gather(*(firer() for _ in range(8)))
    assert (len(handed), set(handed.values())) == (240, {1})
    assert len(await drained(magazine)) == 260


@pytest.mark.parametrize("limit", [7, 200])
async def test_concurrent_firers_get_each_entry_once(magazine: Magazine, limit: int) -> None:
    for number in range(20):
        await magazine.load(entries(*(f"{number}-{at}" for at in range(25))))
    handed: Counter[str] = Counter()

    async def firer() -> None:
        while found := await magazine.fire(limit):
            handed.update(ids(found))

    await asyncio.gather(*(firer() for _ in range(8)))
    assert len(handed) == 500
    assert set(handed.values()) == {1}


async def test_a_client_that_loads_before_it_fires_always_gets_an_entry(
    one_shard: Magazine,
) -> None:
    found: list[str] = []

    async def caller(name: str) -> None:
        for number in range(40):
            await one_shard.load(entries(f"{name}{number}"))
            (one,) = await one_shard.fire()
            found.append(one.entry.id)
            await one_shard.delete([one.slot])

    await asyncio.gather(*(caller(name) for name in "abcdefgh"))
    assert len(set(found)) == len(found) == 8 * 40


async def test_taken_entries_have_one_taker_and_are_not_fired(magazine: Magazine) -> None:
    homes = await magazine.load(entries("a", "b", "c"))
    assert ids(await magazine.take([homes[1]])) == ["b"]
    assert list(await magazine.take([homes[1]])) == []
    assert list(await magazine.take([homes[1]], older_than_s=NONE_STUCK_S)) == []
    assert ids(await magazine.take([homes[1], Slot(0, 99)], older_than_s=ALL_STUCK_S)) == ["b"]
    assert ids(await drained(magazine)) == ["a", "c"]


async def test_find_and_peek_change_nothing(magazine: Magazine) -> None:
    for letter in "abcdefg":
        await magazine.load(entries(letter, letter * 2))
    fired = await magazine.fire(3)
    first = await magazine.peek(6)
    rest = await magazine.peek(100, after=first[-1].slot)
    assert len(first) == 6
    assert slots(first) + slots(rest) == sorted(slots(first) + slots(rest))
    assert sorted(ids(first) + ids(rest)) == sorted(
        f"{letter}" * many for letter in "abcdefg" for many in (1, 2)
    )
    assert {one.slot for one in [*first, *rest] if one.fire_ts} == set(slots(fired))
    assert list(await magazine.peek(10, after=rest[-1].slot)) == []
    assert list(await magazine.peek_slots(6)) == slots(first)
    assert list(await magazine.peek_slots(100, after=first[-1].slot)) == slots(rest)
    assert list(await magazine.peek_slots(10, after=rest[-1].slot)) == []
    assert ids(await magazine.find([first[2].slot, Slot(0, 999)])) == [first[2].entry.id]
    assert len(await drained(magazine)) == 11


async def test_the_oldest_entry_is_found_in_whatever_shard(magazine: Magazine) -> None:
    assert await magazine.oldest_loaded_at() is None
    for letter in "abcdef":
        await magazine.load(entries(letter))
    while found := await magazine.peek(10):
        assert await magazine.oldest_loaded_at() == min(one.loaded_at for one in found)
        oldest = min(found, key=lambda one: (one.loaded_at, one.slot.pointer))
        await magazine.delete([oldest.slot])
    assert await magazine.oldest_loaded_at() is None


async def test_only_the_first_deletion_counts(magazine: Magazine) -> None:
    homes = await magazine.load(entries("a", "b", "c"))
    taken = await magazine.fire(2)
    assert sorted(await magazine.delete(slots(taken))) == sorted(homes[:2])
    assert list(await magazine.delete([*slots(taken), Slot(2, 77)])) == []
    assert list(await magazine.find(homes)) == list(await magazine.peek(10))
    assert list(await magazine.delete([homes[2]])) == [homes[2]], (
        "an entry that no member took is deleted"
    )
    assert list(await magazine.fire(10)) == []
    assert list(await magazine.take(homes, older_than_s=ALL_STUCK_S)) == []
    assert await magazine.count() == 0


async def test_a_reloaded_entry_waits_again_as_given(magazine: Magazine) -> None:
    await magazine.load(entries("a", "b", "c"))
    a, b, c = await magazine.fire(3)
    await magazine.delete([b.slot])
    again = replace(a, entry=replace(a.entry, shovels=1, reason="failed"))
    homes = await magazine.reload([again, b, c])
    assert homes[1] is None, "what was ended meanwhile is not brought back"
    assert list(await magazine.find([a.slot, b.slot, c.slot])) == []
    found = await drained(magazine)
    assert [one.entry for one in found] == [again.entry, c.entry]
    assert slots(found) == [homes[0], homes[2]]
    state = await magazine.state()
    assert (state.depth, sum(shard.reloaded for shard in state.shards)) in {(2, 2), (2, 3)}


async def test_a_sweep_takes_stuck_entries_and_moves_the_pointer(
    one_shard: Magazine,
) -> None:
    homes = await one_shard.load(entries(*"abcdef"))
    await one_shard.fire(4)
    await one_shard.delete(homes[:1])
    nothing = await one_shard.sweep(0, epoch=EPOCH, older_than_s=NONE_STUCK_S)
    assert (list(nothing.entries), nothing.pointer, nothing.is_full) == ([], 1, False)
    stuck = await one_shard.sweep(0, epoch=EPOCH, older_than_s=ALL_STUCK_S)
    assert (ids(stuck.entries), stuck.pointer) == (["b", "c", "d"], 1), (
        "what still waits is not stuck"
    )
    assert stuck.entries[0].entry.body == b"b"
    await one_shard.delete(slots(stuck.entries), swept=True)
    done = await one_shard.sweep(0, epoch=EPOCH, older_than_s=ALL_STUCK_S)
    assert (list(done.entries), done.pointer) == ([], 4)
    assert ids(await drained(one_shard)) == ["e", "f"]
    state = await one_shard.state()
    assert (state.swept, state.shards[0].sweep_pointer, state.shards[0].epoch) == (3, 4, EPOCH)


async def test_the_sweep_pointer_never_passes_a_live_entry(one_shard: Magazine) -> None:
    homes = await one_shard.load(entries(*"abcd"))
    await one_shard.fire(4)
    await one_shard.delete(homes[1:])
    for _ in range(2):
        kept = await one_shard.sweep(0, epoch=EPOCH, older_than_s=NONE_STUCK_S)
        assert (list(kept.entries), kept.pointer) == ([], 0)
    assert (
        slots((await one_shard.sweep(0, epoch=EPOCH, older_than_s=ALL_STUCK_S)).entries)
        == homes[:1]
    )
    assert ids(await one_shard.find(homes)) == ["a"]


async def test_a_sweep_goes_in_batches(magazine: Magazine) -> None:
    for number in range(4):
        await magazine.load(entries(*(f"{number}-{at}" for at in range(25))))
    assert len(await drained(magazine)) == 100
    look = await magazine.sweep(0, epoch=EPOCH, older_than_s=ALL_STUCK_S, limit=10)
    assert (len(look.entries), look.is_full) == (10, True)
    assert len(await sweep_all(magazine, limit=10)) == 100
    state = await magazine.state()
    assert state.swept == 100
    assert all(shard.sweep_pointer == shard.load_pointer for shard in state.shards)


async def test_an_entry_that_a_sweeper_took_is_young_again(one_shard: Magazine) -> None:
    await one_shard.load(entries("a"))
    await one_shard.fire(1)
    looks = await asyncio.gather(
        *(
            one_shard.sweep(0, epoch=EPOCH, older_than_s=-0.5 if at else ALL_STUCK_S)
            for at in range(1)
        )
    )
    assert [ids(look.entries) for look in looks] == [["a"]]
    assert list((await one_shard.sweep(0, epoch=EPOCH, older_than_s=NONE_STUCK_S)).entries) == []


async def test_an_older_epoch_is_refused_and_gets_nothing(magazine: Magazine) -> None:
    await magazine.load(entries("a"))
    (fired,) = await drained(magazine)
    shard = fired.slot.shard
    await magazine.sweep(shard, epoch=EPOCH, older_than_s=NONE_STUCK_S)
    with pytest.raises(StaleEpochError):
        await magazine.sweep(shard, epoch=EPOCH - 1, older_than_s=ALL_STUCK_S)
    assert (await magazine.find([fired.slot]))[0].fire_ts == fired.fire_ts
    other = (shard + 1) % 4
    await magazine.sweep(other, epoch=EPOCH - 1, older_than_s=ALL_STUCK_S)
    assert ids(
        (await magazine.sweep(shard, epoch=EPOCH + 1, older_than_s=ALL_STUCK_S)).entries
    ) == ["a"]


async def unstamp(magazine: Magazine, url: str, found: Slot) -> None:
    """Remove the stamp, as if the firer had died between fire pointer and stamp."""
    match magazine:
        case PostgresMagazine():
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(
                    "UPDATE magazine_entries SET fire_ts = NULL WHERE pointer = %s",
                    (found.pointer,),
                )
        case AsyncKvMagazine():
            store = magazine._magazine.store
            store._client.raw.remove_bin(store._keys.slot(NAME, found), ["fireTS"])  # type: ignore[attr-defined]
        case _:
            raise AssertionError(magazine)


async def test_an_unstamped_entry_below_the_fire_pointer_counts_from_its_load(
    one_shard: Magazine, url: str
) -> None:
    (home,) = await one_shard.load(entries("a"))
    await one_shard.fire(1)
    await unstamp(one_shard, url, home)
    assert list(await one_shard.fire(1)) == []
    assert list((await one_shard.sweep(0, epoch=EPOCH, older_than_s=NONE_STUCK_S)).entries) == []
    assert ids((await one_shard.sweep(0, epoch=EPOCH, older_than_s=ALL_STUCK_S)).entries) == ["a"]


async def test_expiry_applies_only_in_magazines_with_expiry(magazines: Magazines) -> None:
    kept = await magazines.create(sideline_name("orders"), shards=1)
    expiring = await magazines.create(main_magazine_name("orders"), shards=1, expires=True)
    now = datetime.now(UTC)
    soon = Entry(id="soon", body=b"", expires_at=now + timedelta(milliseconds=300))
    late = Entry(id="late", body=b"", expires_at=now + timedelta(hours=1))
    for magazine in (kept, expiring):
        await magazine.load([soon, late, *entries("never")])

    async def gone() -> bool:
        return len(await expiring.peek(10)) == 2

    await until(gone, "the entry to expire")
    assert ids(await expiring.fire(10)) == ["late", "never"]
    assert await expiring.count() == 2
    assert ids(await sweep_all(expiring)) == ["late", "never"]
    assert (await expiring.state()).shards[0].sweep_pointer == 3
    assert ids(await kept.fire(10)) == ["soon", "late", "never"]


async def test_a_check_changes_nothing(
    magazines: Magazines,
) -> None:
    await magazines.check()
    await magazines.check()
    assert await magazines.list_queue_records() == []


async def test_a_missing_magazine_raises_missing(magazines: Magazines) -> None:
    with pytest.raises(MagazineMissingError):
        await magazines.open(NAME)
    assert not await magazines.drop(NAME)
    magazine = await magazines.create(NAME, shards=2)
    await magazine.load(entries("a"))
    await magazine.load(entries("b"))
    assert ids(await (await magazines.open(NAME)).peek(10)) == ids(await magazine.peek(10))
    assert await magazines.drop(NAME)
    for call in (magazine.load(entries("b")), magazine.state(), magazine.count()):
        with pytest.raises(MagazineMissingError):
            await call
    with pytest.raises(MagazineMissingError):
        await magazine.sweep(0, epoch=1, older_than_s=0)
    again = await magazines.create(NAME, shards=3)
    assert (again.shards, await again.count()) == (3, 0)


async def test_a_magazine_has_1_to_512_shards(magazines: Magazines) -> None:
    for shards in (0, MAX_SHARDS + 1):
        with pytest.raises(ValueError, match="512"):
            await magazines.create(NAME, shards=shards)
    assert (await magazines.create(NAME)).shards == DEFAULT_SHARDS == 32
    assert (await magazines.create(NAME)).shards == 32, "one that is there stays"
    with pytest.raises(ConflictError):
        await magazines.create(NAME, shards=31)
    widest = await magazines.create(sideline_name(NAME), shards=MAX_SHARDS)
    homes = [(await widest.load(entries(f"{number}")))[0] for number in range(40)]
    assert len({slot.shard for slot in homes}) == 40
    assert len(await drained(widest)) == 40
    assert len((await widest.state()).shards) == MAX_SHARDS


async def test_a_magazine_created_again_starts_beyond_its_old_slots(
    magazines: Magazines,
) -> None:
    magazine = await magazines.create(NAME, shards=2, first_pointer=1000)
    homes = [(await magazine.load(entries(letter)))[0] for letter in "ab"]
    assert sorted(homes) == [Slot(0, 1000), Slot(1, 1000)]
    assert len(await drained(magazine)) == 2
    assert len(await sweep_all(magazine)) == 2
    assert [shard.sweep_pointer for shard in (await magazine.state()).shards] == [1001, 1001]


async def test_pointers_and_counters(magazine: Magazine) -> None:
    homes = await magazine.load(entries("a", "b", "c"))
    await magazine.fire(1)
    await magazine.take([homes[2]])
    await magazine.delete(homes[:1])
    state = await magazine.state()
    shard = state.shards[homes[0].shard]
    assert (state.name, len(state.shards), state.depth, await magazine.count()) == (NAME, 4, 2, 2)
    assert (shard.load_pointer, shard.fire_pointer, shard.sweep_pointer) == (3, 1, 0)
    assert (shard.loaded, shard.fired, shard.deleted, shard.reloaded) == (3, 2, 1, 0)
    assert all(one.load_pointer == 0 for one in state.shards if one != shard)


async def test_a_queue_and_its_sideline_are_two_magazines(magazines: Magazines) -> None:
    assert sideline_name("orders") == "orders_SIDELINE"
    assert queue_from_magazine(sideline_name("orders")) == ("orders", True)
    assert queue_from_magazine(main_magazine_name("orders")) == ("orders", False)
    with pytest.raises(ValueError, match="_SIDELINE"):
        main_magazine_name("orders_SIDELINE")
    main = await magazines.create(main_magazine_name("orders"), shards=3)
    sideline = await magazines.create(sideline_name("orders"), shards=2)
    await main.load(entries("a"))
    await sideline.load(entries("b"))
    assert (ids(await drained(main)), ids(await drained(sideline))) == (["a"], ["b"])
    await sweep_all(main, epoch=9)
    await sweep_all(sideline, epoch=2)
    assert await magazines.drop(main_magazine_name("orders"))
    assert (await (await magazines.open(sideline_name("orders"))).state()).swept == 1


async def test_records_of_handler_queues(magazines: Magazines) -> None:
    made = datetime(2026, 1, 2, 3, 4, 5, 678000, tzinfo=UTC)
    plain = HandlerQueueRecord(name="b", handler_type="orders.Handler", created_at=made)
    full = HandlerQueueRecord(
        name="a", handler_type="x", created_at=made, shards=4, queue_expiry_s=86_400, message_expiry_s=3600,
        concurrency=7, shovel_concurrency=2, shovel_interval_s=60, sweep_duration_s=300, max_batch=50, max_wait_s=2,
    )  # fmt: skip
    for queue in (plain, full):
        await magazines.create(main_magazine_name(queue.name), shards=queue.shards)
        await magazines.save_queue_record(queue)
    assert list(await magazines.list_queue_records()) == [full, plain]
    await magazines.save_queue_record(replace(full, active=False, concurrency=1))
    assert list(await magazines.list_queue_records()) == [plain]
    assert list(await magazines.list_queue_records(active=False)) == [
        replace(full, active=False, concurrency=1)
    ]
    await magazines.save_queue_record(full)
    assert list(await magazines.list_queue_records()) == [full, plain]
    assert await magazines.delete_queue_record("b")
    assert not await magazines.delete_queue_record("b")
    assert list(await magazines.list_queue_records()) == [full]
    assert (await magazines.open(main_magazine_name("b"))).shards == 32, (
        "its magazines are dropped apart"
    )
    with pytest.raises(ValueError, match="100"):
        replace(full, concurrency=101)


async def test_similar_names_are_different_magazines(magazines: Magazines) -> None:
    short = await magazines.create(MagazineName("a"), shards=2)
    long = await magazines.create(MagazineName("a_SHARD_1"), shards=2)
    for _ in range(2):
        await short.load(entries("short"))
        await long.load(entries("long"))
    assert (ids(await drained(short)), ids(await drained(long))) == (["short"] * 2, ["long"] * 2)
