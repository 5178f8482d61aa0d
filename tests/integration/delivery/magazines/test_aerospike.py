"""Aerospike only: its sets, bins and TTLs, and servers that are suspended or emptied."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import aerospike
import pytest

from delivery.magazines import open_magazines
from delivery.magazines.kv_magazines import AsyncKvMagazine
from rooms.backend_urls import parse_aerospike_url
from rooms.domain.magazine import Entry, HandlerQueueRecord, Slot, main_magazine_name, sideline_name
from rooms.errors import MagazineMissingError, MagazineUnavailableError, TooLargeError
from rooms.ports import Magazine, Magazines
from tests.support.aerospike_server import NAMESPACE, AerospikeServer
from tests.support.installation import until
from tests.support.magazines import (
    ALL_STUCK_S,
    EPOCH,
    NAME,
    drained,
    entries,
    ids,
    slots,
    sweep_all,
)

CLIENT = "alone"
NEVER = 4294967295


@pytest.fixture
async def magazines(aerospike_url: str) -> AsyncIterator[Magazines]:
    async with open_magazines(aerospike_url, farm="farm", client=CLIENT) as magazines:
        for name in (main_magazine_name("orders"), sideline_name("orders")):
            await magazines.drop(name)
        await magazines.delete_queue_record("orders")
        yield magazines


@pytest.fixture
def raw(aerospike_url: str) -> Iterator[Any]:
    """Return the library's client, to read records."""
    with closing(
        aerospike.client({"hosts": list(parse_aerospike_url(aerospike_url).hosts)})
    ) as client:
        yield client


def queue(**more: Any) -> HandlerQueueRecord:
    return HandlerQueueRecord(
        name="orders", handler_type="x.Y", created_at=datetime.now(UTC), **more
    )


async def test_sets_keys_and_bins_of_records(magazines: Magazines, raw: Any) -> None:
    main = await magazines.create(main_magazine_name("orders"), shards=1)
    sideline = await magazines.create(sideline_name("orders"), shards=1)
    await magazines.save_queue_record(queue(shards=1))
    await main.load(entries("a", "b"))
    await sideline.load(entries("c"))
    await main.fire(1)
    await sweep_all(main)
    _, _, bins = raw.get((NAMESPACE, f"farm_{CLIENT}_ignis_queues", "orders"))
    assert set(bins) >= {
        "handlerType", "shards", "queueExpiry", "messageExpiry", "concurrency", "shovelConcur", "shovelInterval",
        "createdAt", "active", "sweepPointers", "sidelineSweep", "sweptCounter", "sidelineSwept", "sweepDuration",
        "maxBatchSize", "maxWaitTime",
    }  # fmt: skip
    assert (bins["sweepPointers"], bins["sidelineSweep"], bins["sweptCounter"]) == (
        {"0": 1},
        {"0": 0},
        1,
    )
    key, _, waiting = raw.get(
        (NAMESPACE, f"{CLIENT}_data_set", "orders_SHARD_0_1"), {"key": aerospike.POLICY_KEY_SEND}
    )
    assert key[2] == "orders_SHARD_0_1", "the key is kept with the record"
    assert (waiting["id"], waiting["body"]) == ("b", b"b")
    assert raw.get((NAMESPACE, f"{CLIENT}_data_set", "orders_SIDELINE_SHARD_0_0"))[2]["id"] == "c"
    meta = raw.get((NAMESPACE, f"{CLIENT}_meta_set", "orders_SHARD_0"))[2]
    assert (meta["loadPointer"], meta["firePointer"], meta["loadCounter"], meta["fireCounter"]) == (
        2,
        1,
        2,
        1,
    )
    assert [one.name for one in await magazines.list_queue_records()] == ["orders"]
    indexes = "".join(raw.info_all(f"sindex-list:namespace={NAMESPACE}").popitem()[1][1])
    assert f"farm_{CLIENT}_ignis_queues_active" in indexes
    assert [one.name for one in await magazines.list_queue_records()] == ["orders"], (
        "an index that is there is no error"
    )


