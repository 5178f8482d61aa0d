"""The five seconds within which a standby replaces a hanging process, and their deadlines."""

import re
from pathlib import Path

import pytest

from delivery.leadership.postgres import HeartbeatConfig
from delivery.leadership.zookeeper import PING_FRACTION
from delivery.leadership.zookeeper_session import TRUST_FRACTION
from rooms.backend_urls import STANDBY_SESSION_S, parse_zookeeper_url, with_standby_session
from rooms.db.active_lock import PING_S, SESSION_TIMEOUT_S, TAKEOVER_S, TRY_S
from tests.support.local_servers import make_zookeeper

MARGIN_S = 1.0
"""Time for the start of all parts, and for a busy machine."""


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
