"""Incidents: when which subscriptions failed together.

A subscription's failing minutes become sessions. What fails all the time is chronic and is told apart, so that it joins no
incident. Of a session is known when it was seen to begin and end, and how much earlier and later that may have been (up to
the last attempt that went well before it, and the first after it): sessions that can have begun together and ended together
are one incident. So a subscription with little traffic joins the outage it was part of, and two outages that overlap stay two.

Who has failed with whom all over the log (its significant pairs: the kin) is known by then, and weighs: with kin, edges that
fray and holes that partial outages leave are forgiven; who is no kin of an incident of kin does not
belong to it, however well the minutes fit: that is chance. Where the log is too short to tell kin, minutes alone decide.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
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
_LEAST_WITHIN: Final = 0.75
"""Of a session's minutes those within its kin's incident that make it part of it."""
_LEAST_SHARED: Final = 2
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


Kin = Mapping[int, AbstractSet[int]]


def kin_of(pairs: Iterable[tuple[int, int]]) -> Kin:
    """Of each subscription those that it fails with; who stands in it without any is known to fail without company."""
    found: dict[int, set[int]] = {}
    for first, second in pairs:
        found.setdefault(first, set()).add(second)
        found.setdefault(second, set()).add(first)
    return found


def find(series: Iterable[Series], *, first: int, minutes: int, kin: Kin) -> list[Incident]:
    """The incidents of a log that spans `minutes` from minute `first`, by their beginning."""
    found: list[Session] = []
    told: list[Incident] = []
    others: dict[int, Series] = {}
    for one in series:
        own = sessions(one)
        if own and _chronic(one, first, minutes):
            told.append(_chronic_incident(one, own))
        else:
            others[one.key] = one
            found += own
    often = [key for key, count in Counter(session.key for session in found).items() if count > 1]
    kin = {**dict.fromkeys(often, frozenset[int]()), **kin}
    for incident in _merged(_together(found, kin), kin):
        _complete(incident, others, kin)
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


def _together(found: Sequence[Session], kin: Kin) -> list[Incident]:
    """Sessions that can have begun and ended together, the best known first: those with slack join, and found none."""
    incidents: list[Incident] = []
    for session in sorted(found, key=lambda s: (s.slack, -s.failures, s.begin, s.key)):
        fitting = [incident for incident in incidents if _fits(session, incident, kin)]
        if fitting:
            best = max(fitting, key=lambda one: (_related(session.key, one, kin), _overlap(session, one), -one.begin))
            _join(best, [session])
        else:
            incidents.append(Incident(kind="shared", begin=session.begin, end=session.end, sessions=[session]))
    return incidents


def _join(incident: Incident, more: Iterable[Session]) -> None:
    incident.sessions += more
    incident.begin, incident.end = _core(incident.sessions)


def _related(key: int, incident: Incident, kin: Kin) -> bool:
    """Whether it has kin in the incident, or is in it itself."""
    return any(other == key or other in kin.get(key, ()) for other in incident.keys)


def _merged(incidents: Sequence[Incident], kin: Kin) -> list[Incident]:
    """Those of kin of which one lies within the other, the longest first: a partial outage tears sessions apart."""
    kept: list[Incident] = []
    for incident in sorted(incidents, key=lambda one: (one.begin - one.end, one.begin, one.keys)):
        whole = [
            one for one in kept if all(_related(key, one, kin) for key in incident.keys) and _within(incident, one)
        ]
        if whole:
            whole[0].sessions += incident.sessions
        else:
            kept.append(incident)
    return kept


def _within(one: Session | Incident, whole: Incident) -> bool:
    shared = min(one.end, whole.end + _TOLERANCE) - max(one.begin, whole.begin - _TOLERANCE) + 1
    return shared >= _LEAST_WITHIN * (one.end - one.begin + 1)


def _complete(incident: Incident, series: Mapping[int, Series], kin: Kin) -> None:
    """Add the kin that failed over the incident as a whole, though good attempts in between made no session of it."""
    there = incident.keys
    if len(there) < _LEAST_SHARED:
        return
    for key in sorted({other for one in there for other in kin.get(one, ())} - set(there)):
        one = series.get(key)
        if one is None or sum(other in kin[key] for other in there) * 2 < len(there):
            continue
        inside = (one.minutes >= incident.begin - 1) & (one.minutes <= incident.end + 1)
        places = np.flatnonzero(inside & (one.failures > 0))
        if len(places):
            session = _session(one, int(places[0]), int(places[-1]))
            enough = session.failures >= _LEAST_FAILURES and session.fresh >= _LEAST_FRESH
            if enough and session.failures >= _LEAST_SHARE * int(one.attempts[inside].sum()):
                incident.sessions.append(session)


def _core(of: Sequence[Session]) -> tuple[int, int]:
    """Where most of them began and ended: one that was seen late, or clocked wrong, moves nothing."""
    return int(np.median([session.begin for session in of])), int(np.median([session.end for session in of]))


def _fits(session: Session, incident: Incident, kin: Kin) -> bool:
    if _strange(session, incident, kin):
        return False
    begun = session.earliest - _TOLERANCE <= incident.begin <= session.begin + _TOLERANCE
    ended = session.end - _TOLERANCE <= incident.end <= session.latest + _TOLERANCE
    meets = session.begin <= incident.end + _TOLERANCE and incident.begin <= session.end + _TOLERANCE
    return meets and ((begun and ended) or _overlap(session, incident) > _LEAST_OVERLAP)


def _strange(session: Session, incident: Incident, kin: Kin) -> bool:
    """Whether one of them has kin, and not in the other, though the session's subscription failed before or after."""
    kinless = not any(kin.get(key) for key in (session.key, *incident.keys))
    return not kinless and session.key in kin and not _related(session.key, incident, kin)


def _overlap(session: Session, incident: Incident) -> float:
    """Minutes in both by minutes in either."""
    shared = min(session.end, incident.end) - max(session.begin, incident.begin) + 1
    either = max(session.end, incident.end) - min(session.begin, incident.begin) + 1
    return max(shared, 0) / either