async def test_only_messages_of_an_active_queue_expire(magazines: Magazines, raw: Any) -> None:
    main = await magazines.create(main_magazine_name("orders"), shards=1, expires=True)
    sideline = await magazines.create(sideline_name("orders"), shards=1)

    def ttl(name: str, key: str) -> int:
        return int(raw.exists((NAMESPACE, name, key))[1]["ttl"])

    later = datetime.fromtimestamp(datetime.now(UTC).timestamp() + 600, UTC)
    mortal = Entry(id="a", body=b"", expires_at=later)
    for magazine in (main, sideline):
        await magazine.load([mortal])
        await magazine.fire(1)
    await magazines.save_queue_record(queue(shards=1, queue_expiry_s=5000))
    data, meta, queues = f"{CLIENT}_data_set", f"{CLIENT}_meta_set", f"farm_{CLIENT}_ignis_queues"
    assert 500 < ttl(data, "orders_SHARD_0_0") <= 600, "a stamp does not touch it"
    assert ttl(data, "orders_SIDELINE_SHARD_0_0") == NEVER
    assert (
        ttl(meta, "orders_SHARD_0")
        == ttl(meta, "orders_SIDELINE_SHARD_0")
        == ttl(queues, "orders")
        == NEVER
    )
    await sweep_all(main)
    assert 3500 < ttl(data, "orders_SHARD_0_0") <= 3600, (
        "a slot that is done is remembered for an hour"
    )
    await magazines.save_queue_record(queue(shards=1, queue_expiry_s=5000, active=False))
    for name, key in (
        (queues, "orders"),
        (meta, "orders_SHARD_0"),
        (meta, "orders_SIDELINE_SHARD_0"),
    ):
        assert 9990 < ttl(name, key) <= 10_000
    await sideline.load(entries("b"))
    assert 9990 < ttl(meta, "orders_SIDELINE_SHARD_0") <= 10_000, "an increment does not touch it"
    await magazines.save_queue_record(queue(shards=1, queue_expiry_s=5000))
    assert ttl(meta, "orders_SHARD_0") == ttl(queues, "orders") == NEVER


async def test_an_entry_larger_than_a_record_raises_too_large(magazines: Magazines) -> None:
    magazine = await magazines.create(NAME, shards=1)
    with pytest.raises(TooLargeError, match="huge"):
        await magazine.load([*entries("a"), Entry(id="huge", body=bytes(2 * 1024 * 1024))])
    await magazine.load([Entry(id="large", body=bytes(1_000_000))])
    assert "large" in ids(await drained(magazine))


async def test_a_firer_closes_holes_and_their_loader_takes_another_slot(
    magazines: Magazines,
) -> None:
    magazine = await magazines.create(NAME, shards=1)
    assert isinstance(magazine, AsyncKvMagazine)
    shelf = magazine._magazine
    (hole,) = shelf._claim_slots(0, 1, {})
    (after,) = await magazine.load(entries("b"))
    assert (hole, after) == (Slot(0, 0), Slot(0, 1))
    assert ids(await magazine.fire(10)) == ["b"], "a slow loader delays no other"
    slow = Entry(id="slow", body=b"")
    assert shelf._write_entries({0: hole}, [slow], "call") == set(), "the hole is closed"
    assert slots(await magazine.peek(10)) == [after]
    (home,) = shelf._claim_slots(0, 1, {})
    for _ in range(2):
        assert shelf._write_entries({0: home}, [slow], "call") == {0}, (
            "who meets its own id has succeeded"
        )
    assert ids(await magazine.fire(10)) == ["slow"]
    await magazine.delete([home])
    assert shelf._write_entries({0: home}, [slow], "call") == {0}, (
        "even when it was fired and ended meanwhile"
    )
    assert await magazine.count() == 1
    assert shelf._write_entries({0: home}, [slow], "another call") == set()
    assert shelf._write_entries({0: home}, entries("other"), "call") == set()


