"""Define the roles of people who sign in to the console, each a set of scopes."""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

from rooms.domain.state_machine import Scope


class Role(StrEnum):
    """Name what a person does, within one organisation but for `platform`."""

    PLATFORM = "platform"
    """Manages organisations, processes and recovery, and sees no payloads of others."""
    OWNER = "owner"
    """Everything within the organisation, keys too."""
    OPERATOR = "operator"
    """Sees what fails, and mends it."""
    DEVELOPER = "developer"
    """Makes rooms and subscriptions, publishes and receives."""
    AUDITOR = "auditor"
    """Reads everything but payloads, and the journal."""
    VIEWER = "viewer"
    """Reads everything but payloads."""


SCOPES: Final[Mapping[Role, frozenset[Scope]]] = {
    Role.PLATFORM: frozenset({Scope.PLATFORM}),
    Role.OWNER: frozenset({Scope.ADMIN}),
    Role.OPERATOR: frozenset({Scope.OPERATE, Scope.VIEW}),
    Role.DEVELOPER: frozenset({Scope.MANAGE, Scope.PUBLISH, Scope.SUBSCRIBE, Scope.VIEW}),
    Role.AUDITOR: frozenset({Scope.AUDIT, Scope.VIEW}),
    Role.VIEWER: frozenset({Scope.VIEW}),
}


def scopes_of(roles: Iterable[Role]) -> frozenset[Scope]:
    """Return every scope that one of the roles has."""
    return frozenset().union(*(SCOPES[role] for role in roles))


def roles_in(scopes: Iterable[Scope]) -> list[Role]:
    """Return the roles whose scopes are all among these.

    Those that an owner has by `admin` are not named besides it.
    """
    given = frozenset(scopes)
    found = [role for role in Role if SCOPES[role] <= given]
    if Role.OWNER in found:
        return [role for role in found if role in {Role.PLATFORM, Role.OWNER}]
    return [role for role in found if role is not Role.VIEWER or len(found) == 1]
