"""Show how subscriptions are: whether they fail, since when, and together with which others."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from rooms.console.page import Page
from rooms.domain.subscription_health import SubscriptionHealth

_MOST: Final = 200
"""Subscriptions of one answer of `/v1/status`."""
_KINDS: Final = {
    SubscriptionHealth.DISABLED: "bad",
    SubscriptionHealth.CIRCUIT_OPEN: "bad",
    SubscriptionHealth.FAILING: "bad",
    SubscriptionHealth.DEGRADED: "warn",
    SubscriptionHealth.PAUSED: "off",
    SubscriptionHealth.LAGGING: "warn",
    SubscriptionHealth.HAS_SIDELINED: "off",
}


def condition_names(page: Page) -> dict[str, tuple[str, str]]:
    """Return the look and the name of each condition, in the viewer's language."""
    names = {
        SubscriptionHealth.DISABLED: page.text("disabled"),
        SubscriptionHealth.CIRCUIT_OPEN: page.text("circuit open"),
        SubscriptionHealth.FAILING: page.text("failing"),
        SubscriptionHealth.DEGRADED: page.text("unsteady"),
        SubscriptionHealth.PAUSED: page.text("paused with deliveries"),
        SubscriptionHealth.LAGGING: page.text("behind"),
        SubscriptionHealth.HAS_SIDELINED: page.text("well, with a sideline"),
    }
    return {condition.value: (_KINDS[condition], name) for condition, name in names.items()}


def subscription_names(listed: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return names of subscriptions by id: with the room where two have the same name."""
    count = Counter(one["name"] for one in listed)
    return {
        one["subscription_id"]: one["name"]
        if count[one["name"]] == 1
        else f"{one['room']}/{one['name']}"
        for one in listed
    }


async def find_unwell(
    page: Page, subscriptions: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, Any]] | None:
    """Return the status of those own subscriptions that are not well, by id.

    None: the viewer may not read it.
    """
    own = [one["id"] for one in subscriptions if one["organisation_id"] == page.me.organisation_id]
    if not own:
        return {}
    status = await page.optional("/status", subscription_id=",".join(own[:_MOST]), limit=_MOST)
    if status is None:
        return None
    return {one["subscription_id"]: one for one in status["subscriptions"]}


async def find_together(page: Page, subscription_id: str) -> tuple[list[str], dict[str, str]]:
    """Return the ids of those that fail together with a subscription, and the names by id."""
    status = await page.optional("/status", limit=_MOST)
    listed = [] if status is None else status["subscriptions"]
    (together,) = [
        one["together_with"] for one in listed if one["subscription_id"] == subscription_id
    ] or [[]]
    return together, subscription_names(listed)