async def test_a_magazine_created_again_has_no_old_entries(
    magazines: Magazines,
) -> None:
    for _ in range(3):
        magazine = await magazines.create(NAME, shards=1)
        assert list(await magazine.load(entries("a", "b", "c"))) == [
            Slot(0, 0),
            Slot(0, 1),
            Slot(0, 2),
        ]
        await magazine.fire(2)
        assert len(await sweep_all(magazine)) == 2
        assert await magazines.drop(NAME)


async def test_a_sweeper_closes_holes_that_a_dead_firer_left(magazines: Magazines) -> None:
    magazine = await magazines.create(NAME, shards=1)
    assert isinstance(magazine, AsyncKvMagazine)
    shelf = magazine._magazine
    (hole,) = shelf._claim_slots(0, 1, {})
    assert shelf._move_fire(0, 0, 1)
    assert (await magazine.sweep(0, epoch=EPOCH, older_than_s=ALL_STUCK_S)).pointer == 1
    assert shelf._write_entries({0: hole}, entries("late"), "call") == set(), (
        "nothing comes to stand below the sweep pointer"
    )


LONG_S = 10**9


class Sleepy:
    """A clock with these times in turn, and then a time long after."""

    def __init__(self, clock: Any, times: list[float]) -> None:
        self._clock = clock
        self._times = iter(times)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clock, name)

    def monotonic(self) -> float:
        return next(self._times, LONG_S)


async def test_a_slow_loader_gives_its_slots_up(magazines: Magazines) -> None:
    magazine = await magazines.create(NAME, shards=1)
    assert isinstance(magazine, AsyncKvMagazine)

    magazine._magazine.clock = Sleepy(magazine._magazine.clock, [0.0, LONG_S])
    assert list(await magazine.load(entries("a", "b"))) == [Slot(0, 2), Slot(0, 3)]
    assert ids(await magazine.fire(10)) == ["a", "b"]


async def test_entries_taken_by_slot_do_not_block_the_pointers(magazines: Magazines) -> None:
    magazine = await magazines.create(NAME, shards=1)
    homes = await magazine.load(entries(*"abcd"))
    await magazine.take(homes[:3])
    await magazine.delete(homes[:3])
    await magazine.sweep(0, epoch=EPOCH, older_than_s=ALL_STUCK_S)
    look = await magazine.sweep(0, epoch=EPOCH, older_than_s=ALL_STUCK_S)
    state = (await magazine.state()).shards[0]
    assert (look.pointer, state.fire_pointer, state.fired) == (3, 3, 3)
    assert ids(await magazine.fire(10)) == ["d"]


async def test_forgotten_slots_do_not_block_the_pointers(magazines: Magazines, raw: Any) -> None:
    """Sweep later than deleted slots are remembered."""
    magazine = await magazines.create(NAME, shards=1)
    assert isinstance(magazine, AsyncKvMagazine)
    homes = await magazine.load(entries("a", "b"))
    (hole,) = magazine._magazine._claim_slots(0, 1, {})
    homes = [*homes, *await magazine.load(entries("c", "d", "e"))]
    await magazine.take(homes[:3])
    await magazine.delete(homes[:3])
    for slot in homes[:2]:
        raw.remove((NAMESPACE, f"{CLIENT}_data_set", f"orders_SHARD_0_{slot.pointer}"))
    await magazine.sweep(0, epoch=EPOCH, older_than_s=ALL_STUCK_S)
    look = await magazine.sweep(0, epoch=EPOCH, older_than_s=ALL_STUCK_S)
    state = (await magazine.state()).shards[0]
    assert (look.pointer, state.fire_pointer, state.fired) == (4, 4, 3)
    assert magazine._magazine._write_entries({0: hole}, entries("late"), "call") == set(), (
        "nothing stands below the pointers"
    )
    assert ids(await magazine.fire(10)) == ["d", "e"]


