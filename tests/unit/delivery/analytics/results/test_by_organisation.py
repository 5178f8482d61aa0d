"""Test findings by organisation, and reconciliation totals."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from delivery.analytics.results.by_organisation import findings_by_organisation
from delivery.analytics.results.reader import Reconciliation, read_reconciliation
from rooms.db.queries.analytics import AnalysisFinding, Owners
from rooms.domain.ids import IdGenerator, OrganisationId, RoomId, SubscriptionId
from rooms.errors import TransientError
from tests.support.analysis_tables import write_tables

OURS, THEIRS = OrganisationId("ours"), OrganisationId("theirs")
ROOMS = {RoomId(1): OURS, RoomId(2): OURS, RoomId(3): THEIRS}
_ids = IdGenerator(lambda _: 5)
A, B, C, GONE = (_ids.generate(RoomId(room), 1_000) for room in (1, 2, 3, 4))
SUBSCRIBERS = {SubscriptionId(A): OURS, SubscriptionId(B): OURS, SubscriptionId(C): THEIRS}
OWNERS = Owners(rooms=ROOMS, subscribers=SUBSCRIBERS)
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
_ROLLED = {"published": 1, "latency_p50_ms": None}


def rollup(room: int, host: str, *, hours: int = 0) -> dict[str, Any]:
    return {
        "hour": NOON - timedelta(hours=hours), "room_id": room, "subscription_id": None, "event_type": "made",
        "target_host": host, **_ROLLED,
    }  # fmt: skip


def cause(attribute: str, value: str) -> dict[str, Any]:
    return {
        "attribute": attribute,
        "value": value,
        "inside": 1.0,
        "outside": 0.1,
        "log_odds": 3.0,
        "z": 9.0,
    }


def incident(number: int, *subscriptions: str, minute: int = 0) -> dict[str, Any]:
    began = NOON + timedelta(minutes=minute)
    causes = [
        cause("target_host", "a.test"),
        cause("target_host", "c.test"),
        cause("room_id", "3"),
        cause("http_status", "503"),
    ]
    return {
        "incident": number, "kind": "shared", "began": began, "began_from": began, "began_to": began,
        "ended": began + timedelta(minutes=5), "ended_from": began, "ended_to": None, "open": True,
        "subscriptions": list(subscriptions), "failures": 40, "attempts": 50, "late": 30, "sidelined": 3,
        "earlier": 2, "causes": causes, "changes": [],
    }  # fmt: skip


def shared(**tables: Sequence[dict[str, Any]]) -> list[AnalysisFinding]:
    return found_in(tables, OWNERS)


def found_in(
    tables: Mapping[str, Sequence[dict[str, Any]]], owners: Owners
) -> list[AnalysisFinding]:
    with TemporaryDirectory() as folder:
        return list(findings_by_organisation(write_tables(Path(folder), tables), owners))


def of(
    findings: Sequence[AnalysisFinding], organisation: OrganisationId, kind: str
) -> list[dict[str, Any]]:
    found = [one for one in findings if one.organisation == organisation and one.kind == kind]
    return [dict(one.body) for one in sorted(found, key=lambda one: one.number)]


def test_an_own_incident_is_complete_and_latest_first() -> None:
    findings = shared(incidents=[incident(1, A, B), incident(2, A, B, minute=30)])
    result = of(findings, OURS, "incidents")
    assert [one["incident"] for one in result] == [2, 1]
    assert result[1]["subscriptions"] == [A, B]
    assert (result[1]["failures"], result[1]["attempts"], result[1]["shared"]) == (40, 50, False)
    assert len(result[1]["causes"]) == 4
    assert of(findings, THEIRS, "incidents") == []
    assert {one.rooms for one in findings} == {(1, 2)}


def test_what_goes_on_has_no_end_for_filters() -> None:
    over = {**incident(2, A, B), "open": False}
    ended, goes_on = shared(incidents=[incident(1, A, B, minute=30), over])
    assert (goes_on.body["open"], goes_on.ended) == (True, None)
    assert (ended.body["open"], ended.ended) == (False, over["ended"])


def test_a_shared_incident_shows_nothing_of_others() -> None:
    rollups = [rollup(1, "a.test"), rollup(3, "c.test")]
    findings = shared(incidents=[incident(1, A, C)], rollups_hourly=rollups)
    (ours,), (theirs,) = of(findings, OURS, "incidents"), of(findings, THEIRS, "incidents")
    assert (ours["subscriptions"], theirs["subscriptions"]) == ([A], [C])
    assert ours["failures"] is ours["attempts"] is theirs["failures"] is None
    assert [one["value"] for one in ours["causes"]] == ["a.test", "503"]
    assert [one["value"] for one in theirs["causes"]] == ["c.test", "3", "503"]


def test_a_shared_incident_shows_networks_versions_and_changes_of_its_own() -> None:
    rollups = [rollup(1, "10.1.2.3"), {**rollup(3, "10.9.9.9"), "event_type": "paid"}]
    causes = [
        cause("network", "10.1.2.0/24"),
        cause("network", "10.9.9.0/24"),
        cause("event_version", "made 2"),
        cause("event_version", "paid 2"),
        cause("event_version", "7"),
        cause("worker_host", "machine-1"),
    ]
    changes = [
        {"at": NOON, "attribute": "policy_version", "value": "5", "subscription_id": A},
        {"at": NOON, "attribute": "policy_version", "value": "6", "subscription_id": C},
        {"at": NOON, "attribute": "event_version", "value": "paid 2", "subscription_id": None},
        {"at": NOON, "attribute": "worker", "value": "9", "subscription_id": None},
    ]
    row = {**incident(1, A, C), "causes": causes, "changes": changes}
    findings = shared(incidents=[row], rollups_hourly=rollups)
    (ours,), (theirs,) = of(findings, OURS, "incidents"), of(findings, THEIRS, "incidents")
    assert [one["value"] for one in ours["causes"]] == ["10.1.2.0/24", "made 2", "7"]
    assert [one["value"] for one in theirs["causes"]] == ["10.9.9.0/24", "paid 2", "7"]
    assert [one["value"] for one in ours["changes"]] == ["5"]
    assert [one["value"] for one in theirs["changes"]] == ["6", "paid 2"]
    assert ours["changes"][0]["at"] == NOON.isoformat()
    for totals in (ours, theirs):
        assert totals["late"] is totals["sidelined"] is totals["earlier"] is None
        assert (totals["open"], totals["ended_to"]) == (True, None)


def test_the_causes_of_a_shared_incident_do_not_give_its_totals() -> None:
    # With the share of the failures at its host, one would know how many there are elsewhere.
    findings = shared(incidents=[incident(1, A, C)], rollups_hourly=[rollup(1, "a.test")])
    for organisation in (OURS, THEIRS):
        (one,) = of(findings, organisation, "incidents")
        assert one["causes"]
        for found in one["causes"]:
            assert {
                value for name, value in found.items() if name not in {"attribute", "value"}
            } == {None}
    (own,) = of(shared(incidents=[incident(1, A, B)]), OURS, "incidents")
    assert [one["inside"] for one in own["causes"]] == [1.0] * 4


def test_the_causes_of_an_own_incident_do_not_give_the_attempts_of_others() -> None:
    # The share among the other attempts of these minutes counts those of other organisations.
    (one,) = of(shared(incidents=[incident(1, A, B)]), OURS, "incidents")
    assert [one["value"] for one in one["causes"]] == ["a.test", "c.test", "3", "503"]
    for found in one["causes"]:
        assert found["inside"] == 1.0
        of_others = {
            value for name, value in found.items() if name not in {"attribute", "value", "inside"}
        }
        assert of_others == {None}


@pytest.mark.parametrize(
    "others",
    [
        Owners(rooms={RoomId(3): THEIRS}),
        Owners(rooms={}, subscribers={SubscriptionId(C): THEIRS}),
    ],
)
def test_an_organisation_that_is_alone_sees_all_of_a_cause(others: Owners) -> None:
    rows = {"incidents": [incident(1, A, B)]}
    ours = {SubscriptionId(A): OURS, SubscriptionId(B): OURS}
    (alone,) = of(
        found_in(rows, Owners(rooms={RoomId(1): OURS}, subscribers=ours)), OURS, "incidents"
    )
    assert alone["causes"] == incident(1, A, B)["causes"]
    beside = Owners(
        rooms={RoomId(1): OURS, **others.rooms}, subscribers={**ours, **others.subscribers}
    )
    (known,) = of(found_in(rows, beside), OURS, "incidents")
    assert {one["outside"] for one in known["causes"]} == {None}


def test_an_incident_of_many_subscriptions_lists_a_hundred_and_counts_all() -> None:
    many = sorted(_ids.generate(RoomId(1), 2_000) for _ in range(5_000))
    owners = Owners(rooms=ROOMS, subscribers={SubscriptionId(one): OURS for one in many})
    (found,) = found_in({"incidents": [incident(1, *many)]}, owners)
    assert found.body["subscriptions"] == many[:100]
    assert found.body["subscriptions_total"] == 5_000
    assert not found.body["shared"]
    # Filters and restricted keys are compared with every one.
    assert sorted(found.subscriptions) == many


def test_an_own_incident_has_its_costs() -> None:
    (one,) = of(shared(incidents=[incident(1, A, B)]), OURS, "incidents")
    assert (one["late"], one["sidelined"], one["earlier"]) == (30, 3, 2)


def test_what_is_about_a_subscription_belongs_to_its_subscriber() -> None:
    guest = _ids.generate(RoomId(1), 2_000)
    shared_room = Owners(rooms=ROOMS, subscribers=SUBSCRIBERS | {SubscriptionId(guest): THEIRS})
    rows = {
        "incidents": [incident(1, A, B), incident(2, guest, minute=10), incident(3, A, minute=20)],
        "cofailures": [
            {"first_id": A, "second_id": guest, "q": 0.01, "phi": 0.9},
            {"first_id": guest, "second_id": C, "q": 0.01, "phi": 0.9},
        ],
        "rollups_hourly": [
            rollup(1, "a.test"),
            {**rollup(1, "guest.test"), "subscription_id": guest},
            {**rollup(1, "a.test"), "subscription_id": A},
        ],
        "reconciliation": [{"hour": NOON, "room_id": 1, "delivered": 7}],
    }
    findings = found_in(rows, shared_room)
    assert [one["subscriptions"] for one in of(findings, THEIRS, "incidents")] == [[guest]]
    assert [one["subscriptions"] for one in of(findings, OURS, "incidents")] == [[A], [A, B]]
    # Neither sees by the numbers how many incidents others had.
    assert [one["incident"] for one in of(findings, OURS, "incidents")] == [2, 1]
    assert [one["incident"] for one in of(findings, THEIRS, "incidents")] == [1]
    assert of(findings, OURS, "cofailures") == []
    assert [one["second_id"] for one in of(findings, THEIRS, "cofailures")] == [C]
    assert {one["target_host"] for one in of(findings, OURS, "rollups_hourly")} == {"a.test"}
    assert [one["target_host"] for one in of(findings, THEIRS, "rollups_hourly")] == ["guest.test"]
    assert of(findings, THEIRS, "reconciliation") == []
    assert len(of(findings, OURS, "reconciliation")) == 1


def test_a_common_incident_shows_a_subscriber_only_its_own_host() -> None:
    guest = _ids.generate(RoomId(1), 2_000)
    shared_room = Owners(rooms=ROOMS, subscribers=SUBSCRIBERS | {SubscriptionId(guest): THEIRS})
    rows = {
        "incidents": [incident(1, A, guest)],
        "rollups_hourly": [
            {**rollup(1, "a.test"), "subscription_id": A},
            {**rollup(1, "c.test"), "subscription_id": guest},
        ],
    }
    findings = found_in(rows, shared_room)
    (ours,), (theirs,) = of(findings, OURS, "incidents"), of(findings, THEIRS, "incidents")
    assert (ours["subscriptions"], theirs["subscriptions"]) == ([A], [guest])
    assert [one["value"] for one in ours["causes"]] == ["a.test", "503"]
    assert [one["value"] for one in theirs["causes"]] == ["c.test", "503"]
    assert ours["failures"] is theirs["failures"] is None


@pytest.mark.parametrize(("rooms", "seen"), [(ROOMS, None), ({RoomId(1): OURS}, 0.02)])
def test_a_pair_does_not_show_how_many_subscriptions_of_others_fail(
    rooms: Mapping[RoomId, OrganisationId], seen: float | None
) -> None:
    # Of the strongest pair q is p times the number of all pairs, those of others too.
    subscribers = {one: owner for one, owner in SUBSCRIBERS.items() if owner == OURS}
    pair = {"first_id": A, "second_id": B, "p": 0.0001, "q": 0.02, "phi": 0.9, "significant": True}
    findings = found_in({"cofailures": [pair]}, Owners(rooms=rooms, subscribers=subscribers))
    assert of(findings, OURS, "cofailures") == [{**pair, "q": seen}]


def test_ages_belong_to_the_subscriber_and_what_needs_a_decision_is_first() -> None:
    guest = _ids.generate(RoomId(1), 2_000)
    shared_room = Owners(rooms=ROOMS, subscribers=SUBSCRIBERS | {SubscriptionId(guest): THEIRS})

    def age(subscription: str | None, outcome: str, age_s: float) -> dict[str, Any]:
        return {
            "room_id": 1,
            "subscription_id": subscription,
            "outcome": outcome,
            "deliveries": 2,
            "oldest_since": NOON - timedelta(seconds=age_s),
            "oldest_age_s": age_s,
            "oldest_delivery_id": "d",
        }

    rows = [
        age(A, "waiting", 5),
        age(A, "stuck", 60),
        age(guest, "stuck", 90),
        age(None, "lost", 1),
    ]
    found = found_in({"ages": rows}, shared_room)
    ours, theirs = of(found, OURS, "ages"), of(found, THEIRS, "ages")
    assert [one["outcome"] for one in ours] == ["lost", "stuck", "waiting"]
    assert [one["oldest_age_s"] for one in theirs] == [90]
    assert theirs[0]["oldest_since"] == (NOON - timedelta(seconds=90)).isoformat()
    assert {one.subscriptions for one in found} == {(), (A,), (guest,)}


def test_a_guest_sees_no_counts_of_what_it_may_not_know_of() -> None:
    """Its filter was evaluated when a message was published, which it may not have yet."""
    guest, stopped = (_ids.generate(RoomId(1), at) for at in (2_000, 3_000))
    owners = Owners(
        rooms=ROOMS,
        subscribers=SUBSCRIBERS | {SubscriptionId(one): THEIRS for one in (guest, stopped)},
        stopped=frozenset({SubscriptionId(stopped), SubscriptionId(A)}),
    )
    unseen = {"enqueued": 4, "held": 3, "expired": 2, "cancelled": 1}
    seen = {"published": 0, "attempts": 5, "delivered": 5}
    ages = [
        {
            "room_id": 1, "subscription_id": subscription, "outcome": outcome, "deliveries": 2,
            "oldest_since": NOON, "oldest_age_s": 5, "oldest_delivery_id": "d",
        }
        for subscription in (A, guest, stopped)
        for outcome in ("waiting", "held", "stuck", "lost", "sidelined", "in_flight")
    ]  # fmt: skip
    tables = {
        "ages": ages,
        "rollups_hourly": [
            {**rollup(1, "x"), **seen, **unseen, "subscription_id": A},
            {**rollup(1, "x"), **seen, **unseen, "subscription_id": guest},
            {**rollup(1, "y"), **unseen, "published": 0, "subscription_id": guest},
        ],
    }
    found = found_in(tables, owners)
    (own,) = of(found, OURS, "rollups_hourly")
    assert {name: own[name] for name in unseen} == unseen
    (theirs,) = of(found, THEIRS, "rollups_hourly")
    assert {name: theirs[name] for name in unseen} == dict.fromkeys(unseen, 0)
    assert {name: theirs[name] for name in seen} == seen
    assert len(of(found, OURS, "ages")) == 6
    shown = {(one["subscription_id"], one["outcome"]) for one in of(found, THEIRS, "ages")}
    both = {(one, outcome) for one in (guest, stopped) for outcome in ("sidelined", "in_flight")}
    assert shown == both | {(guest, "stuck"), (guest, "lost")}


def test_pairs_across_organisations_and_deleted_rooms_are_hidden() -> None:
    pair = {"bad_both": 5, "q": 0.01, "phi": 0.9}
    pairs = [{"first_id": A, "second_id": C, **pair}, {"first_id": A, "second_id": GONE, **pair}]
    assert shared(cofailures=pairs, incidents=[incident(1, GONE)]) == []
    assert len(shared(cofailures=[{"first_id": A, "second_id": B, **pair}])) == 1


@pytest.mark.parametrize("table", ["rollups_hourly", "reconciliation"])
def test_hours_are_kept_for_two_weeks(table: str) -> None:
    """Each run writes them anew, and of a year they are millions."""
    hours = (0, 14 * 24 - 1, 14 * 24, 365 * 24)
    rows = [rollup(1, "a.test", hours=one) for one in hours]
    found = of(found_in({table: rows}, OWNERS), OURS, table)
    assert [one["hour"] for one in found] == [row["hour"].isoformat() for row in rows[:2]]


def test_an_hour_to_come_hides_no_other() -> None:
    # PostgreSQL's clock was wrong by a year for a moment.
    found = shared(
        rollups_hourly=[rollup(1, "a.test", hours=hours) for hours in (-365 * 24, 0, 24, 14 * 24)]
    )
    assert len(of(found, OURS, "rollups_hourly")) == 3


def test_old_hours_are_not_made_rows(tmp_path: Path) -> None:
    """A log of a year has millions of them. The newest come first, of one hour by room."""
    rows = [
        rollup(room, "a.test", hours=hours) for hours in range(0, 400 * 24, 24) for room in (1, 2)
    ]
    tables = write_tables(tmp_path, {"rollups_hourly": rows})
    found = list(tables.newest_rows("rollups_hourly", "hour", within=timedelta(days=14)))
    days = [NOON - timedelta(days=days) for days in range(14)]
    assert [(row["hour"], row["room_id"]) for row in found] == [
        (day, room) for day in days for room in (2, 1)
    ]
    assert len(list(tables.newest_rows("rollups_hourly", "hour"))) == 800
    assert len(tables.distinct("rollups_hourly", ("room_id", "target_host"))) == 2
    assert list(tables.newest_rows("absent", "hour")) == []


def test_tables_that_later_runs_replaced_are_an_outage_and_no_traceback(tmp_path: Path) -> None:
    tables = write_tables(tmp_path, {"rollups_hourly": [rollup(1, "a.test")]})
    reads: list[Callable[[], object]] = [
        lambda: tables.rows("rollups_hourly"),
        lambda: list(tables.each_row("rollups_hourly")),
        lambda: list(tables.newest_rows("rollups_hourly", "hour")),
        lambda: tables.distinct("rollups_hourly", ("room_id",)),
        lambda: list(tables.batches("rollups_hourly", ("room_id",))),
    ]
    folder = tmp_path / "rollups_hourly"
    # Files are deleted before their folder: what is left looks like a table without rows.
    for gone in (folder / "rows.parquet", folder):
        gone.rmdir() if gone.is_dir() else gone.unlink()
        for read in reads:
            with pytest.raises(TransientError, match="try again"):
                read()


def books(gaps: Sequence[dict[str, Any]] = (), /, **columns: int) -> Reconciliation:
    whole = {
        "fanout": 10,
        "enqueued": 10,
        "delivered": 10,
        "missing": 0,
        "lost": 0,
        "never_enqueued": 0,
        "unanchored": 0,
        "enqueued_twice": 0,
        "excess": 0,
    }
    row = {
        "hour": NOON,
        "room_id": 1,
        **whole,
        "residual_fanout": 0,
        "residual_outcome": 0,
        **columns,
    }
    return read_reconciliation(
        {"reconciliation": [row, {**row, "room_id": 2, **whole}], "gaps": list(gaps)}.__getitem__
    )


def test_totals_match_if_nothing_is_lost() -> None:
    result = books().describe()
    assert result["closed"]
    assert (result["lost"], result["fanout"], result["rooms"]) == (0, 20, [])


def test_totals_do_not_match() -> None:
    found = books(lost=2, missing=1).describe()
    assert (found["lost"], found["missing"]) == (2, 1)
    assert [one["room_id"] for one in books(missing=1).describe()["rooms"]] == [1]
    gap = {"writer_id": 1, "first_seq": 5, "last_seq": 6, "missing": 2, "before": False}
    assert books([gap]).log_rows_missing == 2
    for wrong in (
        {"lost": 1},
        {"missing": 1},
        {"never_enqueued": 1},
        {"unanchored": 1},
        {"enqueued_twice": 1},
        {"excess": 1},
        {"residual_outcome": -1},
    ):
        assert not books(**wrong).is_balanced, wrong
    assert not books([gap]).is_balanced
    assert books([{**gap, "before": True}]).is_balanced
