"""Test which requests the committer accepts, and which of those that exclude each other it writes."""

import asyncio
import contextlib
import statistics
from collections.abc import Iterator, Sequence
from random import Random

import pytest

from rooms.burst_pacing import BurstPacer
from rooms.db.publish.insert import NO_CONFLICT, InsertConflict
from rooms.db.publish.request_rows import CallerId, InsertRows
from rooms.domain.ids import OrganisationId, RoomId
from rooms.errors import StorageRefusedError, StorageUnavailableError
from rooms.publishing.commit_outcomes import PLAN_CHANGED, CommitOutcome, IdReused, KeyReused
from rooms.publishing.group_commit import (
    LARGE_BYTES,
    LARGE_ROWS,
    PACED_ROWS,
    GroupCommitter,
    WriteGroup,
    is_large,
)
from rooms.publishing.pending_requests import (
    FULL_WAITING_BYTES,
    MAX_WAITING_BYTES,
    MOST_WAITING_BYTES,
    SMALL_REQUEST_BYTES,
)
from rooms.publishing.request_queues import MAX_ROWS
from tests.support import virtual_time

ROOM = RoomId(1)
KIB = 1024
MIB = 1024 * 1024


def a_request(
    key: str | None = None,
    *,
    body: bytes = b"1",
    ids: Sequence[str] = (),
    organisation: str = "ours",
    plan_version: int = 1,
    size: int = 0,
) -> InsertRows:
    rows = InsertRows(ROOM, plan_version)
    rows.key, rows.request_hash, rows.answer = key, body, b"answer to " + body
    rows.organisation = OrganisationId(organisation)
    rows.row_count, rows.payload_bytes = 1, size
    rows.caller_ids = [CallerId(one, bytes(20), body, b"message of " + body) for one in ids]
    return rows


class Store:
    """Write groups as PostgreSQL does: all of one, or nothing and what was in conflict."""

    def __init__(self, *, plan_version: int = 1) -> None:
        self.plan_version = plan_version
        self.keys: dict[tuple[int, str], tuple[bytes, bytes]] = {}
        self.ids: dict[tuple[int, str], tuple[bytes, bytes]] = {}
        self.written: list[InsertRows] = []
        self.writes = 0
        self.errors: list[Exception] = []
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, group: Sequence[InsertRows]) -> InsertConflict:
        await self.open.wait()
        self.writes += 1
        if self.errors:
            raise self.errors.pop(0)
        keys = [key for one in group for key in one.unique_keys()]
        assert len(keys) == len(set(keys))
        conflict = InsertConflict(
            stale_plans=frozenset(
                (ROOM, one.plan_version) for one in group if one.plan_version != self.plan_version
            ),
            used_keys={
                (ROOM, one.key): self.keys[ROOM, one.key]
                for one in group
                if one.key is not None and (ROOM, one.key) in self.keys
            },
            used_ids={
                (ROOM, name.caller_id): self.ids[ROOM, name.caller_id]
                for one in group
                for name in one.caller_ids
                if (ROOM, name.caller_id) in self.ids
            },
        )
        if not conflict.has_conflict:
            self.written += group
            for one in group:
                if one.key is not None:
                    self.keys[ROOM, one.key] = one.request_hash, one.answer
                for name in one.caller_ids:
                    self.ids[ROOM, name.caller_id] = name.content_hash, name.answer
        return conflict


async def outcomes_of(
    store: Store, requests: Sequence[InsertRows]
) -> list[CommitOutcome | BaseException]:
    """Return the outcomes of requests that arrive while another one is written."""
    store.open.clear()
    async with GroupCommitter(store, on_commit=lambda _: None) as committer:
        first = asyncio.create_task(committer.submit(a_request(plan_version=store.plan_version)))
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(committer.submit(one)) for one in requests]
        await asyncio.sleep(0)
        store.open.set()
        await asyncio.gather(first, return_exceptions=True)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert not committer._keys
        assert committer._waiting_bytes == committer._queues.count == 0
        assert not committer._bytes_behind
    return outcomes


async def test_many_requests_with_one_key_take_one_write() -> None:
    """Those of others are in the same group, and no group has a conflict."""
    store = Store()
    requests = [a_request("k", body=b"%d" % (number % 3)) for number in range(4000)]
    others = [a_request(organisation="theirs") for _ in range(10)]
    found = await outcomes_of(store, requests + others)
    assert found == [None] + [KeyReused(b"0", b"answer to 0")] * 3999 + [None] * 10
    assert store.writes == 2
    assert len(store.written) == 12