FAR = 10**12


async def test_lost_pointers_are_created_again(magazines: Magazines, raw: Any) -> None:
    """Reload the shard's entries, skip the slots between in a sweep, and keep the other shard."""
    magazine = await magazines.create(NAME, shards=2)
    lost, kept = [(await magazine.load(entries(letter, letter * 2)))[0].shard for letter in "ab"]
    assert len(await drained(magazine)) == 4
    await magazine.delete([Slot(lost, 0)])
    raw.remove((NAMESPACE, f"{CLIENT}_meta_set", f"orders_SHARD_{lost}"))
    with pytest.raises(MagazineMissingError):
        await magazine.state()
    again = await magazines.create(NAME, shards=2, first_pointer=FAR)
    state = {shard.shard: shard for shard in (await again.state()).shards}
    assert (state[lost].fire_pointer, state[lost].sweep_pointer) == (FAR, FAR)
    assert (state[kept].fire_pointer, state[kept].sweep_pointer) == (2, 0)
    assert list(await again.find([Slot(lost, 0), Slot(lost, 1)])) == []
    (left,) = await drained(again)
    assert (left.entry.id, left.slot.pointer) in {("aa", FAR), ("aa", 2)}
    await again.delete([left.slot])
    assert ids(await sweep_all(again)) == ["b", "bb"]
    for shard in (await again.state()).shards:
        assert shard.sweep_pointer == shard.load_pointer
        assert shard.load_pointer >= (FAR if shard.shard == lost else 2)


async def test_sweeps_start_before_live_entries_after_the_record_is_lost(
    magazines: Magazines, raw: Any
) -> None:
    magazine = await magazines.create(NAME, shards=1)
    homes = await magazine.load(entries(*(f"{n}" for n in range(1000))))
    later = await magazine.load(entries("stuck", "waits"))
    await magazine.fire(1000)
    await magazine.fire(1)
    await magazine.delete(homes)
    raw.remove((NAMESPACE, f"farm_{CLIENT}_ignis_queues", "orders"))
    with pytest.raises(MagazineMissingError):
        await magazines.open(NAME)
    again = await magazines.create(NAME, shards=1, first_pointer=FAR)
    assert (await again.state()).shards[0].sweep_pointer == 0
    assert slots(await again.peek(10)) == later
    assert ids(await sweep_all(again)) == ["stuck"]
    assert ids(await drained(again)) == ["waits"]


async def test_entries_beyond_a_rolled_back_load_pointer_are_fired(
    magazines: Magazines, raw: Any
) -> None:
    """Fire entries that a dead server had flushed, without its pointers and without another load."""
    magazine = await magazines.create(NAME, shards=1)
    homes = await magazine.load(entries(*"abcde"))
    await magazine.take(homes[4:])
    await magazine.delete(homes[4:])
    raw.put(
        (NAMESPACE, f"{CLIENT}_meta_set", "orders_SHARD_0"), {"loadPointer": 1, "loadCounter": 1}
    )
    assert ids(await drained(magazine)) == ["a"]
    await magazine.sweep(0, epoch=EPOCH, older_than_s=3600)
    assert (await magazine.state()).shards[0].load_pointer == 4
    assert ids(await drained(magazine)) == ["b", "c", "d"]
    await magazine.sweep(0, epoch=EPOCH, older_than_s=3600)
    state = (await magazine.state()).shards[0]
    assert (state.load_pointer, state.loaded) == (4, 4), "what is done is not handed out again"
    assert list(await magazine.load(entries("f"))) == [Slot(0, 5)]


