"""Split findings by organisation, so that each one sees only what is its own.

What is about subscriptions belongs to their subscribers, and what is about a room to its owner.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final, Protocol

from delivery.analytics.findings.cells import network_of
from delivery.analytics.results.reader import oldest_first
from delivery.analytics.runs.tables import COUNTS
from rooms.db.queries.analytics import AnalysisFinding, Owners
from rooms.domain.ids import OrganisationId, RoomId, SubscriptionId, room_of

Row = Mapping[str, Any]
_ATTRIBUTES: Final = ("room_id", "event_type", "target_host")

_POLICY: Final = ("delay_ms", "multiplier", "redeliveries", "max_delay_ms", "jitter")
_EFFECT: Final = ("delivered", "attempts", "mean_wait_s", "p95_wait_s")
_HAZARD: Final = ("attempt", "attempts", "successes", "hazard", "mean_delay_ms")
_SHARED_ATTRIBUTES: Final = frozenset({"error_class", "http_status"})
"""Common causes that identify no organisation."""
_INCIDENT_TIMES: Final = ("began", "began_from", "began_to", "ended", "ended_from", "ended_to")
_INCIDENT_TOTALS: Final = ("failures", "attempts", "late", "sidelined", "earlier")
"""Totals of all subscriptions of an incident."""
_CONTRAST: Final = ("outside", "divergence", "log_odds", "z")
"""Measures of a cause that count the other attempts of its minutes, of all organisations."""
_EVIDENCE: Final = ("inside", *_CONTRAST)
"""Measures of a cause. Beside the failures of one organisation they give the totals of all."""
MAX_NAMED: Final = 100
"""Subscriptions that an incident lists; a page of the API has 200 incidents."""
_UNSEEN: Final = ("enqueued", "held", "expired", "cancelled")
"""Counts of rollups with what a subscriber in a room of others may not know of."""
_SENT: Final = frozenset({"in_flight", "sidelined"})
_OVERDUE: Final = frozenset({*_SENT, "stuck", "lost"})
"""Outcomes of open deliveries that such a subscriber may know of: while it is stopped, or not."""
HOURS_KEPT: Final = timedelta(days=14)
"""Age limit of hourly rows in PostgreSQL, where each run writes all; daily rows are all kept."""


class Tables(Protocol):
    """Read the tables of an analysis, as `AnalysisTables` does."""

    def rows(self, table: str) -> Sequence[Row]:
        """Return all rows: of a table that does not grow with the age of the log."""
        ...

    def each_row(self, table: str) -> Iterator[Row]:
        """Yield all rows, few of them in memory."""
        ...

    def newest_rows(self, table: str, by: str, *, within: timedelta | None = None) -> Iterator[Row]:
        """Yield the rows, the newest by a time first; `within` of the newest, if given."""
        ...

    def distinct(self, table: str, columns: Sequence[str]) -> Sequence[Row]:
        """Return each combination of values that some columns have."""
        ...


def findings_by_organisation(tables: Tables, owners: Owners) -> Iterator[AnalysisFinding]:
    """Return the findings of every organisation, without those of deleted rooms."""
    yield from _incident_findings(tables, owners)
    hour, day = timedelta(hours=1), timedelta(days=1)
    books = tables.newest_rows("reconciliation", "hour", within=HOURS_KEPT)
    yield from _room_findings("reconciliation", books, owners, "hour", hour)
    yield from _age_findings(tables.rows("ages"), owners)
    yield from _cofailure_findings(tables.rows("cofailures"), owners)
    yield from _advice_findings(tables, owners)
    hours = tables.newest_rows("rollups_hourly", "hour", within=HOURS_KEPT)
    yield from _room_findings("rollups_hourly", hours, owners, "hour", hour)
    days = tables.newest_rows("rollups_daily", "day")
    yield from _room_findings("rollups_daily", days, owners, "day", day)


def _incident_findings(tables: Tables, owners: Owners) -> Iterator[AnalysisFinding]:
    attributes = tables.distinct("rollups_hourly", ("subscription_id", *_ATTRIBUTES))
    known = _own_attributes(attributes, owners)
    rows = sorted(tables.rows("incidents"), key=lambda row: row["began"])
    # Each organisation counts its own: gaps in a common number would show those of others.
    ordinals: Counter[OrganisationId] = Counter()
    of_own = () if len(owners.organisations()) == 1 else _CONTRAST
    for number, row in zip(reversed(range(len(rows))), rows, strict=True):
        by_owner: dict[OrganisationId, list[str]] = {}
        for subscription in row["subscriptions"]:
            owner = owners.of_subscription(subscription)
            if owner is not None:
                by_owner.setdefault(owner, []).append(subscription)
        for owner, subscriptions in by_owner.items():
            ordinals[owner] += 1
            # A shared incident shows an organisation no attribute that is not its own.
            exclusive = len(subscriptions) == len(row["subscriptions"])
            own = known.get(owner, set())
            hidden = of_own if exclusive else _EVIDENCE
            body = {
                "incident": ordinals[owner],
                "kind": row["kind"],
                **{name: _optional_text(row[name]) for name in _INCIDENT_TIMES},
                "open": row["open"],
                "subscriptions": sorted(subscriptions)[:MAX_NAMED],
                "subscriptions_total": len(subscriptions),
                "shared": not exclusive,
                **{name: row[name] if exclusive else None for name in _INCIDENT_TOTALS},
                "causes": [
                    {**cause, **dict.fromkeys(hidden)}
                    for cause in row["causes"] or ()
                    if exclusive or _is_own(cause, own)
                ],
                "changes": [
                    {**change, "at": _iso_text(change["at"])}
                    for change in row["changes"] or ()
                    if exclusive
                    or (
                        _is_own(change, own)
                        if change["subscription_id"] is None
                        else change["subscription_id"] in subscriptions
                    )
                ],
            }
            yield _finding(
                owner,
                "incidents",
                number,
                subscriptions,
                body,
                began=row["began"],
                # What goes on has no end: a filter by time must find it after the log ends, too.
                ended=None if row["open"] else row["ended"],
            )


def _is_own(cause: Row, known: AbstractSet[tuple[str, str]]) -> bool:
    """Return True if an organisation knows a value anyway."""
    attribute, value = cause["attribute"], cause["value"]
    if attribute == "event_version":
        # A version is of its type, or a mere number.
        event_type, _, _ = value.rpartition(" ")
        return not event_type or ("event_type", event_type) in known
    return attribute in _SHARED_ATTRIBUTES or (attribute, value) in known


def _own_attributes(
    rollups: Sequence[Row], owners: Owners
) -> dict[OrganisationId, set[tuple[str, str]]]:
    known: dict[OrganisationId, set[tuple[str, str]]] = {}
    for row in rollups:
        owner = _owner_of_row(row, owners)
        if owner is not None:
            values = known.setdefault(owner, set())
            values |= {(name, str(row[name])) for name in _ATTRIBUTES}
            if (network := network_of(str(row["target_host"]))) is not None:
                values.add(("network", network))
    return known


def _owner_of_row(row: Row, owners: Owners) -> OrganisationId | None:
    subscription = row.get("subscription_id")
    if subscription is None:
        return owners.of_room(row["room_id"])
    return owners.of_subscription(str(subscription))


def _age_findings(rows: Sequence[Row], owners: Owners) -> Iterator[AnalysisFinding]:
    for number, row in enumerate(oldest_first(rows)):
        owner = _owner_of_row(row, owners)
        if owner is not None and _is_known_age(row, owners):
            subscription = row["subscription_id"]
            yield AnalysisFinding(
                organisation=owner,
                kind="ages",
                number=number,
                rooms=(RoomId(row["room_id"]),),
                subscriptions=() if subscription is None else (SubscriptionId(subscription),),
                began=row["oldest_since"],
                ended=None,
                body={**row, "oldest_since": _optional_text(row["oldest_since"])},
            )


def _is_known_age(row: Row, owners: Owners) -> bool:
    subscription = row["subscription_id"]
    if subscription is None or not owners.is_guest(subscription):
        return True
    return row["outcome"] in (_SENT if subscription in owners.stopped else _OVERDUE)


def _cofailure_findings(rows: Sequence[Row], owners: Owners) -> Iterator[AnalysisFinding]:
    is_alone = len(owners.organisations()) == 1
    for number, row in enumerate(sorted(rows, key=lambda row: (row["q"], -(row["phi"] or 0.0)))):
        pair = [row["first_id"], row["second_id"]]
        both = {owners.of_subscription(one) for one in pair}
        owner = both.pop()
        if owner is not None and not both:
            # It is corrected by the number of pairs, those of all organisations.
            body = dict(row) if is_alone else {**row, "q": None}
            yield _finding(owner, "cofailures", number, pair, body)


def _advice_findings(tables: Tables, owners: Owners) -> Iterator[AnalysisFinding]:
    fronts: dict[str, list[Row]] = {}
    for row in tables.rows("advice_front"):
        point = {
            "policy": _group(row, "policy", _POLICY),
            "expected": _group(row, "expected", _EFFECT),
        }
        fronts.setdefault(row["subscription_id"], []).append(point)
    advice = sorted(tables.rows("advice"), key=lambda row: str(row["subscription_id"]))
    # Every subscription with attempts has hazards, and few have advice.
    hazards: dict[str, list[Row]] = {row["subscription_id"]: [] for row in advice}
    for row in tables.each_row("hazards"):
        if (of := hazards.get(row["subscription_id"])) is not None:
            of.append({name: row[name] for name in _HAZARD})
    for number, row in enumerate(advice):
        subscription = row["subscription_id"]
        owner = owners.of_subscription(subscription)
        if owner is not None:
            body = {
                **advice_body(row),
                "front": fronts.get(subscription, []),
                "hazards": sorted(hazards[subscription], key=lambda one: one["attempt"]),
            }
            yield _finding(owner, "advice", number, [subscription], body)


def advice_body(row: Row) -> dict[str, Any]:
    """Nest a row of `advice` for the API."""
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
        "expected_range": _interval_group(row),
        "tested": _group(row, "tested", _EFFECT),
        "tested_deployed": _group(row, "tested_deployed", _EFFECT),
        "held_up": row["held_up"],
    }


def _interval_group(row: Row) -> dict[str, Any] | None:
    names = [name for name in _EFFECT if f"recommended_{name}_low" in row]
    found = {
        name: {end: row[f"recommended_{name}_{end}"] for end in ("low", "high")} for name in names
    }
    known = any(one["low"] is not None for one in found.values())
    return found if known else None


def _group(row: Row, prefix: str, names: Sequence[str]) -> dict[str, Any] | None:
    # Tables of an earlier version have no cap and no jitter.
    found = {name: row.get(f"{prefix}_{name}") for name in names}
    return None if all(value is None for value in found.values()) else found


def _room_findings(
    kind: str,
    rows: Iterator[Row],
    owners: Owners,
    at: str,
    length: timedelta,
) -> Iterator[AnalysisFinding]:
    """Return the rows of single rooms and subscriptions, in their order.

    A filter is evaluated when a message is published. So its subscriber in a room of others sees no
    count of what it may not have yet, and no row with nothing else.
    """
    for number, row in enumerate(rows):
        owner = _owner_of_row(row, owners)
        if owner is not None:
            began = _start_time(row[at])
            body = {**row, at: _iso_text(row[at])}
            subscription = row.get("subscription_id")
            if subscription is not None and owners.is_guest(subscription):
                body |= dict.fromkeys(_UNSEEN, 0)
                if not any(body.get(name) for name in COUNTS):
                    continue
            yield AnalysisFinding(
                organisation=owner,
                kind=kind,
                number=number,
                rooms=(RoomId(row["room_id"]),),
                subscriptions=() if subscription is None else (SubscriptionId(subscription),),
                began=began,
                ended=began + length,
                body=body,
            )


def _finding(
    owner: OrganisationId,
    kind: str,
    number: int,
    subscriptions: Sequence[str],
    body: Row,
    *,
    began: datetime | None = None,
    ended: datetime | None = None,
) -> AnalysisFinding:
    return AnalysisFinding(
        organisation=owner,
        kind=kind,
        number=number,
        rooms=tuple(sorted({room_of(one) for one in subscriptions})),
        subscriptions=tuple(SubscriptionId(one) for one in subscriptions),
        began=began,
        ended=ended,
        body=body,
    )


def _start_time(value: date | datetime) -> datetime:
    return value if isinstance(value, datetime) else datetime.combine(value, time(), UTC)


def _optional_text(value: datetime | None) -> str | None:
    return None if value is None else _iso_text(value)


def _iso_text(value: date | datetime) -> str:
    return value.isoformat()
