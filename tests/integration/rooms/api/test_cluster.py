"""Test the cluster's resources for operators."""

import asyncio
import time

import pytest

from delivery.leadership.postgres import PostgresElection
from rooms.api import readiness
from rooms.api.readiness import LeaderHealth
from rooms.db.queue.lookahead import schedule_shard_count
from rooms.domain.cluster import ClusterView
from rooms.errors import ElectionUnavailableError
from rooms.outages import OUTAGES, REQUESTS_REFUSED, Dependency, dependency_of
from rooms.ports import Membership
from tests.integration.rooms.api.conftest import Api
from tests.support.installation import until

DUTIES = ["upkeep/jobs", "upkeep/leases"]


async def test_the_cluster_shows_the_leader_and_shares_of_work(api: Api) -> None:
    empty = (await api.call("GET", "/cluster", "platform")).json()
    assert (empty["leader"], empty["members"]) == (None, [])
    assert empty["leader_absent_seconds"] > 0
    async with (
        PostgresElection(api.url, member="one", clock=api.services.clock) as election,
        election.join(DUTIES) as membership,
    ):
        await until(lambda: has_all(membership), "everything to be held")
        found = (await api.call("GET", "/cluster", "platform")).json()
    (member,) = found["members"]
    assert (found["leader"], found["leader_absent_seconds"]) == ("one", 0)
    assert found["epoch"] > empty["epoch"]
    assert (member["name"], member["leads"], member["partitions"]) == ("one", True, DUTIES)
    assert member["pid"] > 0
    assert member["host"]
    assert member["since"].endswith("Z")


async def has_all(membership: Membership) -> bool:
    return all(membership.epoch(duty) for duty in DUTIES)


async def test_the_cluster_is_for_operators_of_the_installation(api: Api) -> None:
    for key, status in (
        ("publish", 403),
        ("manage", 403),
        ("operate", 403),
        ("admin", 403),
        ("platform", 200),
    ):
        assert (await api.call("GET", "/cluster", key)).status_code == status, key


async def test_the_number_of_due_buckets_is_read_and_changed(api: Api) -> None:
    assert (await api.call("GET", "/cluster/buckets", "platform")).json() == {
        "count": 8,
        "used": False,
    }
    answer = await api.call("PUT", "/cluster/buckets", "platform", json={"count": 21})
    assert (answer.status_code, answer.json()) == (200, {"count": 21, "used": False})
    assert await schedule_shard_count(api.services.writer) == 21
    for count in (0, 257, "many", None):
        answer = await api.call("PUT", "/cluster/buckets", "platform", json={"count": count})
        assert [error["field"] for error in answer.json()["errors"]] == ["count"], answer.text
    assert (await api.call("GET", "/cluster/buckets", "platform")).json()["count"] == 21


class Faulty:
    """Fake an election with a view from the test."""

    def __init__(self) -> None:
        self.answer: ClusterView | None = None

    async def view(self) -> ClusterView:
        if self.answer is None:
            raise ElectionUnavailableError("away")
        return self.answer

    def join(self, partitions: object) -> Membership:
        raise AssertionError("the API takes no part")


async def test_absence_grows_while_the_store_does_not_answer() -> None:
    """Check that an unreachable store counts as no leader, from the start of its outage."""
    now = 100.0
    election = Faulty()
    leadership = LeaderHealth(election, lambda: now, dependency=Dependency.ELECTION)
    now += 5
    assert await leadership.absent_s() == 5
    election.answer = ClusterView(leader="one", epoch=1, leader_absent_s=0, members=())
    now += 2
    assert await leadership.absent_s() == 0
    election.answer = None
    now += 7
    assert await leadership.absent_s() == 7
    with pytest.raises(ElectionUnavailableError):
        await leadership.view()
    election.answer = ClusterView(leader=None, epoch=1, leader_absent_s=60, members=())
    now += 2
    assert await leadership.absent_s() == 60
    now += 0.5
    election.answer = ClusterView(leader="two", epoch=2, leader_absent_s=0, members=())
    assert await leadership.absent_s() == 60, "looked again within a second"


async def test_each_outage_has_its_lines_though_no_probe_fails_meanwhile(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refuse requests and the election's member in two outages, with an hour of probes between."""
    now = 1000.0
    monkeypatch.setattr(OUTAGES, "_monotonic", lambda: now)
    away, joining = ElectionUnavailableError("away"), "attempts to join the election failed"
    election = Faulty()
    election.answer = ClusterView(leader="one", epoch=1, leader_absent_s=0, members=())
    leadership = LeaderHealth(election, lambda: now, dependency=Dependency.ELECTION)
    for _ in range(2):
        OUTAGES.record_failure(away, REQUESTS_REFUSED)
        OUTAGES.record_failure(away, joining)
        now += 5
        OUTAGES.record_failure(away, REQUESTS_REFUSED)
        OUTAGES.record_success(joining)
        for _ in range(3600):
            now += 1
            await leadership.absent_s()
    counts = "2 requests were refused, 1 attempts to join the election failed"
    assert [record.getMessage() for record in caplog.records] == [
        "The election's store is away: away",
        f"The election's store is back after 15 s; {counts} meanwhile",
    ] * 2


async def test_postgresql_is_named_where_its_election_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(readiness, "_TIMEOUT_S", 0.01)
    election = Hanging()
    for dependency in (Dependency.POSTGRESQL, Dependency.ELECTION):
        leadership = LeaderHealth(election, time.monotonic, dependency=dependency)
        with pytest.raises(ElectionUnavailableError) as raised:
            await leadership.view()
        assert dependency_of(raised.value) is dependency


class Hanging(Faulty):
    """Fake an election whose store does not answer."""

    async def view(self) -> ClusterView:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets the event")


async def test_an_unreachable_store_is_503(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.services.leader_health, "_election", Faulty())
    answer = await api.call("GET", "/cluster", "platform")
    assert answer.status_code == 503
    assert "ELECTION_URL" in answer.json()["detail"]
    assert "retry-after" in answer.headers