async def test_a_late_deletion_spares_a_new_entry_in_the_same_slot(
    magazines: Magazines, raw: Any
) -> None:
    """Delete late after a dead server lost the entry and its claim, and gave the slot again."""
    magazine = await magazines.create(NAME, shards=1)
    (home,) = await magazine.load(entries("a"))
    assert ids(await magazine.fire(1)) == ["a"]
    raw.remove((NAMESPACE, f"{CLIENT}_data_set", "orders_SHARD_0_0"))
    raw.put(
        (NAMESPACE, f"{CLIENT}_meta_set", "orders_SHARD_0"), {"loadPointer": 0, "firePointer": 0}
    )
    other = await magazines.open(NAME)
    assert list(await other.load(entries("b"))) == [home]
    assert isinstance(magazine, AsyncKvMagazine)
    magazine._magazine.clock = Sleepy(magazine._magazine.clock, [])
    assert list(await magazine.delete([home])) == []
    assert ids(await other.fire(1)) == ["b"]
    assert list(await other.delete([home])) == [home]


async def kept_magazine(
    magazines: Magazines, server: AerospikeServer
) -> tuple[Magazine, threading.Event]:
    """Return a magazine whose first pause, after the first unanswered call, resumes the server."""
    magazine = await magazines.create(NAME, shards=1)
    assert isinstance(magazine, AsyncKvMagazine)
    paused = threading.Event()

    def thaw(_: float) -> None:
        paused.set()
        server.thaw()

    magazine._magazine.sleep = thaw
    return magazine, paused


async def test_a_suspended_server_duplicates_nothing(aerospike_server: AerospikeServer) -> None:
    """Suspend the server during a load.

    Oracle: an entry that was written when the server resumed, and written again after the timeout,
    is stored once, fired once and deleted once.
    """
    url = f"{aerospike_server.url}?socket_timeout_ms=300&total_timeout_ms=300&retries=50"
    async with open_magazines(url, farm="farm", client=CLIENT) as magazines:
        magazine, paused = await kept_magazine(magazines, aerospike_server)
        for round_ in range(3):
            aerospike_server.freeze()
            await magazine.load(entries(*(f"{round_}-{at}" for at in range(100))))
            assert paused.is_set()
            paused.clear()
        assert await magazine.count() == 300
        aerospike_server.freeze()
        found = await drained(magazine)
        assert paused.is_set()
        assert len(set(slots(found))) == len(found)
        aerospike_server.freeze()
        ended = list(await magazine.delete(slots(found)))
        assert sorted(ended) == sorted(slots(found)), (
            "what an unanswered call ended was ended by it"
        )
        rest = await sweep_all(magazine)
        assert len({*slots(found), *slots(rest)}) == len(found) + len(rest) == 300
        assert await magazine.count() == 0


async def test_a_check_fails_while_the_server_is_suspended(
    aerospike_server: AerospikeServer,
) -> None:
    url = f"{aerospike_server.url}?socket_timeout_ms=500&total_timeout_ms=500&retries=0"
    async with open_magazines(url, farm="farm", client=CLIENT) as magazines:
        await magazines.check()
        aerospike_server.freeze()
        with pytest.raises(MagazineUnavailableError):
            await magazines.check()
        aerospike_server.thaw()
        await until_answers(magazines)


async def until_answers(magazines: Magazines) -> None:
    async def answers() -> bool:
        try:
            await magazines.check()
        except MagazineUnavailableError:
            return False
        return True

    await until(answers, "the server to answer again")


async def test_a_server_that_does_not_answer_raises_unavailable(
    aerospike_server: AerospikeServer,
) -> None:
    async with open_magazines(aerospike_server.url, farm="farm", client=CLIENT) as patient:
        (home,) = await (await patient.create(NAME, shards=1)).load(entries("a"))
    url = f"{aerospike_server.url}?socket_timeout_ms=500&total_timeout_ms=500&retries=1&sleep_ms=1"
    async with open_magazines(url, farm="farm", client=CLIENT) as magazines:
        magazine = await magazines.open(NAME)
        aerospike_server.freeze()
        for call in (
            magazine.load(entries("b")),
            magazine.fire(1),
            magazine.delete([home]),
            magazine.peek(1),
            magazine.state(),
        ):
            with pytest.raises(MagazineUnavailableError):
                await call
        aerospike_server.thaw()


