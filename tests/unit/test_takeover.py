"""The five seconds within which a standby replaces one that hangs, and the deadlines that they are made of."""

import re
from pathlib import Path

import pytest

from delivery.elections.address import STANDBY_SESSION_S, for_standby, read_address
from delivery.elections.keeper import TRUST
from delivery.elections.postgres import Pulse
from delivery.elections.zookeeper import PING
from rooms.embedded.running import own_zookeeper
from rooms.storage.charge import PING_S, SILENCE_S, TAKEOVER_S

MARGIN_S = 1.0
"""What is left for the start of all parts, and for a machine that is busy."""


def test_the_lock_of_the_one_in_charge_is_free_in_time() -> None:
    """PostgreSQL ends the session after a silence; whatever comes next has to start first."""
    assert SILENCE_S + MARGIN_S < TAKEOVER_S
    assert PING_S * 4 < SILENCE_S, "a few late pings must not cost the charge"


def test_the_holds_of_the_one_in_charge_are_free_in_time_on_postgresql() -> None:
    pulse = Pulse()
    assert pulse.takeover_s == pulse.lease_s + pulse.ping_s
    assert pulse.takeover_s + MARGIN_S <= TAKEOVER_S
    assert pulse.trust_s <= 0.8 * pulse.lease_s, "a fifth is allowed for clocks that differ"
    assert pulse.ping_s * 4 < pulse.trust_s, "a few late pings must not cost the holds"


def test_the_holds_of_the_one_in_charge_are_free_in_time_on_zookeeper() -> None:
    """The server ends sessions at its ticks, and agrees to none shorter than two of them."""
    found = re.search(r"^tickTime=(\d+)$", own_zookeeper(Path("nowhere")).settings(), re.MULTILINE)
    assert found is not None
    tick_s = int(found[1]) / 1000
    assert 2 * tick_s <= STANDBY_SESSION_S
    assert STANDBY_SESSION_S + tick_s + MARGIN_S <= TAKEOVER_S
    assert PING * 4 < TRUST


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("zookeeper://a:2181,b:2181", STANDBY_SESSION_S),
        ("zookeeper://me:p%40ss@a:2181/root?refresh_s=7", STANDBY_SESSION_S),
        ("zookeeper://a:2181?session_s=10", 10.0),
    ],
)
def test_a_standby_has_a_short_session_unless_the_url_says_otherwise(url: str, expected: float) -> None:
    before, after = read_address(url), read_address(for_standby(url))
    assert after.session_s == expected
    assert (after.hosts, after.root, after.user, after.password, after.refresh_s) == (
        before.hosts,
        before.root,
        before.user,
        before.password,
        before.refresh_s,
    )


def test_an_election_in_postgresql_keeps_its_url() -> None:
    assert for_standby("postgresql://h/d?host=/tmp") == "postgresql://h/d?host=/tmp"
