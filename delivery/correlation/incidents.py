"""Incidents: when which subscriptions failed together.

A subscription's failing minutes become sessions. What fails all the time is chronic and is told apart, so that it joins no
incident. Of a session is known when it was seen to begin and end, and how much earlier and later that may have been (up to
the last attempt that went well before it, and the first after it): sessions that can have begun together and ended together
are one incident. So a subscription with little traffic joins the outage it was part of, and two outages that overlap stay two.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from delivery.correlation.series import Series

_GAP: Final = 3
"""Minutes without failures (or with fewer) that a session bridges."""
_SILENT_GAP: Final = 20
"""Minutes without any attempt that a session bridges."""
_TOLERANCE: Final = 2
"""Minutes by which clocks and minutes' edges may put beginnings and ends apart."""
_LEAST_FAILURES: Final = 3
_LEAST_FRESH: Final = 2
"""Deliveries that failed for the first time: the retries of one that nobody can deliver are no outage."""
_LEAST_SHARE: Final = 0.5
_LEAST_OVERLAP: Final = 0.5
_SLICES: Final = 12
_CHRONIC_MINUTES: Final = 0.25
_CHRONIC_SLICES: Final = 0.6
"""A quarter of its minutes failing, in this share of the log's twelfths, makes a subscription chronic."""
_ALONE: Final = 5
"""Bad minutes from which a subscription that failed alone is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A subscription failed from minute `begin` to `end`, both included; it may have been from `earliest` to `latest`."""

    key: int
    begin: int
    end: int
    earliest: int
    latest: int
    failures: int
    attempts: int
    fresh: int

    @property
    def slack(self) -> int:
        """How many minutes are open at both ends."""
        return self.begin - self.earliest + self.latest - self.end


@dataclass(slots=True, kw_only=True)
class Incident:
    """What failed together. `kind`: shared (several subscriptions), single, or chronic."""

    kind: str
    begin: int
    end: int
    sessions: list[Session] = field(default_factory=list)

    @property
    def keys(self) -> tuple[int, ...]:
        """The subscriptions, ascending."""
        return tuple(sorted({session.key for session in self.sessions}))

    @property
    def failures(self) -> int:
        """Failed attempts of the sessions."""
        return sum(session.failures for session in self.sessions)


def find(series: Iterable[Series], *, first: int, minutes: int) -> list[Incident]:
    """The incidents of a log that spans `minutes` from minute `first`, by their beginning."""
    found: list[Session] = []
    told: list[Incident] = []
    for one in series:
        own = sessions(one)
        if own and _chronic(one, first, minutes):
            told.append(_chronic_incident(one, own))
        else:
            found += own
    for incident in _together(found):
        if len(incident.keys) > 1:
            told.append(incident)
        elif incident.end - incident.begin + 1 >= _ALONE:
            incident.kind = "single"
            told.append(incident)
    return sorted(told, key=lambda incident: (incident.begin, incident.end, incident.keys))


def sessions(one: Series) -> list[Session]:
    """The sessions of one subscription: at least three failures, at least half of the attempts in it."""
    failing = one.failing()
    places = np.flatnonzero(failing)
    found: list[Session] = []
    start = 0
    for at in range(1, len(places) + 1):
        if at < len(places) and _joined(one, int(places[at - 1]), int(places[at])):
            continue
        session = _session(one, int(places[start]), int(places[at - 1]))
        enough = session.failures >= _LEAST_FAILURES and session.fresh >= _LEAST_FRESH
        if enough and session.failures >= _LEAST_SHARE * session.attempts:
            found.append(session)
        start = at
    return found


def _joined(one: Series, before: int, after: int) -> bool:
    gap = int(one.minutes[after] - one.minutes[before]) - 1
    return gap <= _GAP or (after == before + 1 and gap <= _SILENT_GAP)


def _session(one: Series, first: int, last: int) -> Session:
    begin, end = int(one.minutes[first]), int(one.minutes[last])
    # Without an attempt before it (or after), the log's edge says nothing either: the session may be older.
    earliest = int(one.minutes[first - 1]) if first else begin - _SILENT_GAP
    latest = int(one.minutes[last + 1]) if last + 1 < len(one.minutes) else end + _SILENT_GAP
    some = slice(first, last + 1)
    return Session(
        key=one.key,
        begin=begin,
        end=end,
        earliest=max(earliest, begin - _SILENT_GAP),
        latest=min(latest, end + _SILENT_GAP),
        failures=int(one.failures[some].sum()),
        attempts=int(one.attempts[some].sum()),
        fresh=int(one.fresh[some].sum()),
    )


def _chronic(one: Series, first: int, minutes: int) -> bool:
    """Whether it fails in a good part of its minutes, in most twelfths of the log in which it was tried."""
    width = max(minutes / _SLICES, 1.0)
    slices = ((one.minutes - first) / width).astype(np.int64)
    active = np.bincount(slices, minlength=_SLICES)
    failing = np.bincount(slices, weights=one.failing(), minlength=_SLICES)
    tried = active > 0
    chronic = failing[tried] >= _CHRONIC_MINUTES * active[tried]
    return int(tried.sum()) > _SLICES // 2 and float(chronic.mean()) >= _CHRONIC_SLICES


def _chronic_incident(one: Series, own: list[Session]) -> Incident:
    return Incident(kind="chronic", begin=int(one.minutes[0]), end=int(one.minutes[-1]), sessions=own)


def _together(found: Sequence[Session]) -> list[Incident]:
    """Sessions that can have begun and ended together, the best known first: those with slack join, and found none."""
    incidents: list[Incident] = []
    for session in sorted(found, key=lambda s: (s.slack, -s.failures, s.begin, s.key)):
        fitting = [incident for incident in incidents if _fits(session, incident)]
        if fitting:
            best = max(fitting, key=lambda incident: (_overlap(session, incident), -incident.begin))
            best.sessions.append(session)
            best.begin, best.end = _core(best.sessions)
        else:
            incidents.append(Incident(kind="shared", begin=session.begin, end=session.end, sessions=[session]))
    return incidents


def _core(of: Sequence[Session]) -> tuple[int, int]:
    """Where most of them began and ended: one that was seen late, or clocked wrong, moves nothing."""
    return int(np.median([session.begin for session in of])), int(np.median([session.end for session in of]))


def _fits(session: Session, incident: Incident) -> bool:
    begun = session.earliest - _TOLERANCE <= incident.begin <= session.begin + _TOLERANCE
    ended = session.end - _TOLERANCE <= incident.end <= session.latest + _TOLERANCE
    meets = session.begin <= incident.end + _TOLERANCE and incident.begin <= session.end + _TOLERANCE
    return meets and ((begun and ended) or _overlap(session, incident) > _LEAST_OVERLAP)


def _overlap(session: Session, incident: Incident) -> float:
    """Minutes in both by minutes in either."""
    shared = min(session.end, incident.end) - max(session.begin, incident.begin) + 1
    either = max(session.end, incident.end) - min(session.begin, incident.begin) + 1
    return max(shared, 0) / either