async def test_an_emptied_server_is_noticed_and_filled_again(
    aerospike_server: AerospikeServer,
) -> None:
    url = f"{aerospike_server.url}?socket_timeout_ms=1000&total_timeout_ms=1000&retries=50&sleep_ms=20"
    async with open_magazines(url, farm="farm", client=CLIENT) as magazines:
        magazine = await magazines.create(NAME, shards=2)
        await magazine.load(entries("a", "b"))
        await asyncio.to_thread(aerospike_server.kill)
        await asyncio.to_thread(aerospike_server.start)
        for call in (
            magazine.load(entries("c")),
            magazine.fire(1),
            magazine.sweep(0, epoch=1, older_than_s=0),
        ):
            with pytest.raises(MagazineMissingError):
                await call
        with pytest.raises(MagazineMissingError):
            await magazines.open(NAME)
        again = await magazines.create(NAME, shards=2, first_pointer=100)
        homes = await again.load(entries("a", "b"))
        assert min(slot.pointer for slot in homes) == 100
        assert ids(await magazine.fire(10)) == ["a", "b"], "a process that has it open goes on"


def configured(server: AerospikeServer, setting: str) -> None:
    with closing(
        aerospike.client({"hosts": list(parse_aerospike_url(server.url).hosts)})
    ) as client:
        answers = client.info_all(f"set-config:context=namespace;id={NAMESPACE};{setting}")
        assert [text.strip() for _, text in answers.values()] == ["ok"]


async def test_an_evicting_namespace_is_refused_until_changed(
    aerospike_server: AerospikeServer, caplog: pytest.LogCaptureFixture
) -> None:
    configured(aerospike_server, "evict-used-pct=50")
    async with open_magazines(aerospike_server.url, farm="farm", client=CLIENT) as magazines:
        for _ in range(2):
            with pytest.raises(MagazineUnavailableError, match="set evict-used-pct 0"):
                await magazines.create(NAME, shards=1)
        configured(aerospike_server, "evict-used-pct=0")
        magazine = await magazines.create(NAME, shards=1)
        await magazine.load(entries("a"))
        assert await magazine.count() == 1
    error, warning = [
        record.getMessage()
        for record in caplog.records
        if record.name == "delivery.magazines.aerospike_client"
    ]
    assert "set evict-used-pct 0" in error
    assert "in memory only" in warning
    assert "one copy" in warning


async def test_no_record_has_the_namespaces_default_ttl(
    aerospike_server: AerospikeServer,
) -> None:
    configured(aerospike_server, "default-ttl=300")
    async with open_magazines(aerospike_server.url, farm="farm", client=CLIENT) as magazines:
        main = await magazines.create(main_magazine_name("orders"), shards=1)
        sideline = await magazines.create(sideline_name("orders"), shards=1)
        await magazines.save_queue_record(queue(shards=1))
        for magazine in (main, sideline):
            await magazine.load(entries("a", "b"))
            await magazine.fire(1)
            await magazine.sweep(0, epoch=EPOCH, older_than_s=3600)
        with closing(
            aerospike.client({"hosts": list(parse_aerospike_url(aerospike_server.url).hosts)})
        ) as client:
            ttls = {
                key[1]: meta["ttl"]
                for key, meta, _ in client.query(NAMESPACE).results()
                if not key[1].startswith("ready")
            }
    assert ttls == {
        f"{CLIENT}_data_set": NEVER, f"{CLIENT}_meta_set": NEVER, f"farm_{CLIENT}_ignis_queues": NEVER
    }  # fmt: skip
