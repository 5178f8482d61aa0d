"""Replays of large messages and batches: how much the process holds, and PostgreSQL reads."""

import gc
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from delivery.maintenance import replay as replay_module
from delivery.maintenance.jobs import JobRunner
from delivery.maintenance.replay import ReplayJob
from delivery.maintenance.task import ShouldContinue
from rooms.clock import SystemClock
from rooms.db.jobs.jobs import JobQueue
from rooms.db.jobs.replay import PAGE_BYTES, PastMessage, ReplayPage, ReplayQueries
from rooms.db.writer import LogWriter
from rooms.domain.ids import first_id
from tests.integration.delivery.maintenance.test_replay import given, published, replay, result
from tests.integration.delivery.maintenance.test_service import always
from tests.support.installation import Installation
from tests.support.sandboxes import idle_sandbox

MESSAGE = b'{"text": "%s"}' % (b"x" * 256 * 1024)
COUNT = 30


class WatchedQueries(ReplayQueries):
    """Keep the number of messages and of bytes of each page."""

    def __init__(self, writer: LogWriter) -> None:
        super().__init__(writer)
        self.pages: list[tuple[int, int]] = []

    async def page(self, *arguments: Any, **settings: Any) -> ReplayPage:
        page = await super().page(*arguments, **settings)
        self.pages.append((len(page.messages), size_of(page.messages)))
        return page


def size_of(messages: Sequence[PastMessage]) -> int:
    return sum(len(past.payload or b"") + len(past.headers or b"") for past in messages)


def jobs_of(writer: LogWriter, queries: ReplayQueries) -> JobRunner:
    queue = JobQueue(writer)
    duty = ReplayJob(
        queue, queries, SystemClock(), on_queued=lambda _: None, sandbox=idle_sandbox()
    )
    return JobRunner(queue, duty.handlers(), poll_s=0.01)


@pytest.mark.parametrize("keys", [{}, {"business_keys": ["k"]}])
async def test_a_page_of_a_filtered_replay_has_a_bound_in_bytes(
    installation: Installation, writer: LogWriter, keys: dict[str, Any]
) -> None:
    copies = await published(installation, COUNT, payload=MESSAGE)
    await installation.rows("UPDATE messages SET business_key = 'k'")
    subscription = await installation.subscribe(filter="size(payload.text) > 10")
    identity = await replay(installation, subscription, **keys)
    queries = WatchedQueries(writer)
    await jobs_of(writer, queries).run(always)
    assert max(size for _, size in queries.pages) <= PAGE_BYTES + len(MESSAGE)
    assert sum(count for count, _ in queries.pages) == COUNT
    assert set(await given(installation, subscription)) == {copy.message_id for copy in copies}
    assert await result(installation, identity) == {"replayed": COUNT}


async def test_a_page_has_one_message_however_large_it_is(
    installation: Installation, writer: LogWriter
) -> None:
    await published(installation, 2, payload=b'"%s"' % (b"x" * PAGE_BYTES))
    subscription = await installation.subscribe(filter="size(payload) > 10")
    identity = await replay(installation, subscription)
    queries = WatchedQueries(writer)
    await jobs_of(writer, queries).run(always)
    assert [count for count, _ in queries.pages] == [1, 1]
    assert await result(installation, identity) == {"replayed": 2}


async def test_without_a_filter_large_messages_do_not_shorten_a_page(
    installation: Installation, writer: LogWriter
) -> None:
    await published(installation, COUNT, payload=MESSAGE)
    subscription = await installation.subscribe()
    await replay(installation, subscription)
    queries = WatchedQueries(writer)
    await jobs_of(writer, queries).run(always)
    assert queries.pages == [(COUNT, 0)]


async def test_a_replay_that_waits_for_its_rate_holds_no_payload(
    installation: Installation, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    await published(installation, 3, payload=b'{"text": "xxxxxxxxxxxx"}', headers={"a": "b"})
    subscription = await installation.subscribe(filter="size(payload.text) > 10")
    held: list[int] = []

    async def sleep(_seconds: float, _go_on: ShouldContinue) -> bool:
        held.append(size_of([one for one in gc.get_objects() if type(one) is PastMessage]))
        return True

    monkeypatch.setattr(replay_module, "sleep_unless_stopped", sleep)
    await replay(installation, subscription, rate_per_s=100)
    await jobs_of(writer, ReplayQueries(writer)).run(always)
    assert len(await given(installation, subscription)) == 3
    assert held
    assert max(held) == 0


async def deliveries_read(installation: Installation, writer: LogWriter) -> int:
    await writer.run("SELECT 0, pg_stat_force_next_flush()::text, 1", {})
    read = "SELECT sum(idx_tup_fetch)::int8 FROM pg_stat_user_tables WHERE relname ~ '^deliveries_'"
    return int(await installation.value(read))


async def test_messages_of_one_moment_share_a_look_at_its_deliveries(
    installation: Installation, writer: LogWriter
) -> None:
    """Each of a batch would otherwise read the deliveries of the whole batch."""
    await installation.publish_many(await installation.subscribe(), 1000)
    subscription = await installation.subscribe()
    identity = await replay(installation, subscription)
    before = await deliveries_read(installation, writer)
    await jobs_of(writer, ReplayQueries(writer)).run(always)
    after = await deliveries_read(installation, writer)
    assert await result(installation, identity) == {"replayed": 1000}
    assert after - before < 20_000
    page = await ReplayQueries(writer).page(
        subscription,
        first_id(0),
        first_id(1 << 47),
        requested_at=datetime.now(UTC),
        with_payload=False,
        foreign=True,
    )
    assert len(page.messages) == 200
    assert await deliveries_read(installation, writer) - after < 5_000