async def test_many_requests_with_a_used_key_take_one_write() -> None:
    store = Store()
    store.keys[ROOM, "k"] = b"hash", b"first"
    found = await outcomes_of(store, [a_request("k") for _ in range(1000)])
    assert found == [KeyReused(b"hash", b"first")] * 1000
    assert store.writes == 2


async def test_many_requests_with_one_id_take_one_write() -> None:
    store = Store()
    requests = [a_request(ids=["a", "b"])] + [a_request(ids=["b", "c"]) for _ in range(1000)]
    found = await outcomes_of(store, requests)
    assert found == [None] + [IdReused({"b": (b"1", b"message of 1")})] * 1000
    assert store.writes == 2


async def test_many_requests_with_a_key_and_a_used_id_take_one_write() -> None:
    store = Store()
    store.ids[ROOM, "a"] = b"hash", b"first"
    found = await outcomes_of(store, [a_request("k", ids=["a", "b"]) for _ in range(1000)])
    assert found == [IdReused({"a": (b"hash", b"first")})] * 1000
    assert store.writes == 2


async def test_what_the_first_does_not_decide_is_written_next() -> None:
    """The second has the key but not the used id, and the third another plan."""
    store = Store()
    store.ids[ROOM, "a"] = b"hash", b"first"
    stale = a_request("k", plan_version=2)
    found = await outcomes_of(store, [a_request("k", ids=["a"]), stale, a_request("k", body=b"2")])
    assert found == [IdReused({"a": (b"hash", b"first")}), PLAN_CHANGED, None]


async def test_a_request_waits_for_whichever_has_one_of_its_keys() -> None:
    """The second waits for the first, the third for the second, and the last for none."""
    store = Store()
    store.ids[ROOM, "x"] = b"hash", b"first"
    requests = [
        a_request("k", ids=["x"]),
        a_request("k", ids=["y"], body=b"2"),
        a_request("k", ids=["z"], body=b"3"),
        a_request("other", ids=["y"], body=b"4"),
        a_request(ids=["free"]),
    ]
    found = await outcomes_of(store, requests)
    assert found[0] == IdReused({"x": (b"hash", b"first")})
    assert sorted(one.request_hash for one in store.written if one.key) in (
        [b"2"],
        [b"3", b"4"],
    )
    assert found[4] is None
    for request, outcome in zip(requests, found, strict=True):
        assert (outcome is None) == (request in store.written)


async def test_a_plan_that_changed_is_reported_to_all_with_the_key() -> None:
    store = Store(plan_version=2)
    found = await outcomes_of(store, [a_request("k") for _ in range(1000)])
    assert found == [PLAN_CHANGED] * 1000
    assert store.writes == 2


@pytest.mark.parametrize("error", [StorageUnavailableError("cut"), StorageRefusedError("full")])
async def test_an_outage_is_reported_to_all_with_the_key(error: Exception) -> None:
    store = Store()
    store.errors = [error] * 2
    found = await outcomes_of(store, [a_request("k") for _ in range(1000)])
    assert [type(one) for one in found] == [type(error)] * 1000
    assert store.writes == 2
    assert store.written == []


async def test_a_request_that_postgresql_cannot_take_fails_alone() -> None:
    store = Store()
    store.errors = [ValueError("not text")] * 2
    found = await outcomes_of(store, [a_request("k"), a_request("k"), a_request("k")])
    assert isinstance(found[0], ValueError)
    assert found[1:] == [None, KeyReused(b"1", b"answer to 1")]


async def test_requests_that_wait_for_another_are_committed_at_the_end() -> None:
    store = Store()
    store.ids[ROOM, "a"] = b"hash", b"first"
    store.open.clear()
    async with GroupCommitter(store, on_commit=lambda _: None) as committer:
        tasks = [
            asyncio.create_task(committer.submit(one))
            for one in (a_request("k", ids=["a"]), a_request("k", body=b"2"), a_request("k"))
        ]
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(store.open.set)
    outcomes = await asyncio.gather(*tasks)
    assert outcomes[1:] == [None, KeyReused(b"2", b"answer to 2")]


