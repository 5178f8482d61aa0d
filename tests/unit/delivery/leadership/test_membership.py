"""Test local holds: what a member may do, and until when.

A standby replaces a hanging process within five seconds.
"""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from delivery.leadership import membership as membership_module
from delivery.leadership.local_process import is_dead, own_process
from delivery.leadership.membership import LocalHolds, MembershipTask
from delivery.leadership.postgres import HeartbeatConfig
from delivery.leadership.zookeeper import PING_FRACTION
from delivery.leadership.zookeeper_session import TRUST_FRACTION
from rooms.backend_urls import STANDBY_SESSION_S, parse_zookeeper_url, with_standby_session
from rooms.clock import BootTimeClock
from rooms.db.active_lock import PING_S, SESSION_TIMEOUT_S, TRY_S
from tests.support.local_servers import make_zookeeper
from tests.support.service import TAKEOVER_S

MARGIN_S = 1.0
"""Time for the start of all parts, and for a busy machine."""


class Watch:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> datetime:
        return datetime.now(UTC)

    def now_ms(self) -> int:
        return 0

    def monotonic(self) -> float:
        return self.at


@pytest.fixture
def watch() -> Watch:
    return Watch()


async def test_no_epoch_after_the_deadline(watch: Watch) -> None:
    tenure = LocalHolds(watch)
    tenure.add({"p": 7})
    assert tenure.epoch("p") is None, "no proof of life yet"
    tenure.renew(102.0)
    assert (tenure.epoch("p"), tenure.epoch("q")) == (7, None)
    watch.at = 101.999
    assert tenure.epoch("p") == 7
    watch.at = 102.0
    assert tenure.epoch("p") is None
    tenure.renew(103.0)
    assert tenure.epoch("p") == 7, "no other member was elected meanwhile"
    tenure.clear()
    tenure.renew(104.0)
    assert tenure.epoch("p") is None


async def test_every_change_wakes_all_waiters(watch: Watch) -> None:
    tenure = LocalHolds(watch)
    tenure.renew(200.0)

    async def notified_by(*changes: Callable[[], None]) -> bool:
        waiting = [tenure.wait_changed(), tenure.wait_changed()]
        for change in changes:
            change()
        done, late = await asyncio.wait(
            [asyncio.create_task(wait) for wait in waiting], timeout=0.05
        )
        for task in late:
            task.cancel()
        assert not done or not late
        return bool(done)

    assert await notified_by(lambda: tenure.add({"p": 1}))
    assert await notified_by(lambda: tenure.remove({"p", "other"}))
    assert not await notified_by(
        lambda: tenure.remove({"p"}),
        tenure.clear,
        lambda: tenure.renew(201.0),
        lambda: tenure.add({}),
    )
    tenure.add({"p": 2})
    assert await notified_by(tenure.clear)
    tenure.add({"p": 3})
    assert await notified_by(lambda: tenure.renew(300.0)), "what was over is back"


def test_the_clock_of_deadlines_includes_suspend() -> None:
    clock = BootTimeClock()
    awake_s = time.monotonic()
    assert clock.monotonic() >= awake_s, "it has counted at least what the machine was awake for"
    assert clock.monotonic() <= clock.monotonic()


def test_a_dead_process_of_this_machine_is_detected() -> None:
    own = own_process()
    assert own is not None
    assert not is_dead(own)
    assert not is_dead(None)
    place, pid, started = own.rsplit(" ", 2)
    assert is_dead(f"{place} {pid} {int(started) + 1}"), "another process had this number"
    assert not is_dead(f"elsewhere 1 {pid} {started}"), (
        "processes of another machine are not visible"
    )
    code = "from delivery.leadership.local_process import own_process; print(own_process(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        name = child.stdout.readline().decode().strip()
        assert not is_dead(name)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_dead(name), "its parent has not waited for it yet, and it is dead"
    assert is_dead(name)


class Stumbling(MembershipTask):
    """Fail twice with what no store raises, then have a hold."""

    def __init__(self) -> None:
        super().__init__(["leases"], member="one", clock=Watch(), leave_s=1.0)
        self.tries = 0
        self.joined = asyncio.Event()

    async def _participate(self) -> None:
        self.tries += 1
        self._local_holds.renew(110.0)
        self._local_holds.add({"leases": self.tries})
        if self.tries < 3:
            raise KeyError("partitions")
        self.joined.set()
        await asyncio.Event().wait()


async def test_a_member_that_fails_joins_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a membership its process would do nothing for good, and say nothing."""
    monkeypatch.setattr(membership_module, "REJOIN_S", 0.01)
    async with Stumbling() as membership:
        await asyncio.wait_for(membership.joined.wait(), 10)
        assert membership.epoch("leases") == 3
    assert membership.epoch("leases") is None
    assert caplog.text.count("left the election") == 2


def test_the_lock_of_a_hanging_process_is_free_in_time() -> None:
    """Add the time to start after PostgreSQL ended the silent session."""
    assert SESSION_TIMEOUT_S + TRY_S + MARGIN_S < TAKEOVER_S
    assert PING_S * 4 < SESSION_TIMEOUT_S, "a few late pings must not cost the charge"


def test_the_holds_of_a_hanging_process_are_free_in_time_on_postgresql() -> None:
    pulse = HeartbeatConfig()
    assert pulse.lease_s + pulse.ping_s + MARGIN_S <= TAKEOVER_S
    assert pulse.trust_s <= 0.8 * pulse.lease_s, "a fifth is allowed for clocks that differ"
    assert pulse.ping_s * 4 < pulse.trust_s, "a few late pings must not cost the holds"


def test_the_holds_of_a_hanging_process_are_free_in_time_on_zookeeper() -> None:
    """Consider that the server ends sessions at its ticks, and none shorter than two of them."""
    found = re.search(r"^tickTime=(\d+)$", make_zookeeper(Path("nowhere")).settings(), re.MULTILINE)
    assert found is not None
    tick_s = int(found[1]) / 1000
    assert 2 * tick_s <= STANDBY_SESSION_S
    assert STANDBY_SESSION_S + tick_s + MARGIN_S <= TAKEOVER_S
    assert PING_FRACTION * 4 < TRUST_FRACTION


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("zookeeper://a:2181,b:2181", STANDBY_SESSION_S),
        ("zookeeper://me:p%40ss@a:2181/root?refresh_s=7", STANDBY_SESSION_S),
        ("zookeeper://a:2181?session_s=10", 10.0),
    ],
)
def test_a_standby_has_a_short_session_unless_the_url_says_otherwise(
    url: str, expected: float
) -> None:
    before, after = parse_zookeeper_url(url), parse_zookeeper_url(with_standby_session(url))
    assert after.session_s == expected
    assert (after.hosts, after.root, after.user, after.password, after.refresh_s) == (
        before.hosts,
        before.root,
        before.user,
        before.password,
        before.refresh_s,
    )


def test_a_postgresql_election_keeps_its_url() -> None:
    assert with_standby_session("postgresql://h/d?host=/tmp") == "postgresql://h/d?host=/tmp"
