"""Group failing subscriptions by what an operator can act on: the endpoint, and how it answers."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from rooms.domain.subscription_health import UNHEALTHY

_FEWEST: Final = 3
"""Fewer are read one by one."""
_COUNTS: Final = ("due", "retrying", "waiting", "sidelined")


def group_failures(
    subscriptions: Iterable[Mapping[str, Any]],
) -> list[Sequence[Mapping[str, Any]]]:
    """Return subscriptions as `/v1/status` lists them, in groups that fail alike.

    A group is in the place of its first subscription. One that fails like no two others is a group
    of one.
    """
    alike: dict[Hashable, list[Mapping[str, Any]]] = {}
    for one in subscriptions:
        alike.setdefault(_cause(one), []).append(one)
    groups: dict[Hashable, list[Mapping[str, Any]]] = {}
    for cause, members in alike.items():
        for one in members:
            key = cause if len(members) >= _FEWEST else one["subscription_id"]
            groups.setdefault(key, []).append(one)
    return list(groups.values())


def summarize(group: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a group as if it was its first subscription.

    It fails since the first failure, and has the last success and the sum of all counts.
    """
    delivered = [one["last_delivered_at"] for one in group if one["last_delivered_at"] is not None]
    held: Counter[str] = Counter()
    for one in group:
        held.update(one["held"])
    return {
        **group[0],
        "since": min((one["since"] for one in group), key=datetime.fromisoformat),
        "last_delivered_at": max(delivered, key=datetime.fromisoformat, default=None),
        "held": held,
        **{name: sum(one[name] for one in group) for name in _COUNTS},
    }


def _cause(subscription: Mapping[str, Any]) -> Hashable:
    """Return the endpoint and the status or kind of error; the id of one that has neither."""
    # A service of an earlier version has no `authority`.
    endpoint = subscription.get("authority") or subscription["host"]
    answer = subscription["last_status"] or (subscription["last_error"] or "").partition(":")[0]
    if subscription["condition"] not in UNHEALTHY or not endpoint or not answer:
        return str(subscription["subscription_id"])
    return endpoint, answer
