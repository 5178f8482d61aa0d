"""Find incidents: which subscriptions failed together, and when.

The failing minutes of a subscription form sessions. A subscription that fails all the time is
chronic, is reported separately, and joins no incident. Attempts that succeeded before and after a
session bound how much earlier it may have begun and how much later it may have ended. Sessions that
can have begun together and ended together form one incident. A subscription with little traffic
thus joins the outage it was part of, and two overlapping outages stay separate.

Co-failure has found the related subscriptions: the significant pairs over the whole log. Related
sessions may differ more at their edges and have holes, as in partial outages. A session unrelated
to an incident of related subscriptions is excluded, as the match is chance. If the log is too short
for significant pairs, only the minutes decide.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from delivery.analytics.spark.counts import FailureSeries

_GAP: Final = 3
"""Minutes without failures (or with fewer) that a session bridges."""
_SILENT_GAP: Final = 20
"""Minutes without any attempt that a session bridges."""
_TOLERANCE: Final = 2
"""Minutes by which clock skew and rounding may separate starts and ends."""
_MIN_FAILURES: Final = 3
_MIN_FIRST_FAILURES: Final = 2
"""First failures in a session: retries of one undeliverable delivery are no outage."""
_MIN_SHARE: Final = 0.5
_MIN_OVERLAP: Final = 0.5
_MIN_WITHIN: Final = 0.75
"""Share of a session's minutes inside an incident of related subscriptions to join it."""
_MIN_SHARED: Final = 2
_SLICES: Final = 12
_CHRONIC_MINUTES: Final = 0.25
_CHRONIC_SLICES: Final = 0.6
"""Share of the log's twelfths with a quarter of their minutes failing that makes it chronic."""
_MIN_SINGLE_MINUTES: Final = 5
"""Bad minutes from which the failure of a single subscription is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureSession:
    """A subscription failed from minute `begin` to `end`, at most from `earliest` to `latest`."""

    key: int
    begin: int
    end: int
    earliest: int
    latest: int
    failures: int
    attempts: int
    first_failures: int

    @property
    def slack(self) -> int:
        """Return the uncertainty of both ends in minutes."""
        return self.begin - self.earliest + self.latest - self.end


@dataclass(slots=True, kw_only=True)
class Incident:
    """Sessions that failed together. `kind`: shared (several subscriptions), single, or chronic."""

    kind: str
    begin: int
    end: int
    sessions: list[FailureSession] = field(default_factory=list)

    @property
    def keys(self) -> tuple[int, ...]:
        """Return the subscriptions, ascending."""
        return tuple(sorted({session.key for session in self.sessions}))

    @property
    def failures(self) -> int:
        """Return the failed attempts of all sessions."""
        return sum(session.failures for session in self.sessions)


RelatedSubscriptions = Mapping[int, AbstractSet[int]]


def related_subscriptions(magazine_cache: Iterable[tuple[int, int]]) -> RelatedSubscriptions:
    """Return the related subscriptions of each; an empty set marks one that fails separately."""
    found: dict[int, set[int]] = {}
    for first, second in magazine_cache:
        found.setdefault(first, set()).add(second)
        found.setdefault(second, set()).add(first)
    return found


def find_incidents(
    series: Iterable[FailureSeries], *, first: int, minutes: int, related: RelatedSubscriptions
) -> list[Incident]:
    """Return the incidents by start; the log has `minutes` from minute `first`."""
    found: list[FailureSession] = []
    incidents: list[Incident] = []
    others: dict[int, FailureSeries] = {}
    for one in series:
        own = failure_sessions(one)
        if own and _is_chronic(one, first, minutes):
            incidents.append(_chronic_incident(one, own))
        else:
            others[one.key] = one
            found += own
    often = [key for key, count in Counter(session.key for session in found).items() if count > 1]
    related = {**dict.fromkeys(often, frozenset[int]()), **related}
    for incident in _merge_overlapping(_group_sessions(found, related), related):
        _add_related_failures(incident, others, related)
        if len(incident.keys) > 1:
            incidents.append(incident)
        elif incident.end - incident.begin + 1 >= _MIN_SINGLE_MINUTES:
            incident.kind = "single"
            incidents.append(incident)
    return sorted(incidents, key=lambda incident: (incident.begin, incident.end, incident.keys))


def failure_sessions(series: FailureSeries) -> list[FailureSession]:
    """Return sessions with at least three failures that are at least half of the attempts."""
    failing = series.failing_mask()
    places = np.flatnonzero(failing)
    found: list[FailureSession] = []
    start = 0
    for at in range(1, len(places) + 1):
        if at < len(places) and _is_bridged(series, int(places[at - 1]), int(places[at])):
            continue
        session = _to_session(series, int(places[start]), int(places[at - 1]))
        enough = session.failures >= _MIN_FAILURES and session.first_failures >= _MIN_FIRST_FAILURES
        if enough and session.failures >= _MIN_SHARE * session.attempts:
            found.append(session)
        start = at
    return found


def _is_bridged(series: FailureSeries, before: int, after: int) -> bool:
    gap = int(series.minutes[after] - series.minutes[before]) - 1
    return gap <= _GAP or (after == before + 1 and gap <= _SILENT_GAP)


def _to_session(series: FailureSeries, first: int, last: int) -> FailureSession:
    begin, end = int(series.minutes[first]), int(series.minutes[last])
    # Without an attempt before or after it, the session may extend beyond the log.
    earliest = int(series.minutes[first - 1]) if first else begin - _SILENT_GAP
    latest = int(series.minutes[last + 1]) if last + 1 < len(series.minutes) else end + _SILENT_GAP
    some = slice(first, last + 1)
    return FailureSession(
        key=series.key,
        begin=begin,
        end=end,
        earliest=max(earliest, begin - _SILENT_GAP),
        latest=min(latest, end + _SILENT_GAP),
        failures=int(series.failures[some].sum()),
        attempts=int(series.attempts[some].sum()),
        first_failures=int(series.first_failures[some].sum()),
    )


def _is_chronic(series: FailureSeries, first: int, minutes: int) -> bool:
    """Return True if a quarter of the minutes fail in most twelfths of the log with attempts."""
    width = max(minutes / _SLICES, 1.0)
    slices = ((series.minutes - first) / width).astype(np.int64)
    active = np.bincount(slices, minlength=_SLICES)
    failing = np.bincount(slices, weights=series.failing_mask(), minlength=_SLICES)
    tried = active > 0
    chronic = failing[tried] >= _CHRONIC_MINUTES * active[tried]
    return int(tried.sum()) > _SLICES // 2 and float(chronic.mean()) >= _CHRONIC_SLICES


def _chronic_incident(series: FailureSeries, sessions: list[FailureSession]) -> Incident:
    return Incident(
        kind="chronic", begin=int(series.minutes[0]), end=int(series.minutes[-1]), sessions=sessions
    )


def _group_sessions(
    sessions: Sequence[FailureSession], related: RelatedSubscriptions
) -> list[Incident]:
    """Group sessions that can have begun and ended together, the most certain first."""
    incidents: list[Incident] = []
    for session in sorted(sessions, key=lambda s: (s.slack, -s.failures, s.begin, s.key)):
        fitting = [incident for incident in incidents if _fits(session, incident, related)]
        if fitting:
            best = max(
                fitting,
                key=lambda one: (
                    _is_related(session.key, one, related),
                    _overlap(session, one),
                    -one.begin,
                ),
            )
            _add_sessions(best, [session])
        else:
            incidents.append(
                Incident(kind="shared", begin=session.begin, end=session.end, sessions=[session])
            )
    return incidents


def _add_sessions(incident: Incident, sessions: Iterable[FailureSession]) -> None:
    incident.sessions += sessions
    incident.begin, incident.end = _median_span(incident.sessions)


def _is_related(key: int, incident: Incident, related: RelatedSubscriptions) -> bool:
    """Return True if the subscription is in the incident or related to one in it."""
    return any(other == key or other in related.get(key, ()) for other in incident.keys)


def _merge_overlapping(
    incidents: Sequence[Incident], related: RelatedSubscriptions
) -> list[Incident]:
    """Merge related incidents inside each other, as partial outages split sessions."""
    kept: list[Incident] = []
    for incident in sorted(incidents, key=lambda one: (one.begin - one.end, one.begin, one.keys)):
        whole = [
            one
            for one in kept
            if all(_is_related(key, one, related) for key in incident.keys)
            and _is_within(incident, one)
        ]
        if whole:
            whole[0].sessions += incident.sessions
        else:
            kept.append(incident)
    return kept


def _is_within(span: FailureSession | Incident, incident: Incident) -> bool:
    shared = (
        min(span.end, incident.end + _TOLERANCE) - max(span.begin, incident.begin - _TOLERANCE) + 1
    )
    return shared >= _MIN_WITHIN * (span.end - span.begin + 1)


def _add_related_failures(
    incident: Incident, series: Mapping[int, FailureSeries], related: RelatedSubscriptions
) -> None:
    """Add related subscriptions that failed over the whole incident without forming a session."""
    there = incident.keys
    if len(there) < _MIN_SHARED:
        return
    for key in sorted({other for one in there for other in related.get(one, ())} - set(there)):
        one = series.get(key)
        if one is None or sum(other in related[key] for other in there) * 2 < len(there):
            continue
        inside = (one.minutes >= incident.begin - 1) & (one.minutes <= incident.end + 1)
        places = np.flatnonzero(inside & (one.failures > 0))
        if len(places):
            session = _to_session(one, int(places[0]), int(places[-1]))
            enough = (
                session.failures >= _MIN_FAILURES and session.first_failures >= _MIN_FIRST_FAILURES
            )
            if enough and session.failures >= _MIN_SHARE * int(one.attempts[inside].sum()):
                incident.sessions.append(session)


def _median_span(sessions: Sequence[FailureSession]) -> tuple[int, int]:
    """Return the median start and end, which a late or skewed session does not move."""
    return int(np.median([session.begin for session in sessions])), int(
        np.median([session.end for session in sessions])
    )


def _fits(session: FailureSession, incident: Incident, related: RelatedSubscriptions) -> bool:
    if _is_unrelated(session, incident, related):
        return False
    begun = session.earliest - _TOLERANCE <= incident.begin <= session.begin + _TOLERANCE
    ended = session.end - _TOLERANCE <= incident.end <= session.latest + _TOLERANCE
    meets = (
        session.begin <= incident.end + _TOLERANCE and incident.begin <= session.end + _TOLERANCE
    )
    return meets and ((begun and ended) or _overlap(session, incident) > _MIN_OVERLAP)


def _is_unrelated(
    session: FailureSession, incident: Incident, related: RelatedSubscriptions
) -> bool:
    """Return True if either side has related subscriptions, and none on the other side."""
    kinless = not any(related.get(key) for key in (session.key, *incident.keys))
    return (
        not kinless and session.key in related and not _is_related(session.key, incident, related)
    )


def _overlap(session: FailureSession, incident: Incident) -> float:
    """Return the common minutes as a share of the minutes in either."""
    shared = min(session.end, incident.end) - max(session.begin, incident.begin) + 1
    either = max(session.end, incident.end) - min(session.begin, incident.begin) + 1
    return max(shared, 0) / either
