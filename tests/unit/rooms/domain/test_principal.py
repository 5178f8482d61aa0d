"""Test when one principal may do all that another may."""

from dataclasses import replace
from typing import Any

import pytest

from rooms.domain.ids import KeyId, OrganisationId, RoomId, SubscriptionId
from rooms.domain.principal import Principal
from rooms.domain.state_machine import Scope

FORMER = Principal(
    key_id=KeyId("k"),
    organisation_id=OrganisationId("o"),
    scopes=frozenset({Scope.SUBSCRIBE, Scope.PUBLISH}),
    rooms=frozenset({RoomId(1), RoomId(2)}),
    event_types=("order.*",),
    subscriptions=frozenset({SubscriptionId("s")}),
    networks=("10.0.0.0/8", "2001:db8::/32"),
)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"key_name": "new", "application": "desk", "suspended": True},
        {"scopes": frozenset({Scope.ADMIN})},
        {"rooms": None, "event_types": None, "subscriptions": None, "networks": None},
        {"rooms": frozenset({RoomId(1), RoomId(2), RoomId(3)})},
        {"event_types": ("*",)},
        {"event_types": ("order.*", "x")},
        {"networks": ("0.0.0.0/0", "::/0")},
        {"networks": ("10.0.0.0/7", "2001:db8::/32")},
    ],
)
def test_what_is_as_wide_includes_it(change: dict[str, Any]) -> None:
    assert replace(FORMER, **change).includes(FORMER)


@pytest.mark.parametrize(
    "change",
    [
        {"organisation_id": OrganisationId("p")},
        {"scopes": frozenset({Scope.SUBSCRIBE})},
        {"rooms": frozenset({RoomId(1)})},
        {"rooms": frozenset()},
        {"event_types": ("order.made",)},
        {"event_types": ()},
        {"subscriptions": frozenset()},
        {"networks": ("10.0.0.0/9", "2001:db8::/32")},
        {"networks": ("10.0.0.0/8",)},
        {"networks": ()},
    ],
)
def test_what_is_narrower_does_not(change: dict[str, Any]) -> None:
    assert not replace(FORMER, **change).includes(FORMER)


def test_a_restriction_of_what_had_none_is_narrower() -> None:
    free = replace(FORMER, rooms=None, event_types=None, subscriptions=None, networks=None)
    assert not FORMER.includes(free)
    for name in ("rooms", "event_types", "subscriptions", "networks"):
        assert not replace(free, **{name: getattr(FORMER, name)}).includes(free)


def test_admin_does_not_include_platform() -> None:
    platform = replace(FORMER, scopes=frozenset({Scope.PLATFORM}))
    assert not replace(FORMER, scopes=frozenset({Scope.ADMIN})).includes(platform)