async def test_an_organisation_with_too_much_waiting_is_refused_and_no_other() -> None:
    store = Store()
    store.open.clear()
    outcomes: list[CommitOutcome | Exception] = []
    async with GroupCommitter(store, on_commit=lambda _: None) as committer:
        committer.submit_nowait(a_request(), outcomes.append)
        await asyncio.sleep(0)
        accepted = 1 + MAX_WAITING_BYTES // (16 * MIB)
        for _ in range(accepted - 1):
            committer.submit_nowait(a_request(size=16 * MIB - 8 * KIB), outcomes.append)
        with pytest.raises(StorageRefusedError):
            committer.submit_nowait(a_request(size=64 * KIB), outcomes.append)
        for number in range(20):
            committer.submit_nowait(
                a_request(organisation=f"other {number % 10}", size=256 * 1024), outcomes.append
            )
        # One is accepted whatever its size; further ones only up to an equal part.
        committer.submit_nowait(a_request(organisation="third", size=16 * MIB), outcomes.append)
        committer.submit_nowait(a_request(organisation="fourth", size=4 * MIB), outcomes.append)
        with pytest.raises(StorageRefusedError):
            committer.submit_nowait(a_request(organisation="third", size=1), outcomes.append)
        committer.submit_nowait(a_request(organisation="fourth", size=4 * MIB), outcomes.append)
        with pytest.raises(StorageRefusedError):
            committer.submit_nowait(a_request(organisation="fourth", size=4 * MIB), outcomes.append)
        for organisation in ("third", "ours"):
            with pytest.raises(StorageRefusedError):
                committer.submit_nowait(
                    a_request(organisation=organisation, size=4 * MIB), outcomes.append
                )
        store.open.set()
    assert outcomes == [None] * (accepted + 23)


async def test_a_request_that_waits_for_no_other_is_accepted_whatever_its_size() -> None:
    store = Store()
    store.open.clear()
    outcomes: list[CommitOutcome | Exception] = []
    async with GroupCommitter(store, on_commit=lambda _: None) as committer:
        committer.submit_nowait(a_request(size=2 * MAX_WAITING_BYTES), outcomes.append)
        await asyncio.sleep(0)
        committer.submit_nowait(a_request(size=2 * MAX_WAITING_BYTES), outcomes.append)
        with pytest.raises(StorageRefusedError):
            committer.submit_nowait(
                a_request(organisation="other", size=MAX_WAITING_BYTES), outcomes.append
            )
        store.open.set()
    assert outcomes == [None, None]


@contextlib.contextmanager
def opened_at_the_end(store: Store) -> Iterator[None]:
    """Let a store write in the end, also if an assertion fails: the committer waits for it."""
    try:
        yield
    finally:
        store.open.set()


def of_rows(rows: int, organisation: str) -> InsertRows:
    """Return a request that makes so many rows."""
    one = a_request(organisation=organisation)
    one.row_count = rows
    return one


@pytest.mark.parametrize(
    ("waiting", "request_rows"),
    [
        # One message to 131,100 recipients, which are more than all that may wait.
        ({"other": 1}, 131_101),
        # The same while its own organisation and others publish little.
        ({"other": 1, "ours": 1}, 131_101),
        ({"other": 90_000}, 66_000),
        ({f"other {number}": 6_700 for number in range(19)}, 6_601),
        ({f"other {number}": 13_400 for number in range(19)}, 131_101),
    ],
)
async def test_a_request_is_accepted_while_little_of_its_organisation_waits(
    waiting: dict[str, int], request_rows: int
) -> None:
    store = Store()
    store.open.clear()
    outcomes: list[CommitOutcome | Exception] = []
    async with GroupCommitter(store, on_commit=lambda _: None) as committer:
        with opened_at_the_end(store):
            committer.submit_nowait(a_request(), outcomes.append)
            await asyncio.sleep(0)
            for organisation, rows in waiting.items():
                committer.submit_nowait(of_rows(rows, organisation), outcomes.append)
            committer.submit_nowait(of_rows(request_rows, "ours"), outcomes.append)
            with pytest.raises(StorageRefusedError):
                committer.submit_nowait(of_rows(66_000, "ours"), outcomes.append)
    assert outcomes == [None] * (2 + len(waiting))


