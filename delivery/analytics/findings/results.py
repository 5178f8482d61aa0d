"""Compute co-failures and incidents from counts that fit into one process."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa

from delivery.analytics.findings import cofailure, incidents, root_cause
from delivery.analytics.findings.cells import AttemptCells, Ints, searched_bins
from delivery.analytics.findings.root_cause import ChangeLog
from delivery.analytics.findings.series import series_by_minute
from delivery.analytics.sealing.layout import ColumnSpec

Row = dict[str, Any]


def int_column(rows: pa.Table, name: str) -> Ints:
    """Return an integer column."""
    found: Ints = rows.column(name).to_numpy().astype(np.int64)
    return found


def cofailure_rows(found: Iterable[cofailure.CofailurePair], names: Mapping[int, str]) -> list[Row]:
    """Return the rows of `cofailures`."""
    rows = []
    for pair in found:
        first, second = sorted((names[pair.first], names[pair.second]))
        turned = first != names[pair.first]
        rows.append(
            {
                "first_id": first,
                "second_id": second,
                "bad_first": pair.bad_second if turned else pair.bad_first,
                "bad_second": pair.bad_first if turned else pair.bad_second,
                "bad_both": pair.bad_both,
                "jaccard": pair.jaccard,
                "lift": pair.lift,
                "phi": pair.phi,
                "pearson": pair.pearson,
                "p": pair.p,
                "q": pair.q,
                "significant": pair.significant,
            }
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CofailureResult:
    """Hold subscriptions that fail together over the log, and when they did."""

    cells: AttemptCells
    pairs: Sequence[cofailure.CofailurePair]
    incidents: Sequence[incidents.Incident]

    @classmethod
    def from_cells(cls, cells: AttemptCells, now: datetime | None = None) -> "CofailureResult":
        """Find incidents in the counts of a log, and pairs that fail together.

        `now` leaves out rows whose times are wrong by years.
        """
        if now is not None:
            searched = searched_bins(cells.bin, cells.bin_s, now)
            cells = cells if searched.all() else cells.chosen(searched)
        tried = np.flatnonzero(cells.attempts > 0)
        if not len(tried):
            return cls(cells=cells, pairs=(), incidents=())
        series = series_by_minute(cells, tried)
        first = int(cells.bin[tried[0]]) * cells.bin_s // 60
        span = int(cells.bin[tried[-1]]) * cells.bin_s // 60 - first + 1
        found = incidents.find_incidents(cells, series, first=first, minutes=span)
        # What fails because of us or of a publisher says nothing about two subscribers.
        elsewhere = [
            one.rows
            for one in found
            if one.explained_by is not None and one.explained_by[0] not in _OF_TARGETS
        ]
        own = np.setdiff1d(tried, np.concatenate(elsewhere)) if elsewhere else tried
        pairs = cofailure.find_cofailures(
            series_by_minute(cells, own),
            first=first,
            minutes=span,
            bad_minutes=_bad_minutes(cells, found),
            kin=_kin(cells),
            rooms=dict(zip(cells.keys.tolist(), cells.rooms().tolist(), strict=True)),
        )
        return cls(cells=cells, pairs=pairs, incidents=found)


_OF_TARGETS: Final = frozenset({"target_host", "network"})


def _bad_minutes(cells: AttemptCells, found: Sequence[incidents.Incident]) -> dict[int, Ints]:
    """Return the minutes from first to last failure of each subscription in its incidents."""
    parts: dict[int, list[Ints]] = {}
    for incident in found:
        of_targets = incident.explained_by is None or incident.explained_by[0] in _OF_TARGETS
        if incident.kind == incidents.CHRONIC or not of_targets:
            continue
        keys = cells.keys[cells.subscription[incident.rows]]
        minutes = cells.bin[incident.rows] * cells.bin_s // 60
        for key in incident.keys:
            own = minutes[keys == key]
            if len(own):
                parts.setdefault(key, []).append(np.arange(own.min(), own.max() + 1))
    return {key: np.unique(np.concatenate(some)) for key, some in parts.items()}


def _kin(cells: AttemptCells) -> dict[int, frozenset[str]]:
    """Return the hosts and networks of each subscription."""
    found: dict[int, set[str]] = {}
    for name in _OF_TARGETS:
        attribute = cells.attributes[name]
        known = np.flatnonzero(attribute.codes >= 0)
        joined = np.stack((cells.subscription[known], attribute.codes[known]))
        for place, code in np.unique(joined, axis=1).T.tolist():
            found.setdefault(int(cells.keys[place]), set()).add(attribute.texts[code])
    return {key: frozenset(names) for key, names in found.items()}


def incident_rows(found: CofailureResult, names: Mapping[int, str]) -> list[Row]:
    """Return the rows of `incidents`."""
    cells = found.cells
    earlier = incidents.earlier_alike(found.incidents)
    changes = ChangeLog(cells)
    return [
        {
            "incident": number,
            "kind": incident.kind,
            "began": _to_time(incident.begin.at),
            "began_from": _to_time(incident.begin.low),
            "began_to": _to_time(incident.begin.high),
            "ended": _to_time(incident.end.at),
            "ended_from": _to_time(incident.end.low),
            "ended_to": None if incident.open else _to_time(incident.end.high),
            "open": incident.open,
            "subscriptions": sorted(names[key] for key in incident.keys),
            "failures": incident.failures * cells.weight,
            "attempts": incident.attempts * cells.weight,
            "late": incident.first_failures * cells.weight,
            "sidelined": incidents.count_sidelined(cells, incident) * cells.weight,
            "earlier": before,
            "causes": root_cause.describe(
                root_cause.find_causes(
                    cells,
                    incident.rows,
                    begin=int(incident.begin.at // cells.bin_s),
                    end=int(incident.end.at // cells.bin_s),
                )
            ),
            "changes": [
                {
                    "at": _to_time(change.at_s),
                    "attribute": change.attribute,
                    "value": change.value,
                    "subscription_id": None if change.key is None else names[change.key],
                }
                for change in changes.before(incident.begin, incident.keys, incident.rows)
            ],
        }
        for number, (incident, before) in enumerate(zip(found.incidents, earlier, strict=True), 1)
    ]


_ARROW: Final = {
    "int": pa.int32(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us", "UTC"),
    "array<string>": pa.list_(pa.string()),
}
_NESTED: Final = {
    "causes": pa.list_(
        pa.struct(
            [("attribute", pa.string()), ("value", pa.string())]
            + [
                (name, pa.float64())
                for name in ("inside", "outside", "divergence", "log_odds", "z")
            ]
        )
    ),
    "changes": pa.list_(
        pa.struct(
            [
                ("at", pa.timestamp("us", "UTC")),
                ("attribute", pa.string()),
                ("value", pa.string()),
                ("subscription_id", pa.string()),
            ]
        )
    ),
}
"""Types of columns of structures."""


def arrow_type(column: ColumnSpec) -> pa.DataType:
    """Return the Arrow type of a column."""
    return _NESTED[column.name] if column.name in _NESTED else _ARROW[column.type]


def _to_time(at_s: float) -> datetime:
    return datetime.fromtimestamp(round(at_s), UTC)
