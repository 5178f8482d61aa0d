"""How a message stands, told from how its deliveries do."""

from collections.abc import Mapping
from enum import StrEnum

from rooms.domain.states import UNFINISHED, State


class MessageStatus(StrEnum):
    """In one word; the deliveries have the rest."""

    WAITING = "waiting"
    """Not due yet."""
    UNDER_WAY = "under_way"
    """Due, and owed to somebody still."""
    SIDELINED = "sidelined"
    """Nothing is under way, and something rests in a sideline."""
    CANCELLED = "cancelled"
    """Every delivery was withdrawn, cleared or lost its subscription."""
    DONE = "done"
    """Nothing is left to do: delivered, expired, dropped or purged, or wanted by nobody."""


def status_of(states: Mapping[State, int], *, due: bool) -> MessageStatus:
    """The status of a message with so many deliveries in each state; `due`: whether it is."""
    if not states.keys().isdisjoint(UNFINISHED):
        return MessageStatus.UNDER_WAY if due else MessageStatus.WAITING
    if State.SIDELINED in states:
        return MessageStatus.SIDELINED
    return MessageStatus.CANCELLED if states.keys() == {State.CANCELLED} else MessageStatus.DONE