async def test_a_large_message_gets_through_while_others_keep_publishing() -> None:
    """Check one message to 131,100 recipients while something always waits."""
    store = Store()
    store.open.clear()
    outcomes: list[CommitOutcome | Exception] = []
    accepted = 0
    async with GroupCommitter(store, on_commit=lambda _: None) as committer:
        with opened_at_the_end(store):
            committer.submit_nowait(a_request(), outcomes.append)
            await asyncio.sleep(0)
            for number in range(1000):
                with contextlib.suppress(StorageRefusedError):
                    committer.submit_nowait(of_rows(5_000, f"other {number % 40}"), outcomes.append)
                if committer._waiting_bytes > MAX_WAITING_BYTES and not accepted:
                    committer.submit_nowait(of_rows(131_101, "ours"), outcomes.append)
                    accepted += 1
            assert accepted == 1
    assert set(outcomes) == {None}


async def test_what_waits_has_a_bound_however_many_organisations_publish() -> None:
    store = Store()
    store.open.clear()
    largest = 131_101
    async with GroupCommitter(store, on_commit=lambda _: None) as committer:
        with opened_at_the_end(store):
            committer.submit_nowait(a_request(), lambda _: None)
            await asyncio.sleep(0)
            refused = 0
            for number in range(300):
                try:
                    committer.submit_nowait(of_rows(largest, f"{number % 100}"), lambda _: None)
                except StorageRefusedError:
                    refused += 1
            assert refused == 298
            assert committer._waiting_bytes <= MOST_WAITING_BYTES + (largest + 1) * KIB
            # A small one is within an equal part.
            committer.submit_nowait(a_request(organisation="small"), lambda _: None)


def fill(committer: GroupCommitter, organisation: str, size: int) -> int:
    """Submit requests of an organisation until one is refused; return how many were not."""
    for accepted in range(1000):
        try:
            committer.submit_nowait(a_request(organisation=organisation, size=size), lambda _: None)
        except StorageRefusedError:
            return accepted
    raise AssertionError("nothing is refused")


async def test_parts_of_organisations_that_arrive_one_after_another_have_a_bounded_sum() -> None:
    """Each fills its part while it is still large."""
    store = Store()
    store.open.clear()
    size, organisations = 256 * KIB, 100
    async with GroupCommitter(store, on_commit=lambda _: None) as committer:
        with opened_at_the_end(store):
            committer.submit_nowait(a_request(), lambda _: None)
            await asyncio.sleep(0)
            accepted = [fill(committer, f"{number}", size) for number in range(organisations)]
            assert min(accepted) == 1
            most = MOST_WAITING_BYTES + organisations * (size + 2 * KIB)
            assert committer._waiting_bytes <= most


async def test_single_requests_of_many_organisations_have_a_bounded_sum() -> None:
    """Each is as large as its part; above a ceiling only small ones find a place."""
    store = Store()
    store.open.clear()
    organisations = 400
    async with GroupCommitter(store, on_commit=lambda _: None) as committer:
        with opened_at_the_end(store):
            committer.submit_nowait(a_request(), lambda _: None)
            await asyncio.sleep(0)
            for number in range(organisations):
                part = MAX_WAITING_BYTES // (number + 1) - 2 * KIB
                if fill(committer, f"{number}", part) == 0:
                    small = SMALL_REQUEST_BYTES - 2 * KIB
                    assert fill(committer, f"{number}", small) == 1
            most = FULL_WAITING_BYTES + organisations * SMALL_REQUEST_BYTES
            assert MOST_WAITING_BYTES < committer._waiting_bytes <= most


