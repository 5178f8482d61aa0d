"""What is told to whom: the shares of organisations, and the books."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from delivery.findings.books import Books, books_of
from delivery.findings.shares import share
from rooms.domain.ids import IdMaker, OrganisationId, RoomId
from rooms.storage.analysis import Finding

OURS, THEIRS = OrganisationId("ours"), OrganisationId("theirs")
OWNERS = {RoomId(1): OURS, RoomId(2): OURS, RoomId(3): THEIRS}
_ids = IdMaker(lambda _: 5)
A, B, C, GONE = (_ids.make(RoomId(room), 1_000) for room in (1, 2, 3, 4))
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
_ROLLED = {"published": 1, "latency_p50_ms": None}


def rollup(room: int, host: str, *, hours: int = 0) -> dict[str, Any]:
    return {
        "hour": NOON - timedelta(hours=hours), "room_id": room, "subscription_id": None, "event_type": "made",
        "target_host": host, **_ROLLED,
    }  # fmt: skip


def cause(attribute: str, value: str) -> dict[str, Any]:
    return {"attribute": attribute, "value": value, "inside": 1.0, "outside": 0.1, "log_odds": 3.0, "z": 9.0}


def incident(number: int, *subscriptions: str, minute: int = 0) -> dict[str, Any]:
    began = NOON + timedelta(minutes=minute)
    causes = [
        cause("target_host", "a.test"),
        cause("target_host", "c.test"),
        cause("room_id", "3"),
        cause("http_status", "503"),
    ]
    return {
        "incident": number, "kind": "shared", "began": began, "ended": began + timedelta(minutes=5),
        "subscriptions": list(subscriptions), "failures": 40, "attempts": 50, "causes": causes,
    }  # fmt: skip


def shared(**tables: Sequence[dict[str, Any]]) -> list[Finding]:
    return list(share(lambda name: tables.get(name, []), OWNERS))


def of(findings: Sequence[Finding], organisation: OrganisationId, kind: str) -> list[dict[str, Any]]:
    found = [one for one in findings if one.organisation == organisation and one.kind == kind]
    return [dict(one.body) for one in sorted(found, key=lambda one: one.number)]


def test_an_incident_of_ones_own_is_told_whole_the_latest_first() -> None:
    findings = shared(incidents=[incident(1, A, B), incident(2, A, B, minute=30)])
    told = of(findings, OURS, "incidents")
    assert [one["incident"] for one in told] == [2, 1]
    assert told[1]["subscriptions"] == [A, B]
    assert (told[1]["failures"], told[1]["attempts"], told[1]["shared"]) == (40, 50, False)
    assert len(told[1]["causes"]) == 4
    assert of(findings, THEIRS, "incidents") == []
    assert {one.rooms for one in findings} == {(1, 2)}


def test_of_an_incident_with_others_nothing_of_theirs_is_told() -> None:
    rollups = [rollup(1, "a.test"), rollup(3, "c.test")]
    findings = shared(incidents=[incident(1, A, C)], rollups_hourly=rollups)
    (ours,), (theirs,) = of(findings, OURS, "incidents"), of(findings, THEIRS, "incidents")
    assert (ours["subscriptions"], theirs["subscriptions"]) == ([A], [C])
    assert ours["failures"] is ours["attempts"] is theirs["failures"] is None
    assert [one["value"] for one in ours["causes"]] == ["a.test", "503"]
    assert [one["value"] for one in theirs["causes"]] == ["c.test", "3", "503"]


def test_pairs_across_organisations_and_what_is_gone_are_told_to_nobody() -> None:
    pair = {"bad_both": 5, "q": 0.01, "phi": 0.9}
    pairs = [{"first_id": A, "second_id": C, **pair}, {"first_id": A, "second_id": GONE, **pair}]
    assert shared(cofailures=pairs, incidents=[incident(1, GONE)]) == []
    assert len(shared(cofailures=[{"first_id": A, "second_id": B, **pair}])) == 1


def test_hours_are_kept_for_two_weeks_from_the_last_one() -> None:
    findings = shared(rollups_hourly=[rollup(1, "a.test", hours=hours) for hours in (0, 14 * 24 - 1, 14 * 24)])
    assert len(of(findings, OURS, "rollups_hourly")) == 2


def books(gaps: Sequence[dict[str, Any]] = (), /, **columns: int) -> Books:
    whole = {
        "fanout": 10,
        "enqueued": 10,
        "delivered": 10,
        "missing": 0,
        "lost": 0,
        "never_enqueued": 0,
        "unanchored": 0,
    }
    row = {"hour": NOON, "room_id": 1, **whole, "residual_fanout": 0, "residual_outcome": 0, **columns}
    return books_of({"reconciliation": [row, {**row, "room_id": 2, **whole}], "gaps": list(gaps)}.__getitem__)


def test_the_books_close_where_nothing_is_lost() -> None:
    told = books().told()
    assert told["closed"]
    assert (told["lost"], told["fanout"], told["rooms"]) == (0, 20, [])


def test_the_books_do_not_close() -> None:
    assert books(lost=2, missing=1).told()["lost"] == 3
    assert [one["room_id"] for one in books(missing=1).told()["rooms"]] == [1]
    gap = {"writer_id": 1, "first_seq": 5, "last_seq": 6, "missing": 2, "before": False}
    assert books([gap]).log_rows_missing == 2
    for wrong in ({"lost": 1}, {"missing": 1}, {"never_enqueued": 1}, {"unanchored": 1}, {"residual_outcome": -1}):
        assert not books(**wrong).closed, wrong
    assert not books([gap]).closed
    assert books([{**gap, "before": True}]).closed
