"""Refuse changes by portals of what a subscription receives.

A publisher that keeps its customers' subscriptions in a room of its own separates the customers by
these settings only. A name is what its server makes the links by.
"""

from collections.abc import Collection
from typing import Final

from rooms.domain.principal import Principal
from rooms.errors import ForbiddenError

NOT_FOR_PORTALS: Final = ("name", "event_types", "filter")
"""The settings of a subscription that a session of a portal does not change."""


def check_portal_fields(principal: Principal, fields: Collection[str]) -> None:
    """Raise ForbiddenError where a session of a portal would change one of `NOT_FOR_PORTALS`."""
    refused = [name for name in NOT_FOR_PORTALS if name in fields]
    if principal.is_portal and refused:
        raise ForbiddenError(
            f"a portal changes neither the name of a subscription nor what it receives: leave out "
            f"{', '.join(refused)}, or use an API key of the organisation"
        )
