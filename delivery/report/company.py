"""Company: who fails with whom and when, as the report names and orders subscriptions."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Row = Mapping[str, Any]
Read = Callable[[str], Sequence[Row]]
"""The rows of a small table of the analysis."""
SHOWN: Final = 40
"""Subscriptions that a chart has room for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subscriber:
    """A subscription under the short name that the report gives it."""

    id: str
    name: str
    room: int | None
    host: str | None
    attempts: int
    failures: int

    @property
    def label(self) -> str:
        """What stands at an axis."""
        return self.name if self.host is None else f"{self.name}  {self.host}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """Subscriptions by id, incidents by their beginning, pairs that share bad minutes."""

    subscribers: Mapping[str, Subscriber]
    incidents: Sequence[Row]
    pairs: Sequence[Row]

    def paired(self) -> list[Subscriber]:
        """Those of pairs, those most often bad first, put beside those of their host."""
        bad: dict[str, int] = {}
        for pair in self.pairs:
            for side in ("first", "second"):
                bad[pair[f"{side}_id"]] = max(bad.get(pair[f"{side}_id"], 0), pair[f"bad_{side}"])
        chosen = sorted(bad, key=lambda one: (-bad[one], one))[:SHOWN]
        return self._beside(chosen)

    def failing(self) -> list[Subscriber]:
        """Those of incidents, those with most failures first, put beside those of their host."""
        named = {one for incident in self.incidents for one in incident["subscriptions"]}
        chosen = sorted(named, key=lambda one: (-self.subscribers[one].failures, one))[:SHOWN]
        return self._beside(chosen)

    def shared(self) -> list[Row]:
        """Incidents of several subscriptions."""
        return [incident for incident in self.incidents if incident["kind"] == "shared"]

    def _beside(self, ids: Sequence[str]) -> list[Subscriber]:
        return sorted((self.subscribers[one] for one in ids), key=lambda one: (one.host or "", int(one.name[1:])))


def company_of(read: Read) -> Company:
    """From the tables `rollups_daily`, `incidents` and `cofailures`."""
    attempts: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    hosts: dict[str, Counter[str]] = {}
    rooms: dict[str, int] = {}
    for row in read("rollups_daily"):
        one = row["subscription_id"]
        if one is None:
            continue
        rooms[one] = row["room_id"]
        attempts[one] += row["attempts"]
        failures[one] += row["failures"]
        if row["target_host"] is not None:
            hosts.setdefault(one, Counter())[row["target_host"]] += row["attempts"]
    incidents = sorted(read("incidents"), key=lambda row: (row["began"], row["incident"]))
    pairs = sorted(read("cofailures"), key=lambda row: (row["q"], -(row["phi"] or 0.0)))
    named = set(rooms) | {one for row in incidents for one in row["subscriptions"]}
    named |= {row[side] for row in pairs for side in ("first_id", "second_id")}
    subscribers = {
        one: Subscriber(
            id=one,
            name=f"S{number}",
            room=rooms.get(one),
            host=hosts[one].most_common(1)[0][0] if one in hosts else None,
            attempts=attempts[one],
            failures=failures[one],
        )
        for number, one in enumerate(sorted(named), 1)
    }
    return Company(subscribers=subscribers, incidents=incidents, pairs=pairs)
