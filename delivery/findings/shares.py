"""What each organisation may know of what was found: of its own rooms everything, of others' nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final

from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of
from rooms.storage.analysis import Finding

Row = Mapping[str, Any]
Read = Callable[[str], Sequence[Row]]
"""The rows of a table of the analysis."""

_POLICY: Final = ("delay_ms", "multiplier", "redeliveries")
_EFFECT: Final = ("delivered", "attempts", "mean_wait_s", "p95_wait_s")
_EVERYBODYS: Final = frozenset({"error_class", "http_status"})
"""What a failure may have in common that names nobody."""
HOURS_KEPT: Final = timedelta(days=14)
"""How far back hours are kept in PostgreSQL; days are all kept."""


def share(read: Read, owners: Mapping[RoomId, OrganisationId]) -> Iterator[Finding]:
    """The findings of every organisation. A room that is gone has no owner: nobody sees it any more."""
    yield from _incidents(read, owners)
    yield from _of_rooms("reconciliation", read("reconciliation"), owners, "hour", timedelta(hours=1))
    yield from _pairs(read("cofailures"), owners)
    yield from _advice(read, owners)
    hours = read("rollups_hourly")
    newest = max((row["hour"] for row in hours), default=None)
    recent = [row for row in hours if newest is None or row["hour"] > newest - HOURS_KEPT]
    yield from _of_rooms("rollups_hourly", recent, owners, "hour", timedelta(hours=1))
    yield from _of_rooms("rollups_daily", read("rollups_daily"), owners, "day", timedelta(days=1))


def _incidents(read: Read, owners: Mapping[RoomId, OrganisationId]) -> Iterator[Finding]:
    known = _known(read("rollups_hourly"), owners)
    for number, row in enumerate(sorted(read("incidents"), key=lambda row: row["began"], reverse=True)):
        by_owner: dict[OrganisationId, list[str]] = {}
        for subscription in row["subscriptions"]:
            owner = owners.get(room_of(subscription))
            if owner is not None:
                by_owner.setdefault(owner, []).append(subscription)
        for owner, subscriptions in by_owner.items():
            # Of an incident that others take part in, an organisation learns nothing that it does not know of itself.
            alone = len(subscriptions) == len(row["subscriptions"])
            causes = [
                cause
                for cause in row["causes"] or ()
                if alone or cause["attribute"] in _EVERYBODYS or (cause["attribute"], cause["value"]) in known[owner]
            ]
            body = {
                "incident": row["incident"],
                "kind": row["kind"],
                "began": _text(row["began"]),
                "ended": _text(row["ended"]),
                "subscriptions": sorted(subscriptions),
                "shared": not alone,
                "failures": row["failures"] if alone else None,
                "attempts": row["attempts"] if alone else None,
                "causes": [dict(cause) for cause in causes],
            }
            yield _finding(owner, "incidents", number, subscriptions, body, began=row["began"], ended=row["ended"])


def _known(
    rollups: Sequence[Row], owners: Mapping[RoomId, OrganisationId]
) -> dict[OrganisationId, set[tuple[str, str]]]:
    known: dict[OrganisationId, set[tuple[str, str]]] = {owner: set() for owner in owners.values()}
    for row in rollups:
        owner = owners.get(row["room_id"])
        if owner is not None:
            known[owner] |= {(name, str(row[name])) for name in ("room_id", "event_type", "target_host")}
    return known


def _pairs(rows: Sequence[Row], owners: Mapping[RoomId, OrganisationId]) -> Iterator[Finding]:
    for number, row in enumerate(sorted(rows, key=lambda row: (row["q"], -(row["phi"] or 0.0)))):
        pair = [row["first_id"], row["second_id"]]
        both = {owners.get(room_of(one)) for one in pair}
        owner = both.pop()
        if owner is not None and not both:
            yield _finding(owner, "cofailures", number, pair, dict(row))


def _advice(read: Read, owners: Mapping[RoomId, OrganisationId]) -> Iterator[Finding]:
    fronts: dict[str, list[Row]] = {}
    for row in read("advice_front"):
        point = {"policy": _group(row, "policy", _POLICY), "expected": _group(row, "expected", _EFFECT)}
        fronts.setdefault(row["subscription_id"], []).append(point)
    hazards: dict[str, list[Row]] = {}
    for row in sorted(read("hazards"), key=lambda row: row["attempt"]):
        told = {name: row[name] for name in ("attempt", "attempts", "successes", "hazard", "mean_delay_ms")}
        hazards.setdefault(row["subscription_id"], []).append(told)
    for number, row in enumerate(sorted(read("advice"), key=lambda row: str(row["subscription_id"]))):
        subscription = row["subscription_id"]
        owner = owners.get(room_of(subscription))
        if owner is not None:
            body = {**advice_of(row), "front": fronts.get(subscription, []), "hazards": hazards.get(subscription, [])}
            yield _finding(owner, "advice", number, [subscription], body)


def advice_of(row: Row) -> dict[str, Any]:
    """A row of `advice` as people read it."""
    return {
        "subscription_id": row["subscription_id"],
        "deliveries": row["deliveries"],
        "hopeless": row["hopeless"],
        "deployed": _group(row, "deployed", _POLICY),
        "measured": _group(row, "measured", _EFFECT),
        "replayed": _group(row, "replayed", _EFFECT),
        "reproduced": row["reproduced"],
        "recommended": _group(row, "recommended", _POLICY),
        "expected": _group(row, "recommended", _EFFECT),
        "tested": _group(row, "tested", _EFFECT),
        "tested_deployed": _group(row, "tested_deployed", _EFFECT),
        "held_up": row["held_up"],
    }


def _group(row: Row, prefix: str, names: Sequence[str]) -> dict[str, Any] | None:
    found = {name: row[f"{prefix}_{name}"] for name in names}
    return None if all(value is None for value in found.values()) else found


def _of_rooms(
    kind: str, rows: Sequence[Row], owners: Mapping[RoomId, OrganisationId], at: str, length: timedelta
) -> Iterator[Finding]:
    """Rows of one room each, the newest first."""
    ordered = sorted(
        rows, key=lambda row: (_time(row[at]), *(str(row[name] or "") for name in _keys(row))), reverse=True
    )
    for number, row in enumerate(ordered):
        owner = owners.get(row["room_id"])
        if owner is not None:
            began = _time(row[at])
            body = {**row, at: _text(row[at])}
            subscription = row.get("subscription_id")
            yield Finding(
                organisation=owner,
                kind=kind,
                number=number,
                rooms=(RoomId(row["room_id"]),),
                subscriptions=() if subscription is None else (SubscriptionId(subscription),),
                began=began,
                ended=began + length,
                body=body,
            )


def _keys(row: Row) -> list[str]:
    return [name for name in ("room_id", "subscription_id", "event_type", "target_host") if name in row]


def _finding(
    owner: OrganisationId,
    kind: str,
    number: int,
    subscriptions: Sequence[str],
    body: Row,
    *,
    began: datetime | None = None,
    ended: datetime | None = None,
) -> Finding:
    return Finding(
        organisation=owner,
        kind=kind,
        number=number,
        rooms=tuple(sorted({room_of(one) for one in subscriptions})),
        subscriptions=tuple(SubscriptionId(one) for one in subscriptions),
        began=began,
        ended=ended,
        body=body,
    )


def _time(value: date | datetime) -> datetime:
    return value if isinstance(value, datetime) else datetime.combine(value, time(), UTC)


def _text(value: date | datetime) -> str:
    return value.isoformat()