async def test_what_waits_for_a_key_counts_as_waiting() -> None:
    store = Store()
    store.open.clear()
    outcomes: list[CommitOutcome | Exception] = []
    async with GroupCommitter(store, on_commit=lambda _: None) as committer:
        for _ in range(1 + MAX_WAITING_BYTES // (16 * MIB)):
            committer.submit_nowait(a_request("k", size=16 * MIB - 8 * KIB), outcomes.append)
            await asyncio.sleep(0)
        with pytest.raises(StorageRefusedError):
            committer.submit_nowait(a_request("k", size=16 * MIB), outcomes.append)
        store.open.set()
    assert outcomes[0] is None
    assert len(outcomes) == 1 + MAX_WAITING_BYTES // (16 * MIB)


def test_a_request_is_large_by_its_rows_or_its_bytes() -> None:
    batch = a_request(size=16 * MIB)
    batch.row_count = 128
    assert is_large(batch)
    assert not is_large(a_request(size=LARGE_BYTES))
    many = a_request()
    many.row_count = LARGE_ROWS + 1
    assert is_large(many)


def taking(commit_s: float, sizes: list[int]) -> WriteGroup:
    """Return a write that takes so long, and adds the size of each group to `sizes`."""

    async def write(group: Sequence[InsertRows]) -> InsertConflict:
        sizes.append(len(group))
        await asyncio.sleep(commit_s)
        return NO_CONFLICT

    return write


async def publish_in_turn(
    publishers: int, *, commit_s: float, pause_s: float, requests: int = 60
) -> tuple[float, list[int]]:
    """Publish one request after another; return the mean time of an answer and each group's size.

    A publisher comes back up to `pause_s` after its answer.
    """
    random = Random(7)
    sizes: list[int] = []
    taken: list[float] = []
    loop = asyncio.get_running_loop()

    async def publish(committer: GroupCommitter) -> None:
        for _ in range(requests):
            began = loop.time()
            await committer.submit(a_request())
            taken.append(loop.time() - began)
            await asyncio.sleep(random.uniform(0, pause_s))

    async with GroupCommitter(taking(commit_s, sizes), on_commit=lambda _: None) as committer:
        await asyncio.gather(*(publish(committer) for _ in range(publishers)))
    assert sum(sizes) == publishers * requests
    return statistics.fmean(taken), sizes


@pytest.mark.parametrize("publishers", [2, 3, 8, 16, 64])
@pytest.mark.parametrize(("commit_s", "pause_s"), [(0.001, 0.002), (0.003, 0.003), (0.02, 0.005)])
def test_commits_wait_for_publishers_that_come_back(
    publishers: int, commit_s: float, pause_s: float
) -> None:
    """Each commit that took only those that came first would leave the others to the next one."""
    _, sizes = virtual_time.run(publish_in_turn(publishers, commit_s=commit_s, pause_s=pause_s))
    assert statistics.fmean(sizes) > 0.95 * publishers, sizes


@pytest.mark.parametrize("publishers", [8, 32, 64])
def test_a_wait_to_which_nearly_all_come_back_is_repeated(publishers: int) -> None:
    """On a busy machine a few are late each time, and would make commits wait no more."""
    _, sizes = virtual_time.run(publish_in_turn(publishers, commit_s=0.003, pause_s=0.0034))
    assert statistics.fmean(sizes) > 0.75 * publishers, sizes


@pytest.mark.parametrize("publishers", [2, 16, 64])
def test_commits_do_not_wait_for_publishers_that_stay_away(publishers: int) -> None:
    """An answer takes as long as two commits at most: the one under way, and its own."""
    commit_s = 0.002
    mean_s, _ = virtual_time.run(
        publish_in_turn(publishers, commit_s=commit_s, pause_s=0.1, requests=200)
    )
    assert mean_s < 2 * commit_s


def test_a_lone_publisher_waits_for_no_other() -> None:
    async def publish() -> float:
        async with GroupCommitter(Store(), on_commit=lambda _: None) as committer:
            for _ in range(200):
                await committer.submit(a_request())
        return asyncio.get_running_loop().time()

    assert virtual_time.run(publish()) == 0


def test_a_request_long_after_a_burst_waits_for_no_other() -> None:
    commit_s = 0.001

    async def publish() -> float:
        loop = asyncio.get_running_loop()

        async with GroupCommitter(taking(commit_s, []), on_commit=lambda _: None) as committer:
            await asyncio.gather(*(committer.submit(a_request()) for _ in range(16)))
            await asyncio.sleep(1)
            began = loop.time()
            await committer.submit(a_request())
            return loop.time() - began

    assert virtual_time.run(publish()) == pytest.approx(commit_s)


def test_full_groups_wait_for_no_more() -> None:
    """A hundred publishers of a hundred rows each: twenty requests fill a group."""
    commit_s, publishers, requests = 0.01, 100, 20
    sizes: list[int] = []

    async def publish_all() -> float:
        async def publish(committer: GroupCommitter) -> None:
            for _ in range(requests):
                one = a_request()
                one.row_count = MAX_ROWS // 20
                await committer.submit(one)
                await asyncio.sleep(0.002)

        async with GroupCommitter(taking(commit_s, sizes), on_commit=lambda _: None) as committer:
            await asyncio.gather(*(publish(committer) for _ in range(publishers)))
        return asyncio.get_running_loop().time()

    took_s = virtual_time.run(publish_all())
    assert max(sizes) == 20
    assert took_s < 1.02 * commit_s * len(sizes)


class Resting(BurstPacer):
    """Pace bulk work with rests of this length."""

    def __init__(self, rest_s: float) -> None:
        super().__init__(schedule_s=lambda: (0.0, 0.0))
        self.rest = rest_s
        self.units: list[float] = []

    @property
    def is_pacing(self) -> bool:
        return self.rest > 0

    def rest_s(self, took_s: float) -> float:
        self.units.append(took_s)
        return self.rest


def committer_of_bulk(rest_s: float, sizes: list[int]) -> GroupCommitter:
    """Return a committer whose commits take 10 ms; it adds the size of each group to `sizes`."""
    return GroupCommitter(
        taking(0.01, sizes), on_commit=lambda _: None, pacer=Resting(rest_s), is_bulk=True
    )


def times_of_commits(*organisations: str, pacer: BurstPacer, is_bulk: bool = True) -> list[float]:
    """Submit a request of each organisation as soon as the one before is committed."""
    commit_s = 0.01
    ended: list[float] = []

    async def publish() -> None:
        loop = asyncio.get_running_loop()
        async with GroupCommitter(
            taking(commit_s, []), on_commit=lambda _: None, pacer=pacer, is_bulk=is_bulk
        ) as committer:
            for organisation in organisations:
                await committer.submit(a_request(organisation=organisation))
                ended.append(loop.time())

    virtual_time.run(publish())
    return ended


def test_groups_of_bulk_work_rest() -> None:
    pacer = Resting(1.0)
    assert times_of_commits("ours", "ours", "ours", pacer=pacer) == pytest.approx(
        [0.01, 1.02, 2.03]
    )
    assert pacer.units[:2] == pytest.approx([0.01, 0.01])


def test_other_groups_do_not_rest() -> None:
    pacer = Resting(1.0)
    assert times_of_commits("ours", "ours", pacer=pacer, is_bulk=False) == pytest.approx(
        [0.01, 0.02]
    )
    assert times_of_commits("ours", "ours", pacer=Resting(0.0)) == pytest.approx([0.01, 0.02])


def test_a_rest_ends_for_another_organisation() -> None:
    ended = times_of_commits("ours", "theirs", "theirs", pacer=Resting(1.0))
    assert ended == pytest.approx([0.01, 0.02, 1.03])


def test_what_waits_for_another_organisation_needs_no_rest() -> None:
    """Both wait when the group is committed; it has room for the first of them."""

    async def publish() -> float:
        loop = asyncio.get_running_loop()
        async with committer_of_bulk(1.0, []) as committer:
            requests = [a_request(organisation=name) for name in ("ours", "theirs")]
            for one in requests:
                one.row_count = PACED_ROWS
            await asyncio.gather(*map(committer.submit, requests))
            return loop.time()

    assert virtual_time.run(publish()) == pytest.approx(0.02)


def test_the_end_waits_for_no_rest() -> None:
    async def publish() -> float:
        loop = asyncio.get_running_loop()
        async with committer_of_bulk(1.0, []) as committer:
            await committer.submit(a_request())
            late = asyncio.ensure_future(committer.submit(a_request()))
            await asyncio.sleep(0.1)
        await late
        return loop.time()

    assert virtual_time.run(publish()) == pytest.approx(0.12)


@pytest.mark.parametrize(("rest_s", "most"), [(0.001, PACED_ROWS), (0.0, MAX_ROWS)])
def test_paced_groups_are_smaller(rest_s: float, most: int) -> None:
    sizes: list[int] = []

    async def publish() -> None:
        async with committer_of_bulk(rest_s, sizes) as committer:
            requests = [a_request() for _ in range(3 * MAX_ROWS // 100)]
            for one in requests:
                one.row_count = 100
            await asyncio.gather(*map(committer.submit, requests))

    virtual_time.run(publish())
    assert max(sizes) == most // 100
    assert sum(sizes) == 3 * MAX_ROWS // 100


def test_organisations_of_all_groups_are_noted() -> None:
    pacer = BurstPacer(schedule_s=lambda: (0.0, 0.0))
    times_of_commits("ours", "ours", pacer=pacer, is_bulk=False)
    assert not pacer.has_several_organisations
    times_of_commits("theirs", pacer=pacer)
    assert pacer.has_several_organisations
