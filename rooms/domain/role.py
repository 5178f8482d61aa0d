"""Define the roles of people who sign in to the console, each a set of scopes.

The groups of an OpenID Connect provider give roles in organisations:

    GROUP=ORGANISATION:ROLE+ROLE; GROUP=ORGANISATION:ROLE; *=ORGANISATION:viewer

A group may have several entries, and contain every character but `;`. The group `*` is every person
who signs in.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
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


EVERY_PERSON: Final = "*"
GROUP_FORM: Final = "GROUP=ORGANISATION:ROLE+ROLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRoles:
    """Give the members of a group some roles in an organisation."""

    group: str
    organisation: str
    """Its name."""
    roles: frozenset[Role]

    def applies_to(self, groups: Collection[str]) -> bool:
        """Return whether a member of these groups has these roles."""
        return self.group == EVERY_PERSON or self.group in groups


def parse_group_roles(text: str) -> tuple[Sequence[GroupRoles], Sequence[str]]:
    """Return the entries of a text, and every problem."""
    found: list[GroupRoles] = []
    problems: list[str] = []
    for part in filter(None, map(str.strip, text.split(";"))):
        group, _, rest = (piece.strip() for piece in part.rpartition("="))
        organisation, _, listed = (piece.strip() for piece in rest.rpartition(":"))
        names = [name.strip() for name in listed.split("+")]
        unknown = sorted({name for name in names if name not in set(Role)})
        if not group or not organisation or not listed:
            problems.append(f"{part!r} has not the form {GROUP_FORM}")
        elif unknown:
            known = ", ".join(Role)
            problems.append(f"{part!r} has the unknown role {unknown[0]!r}; there are {known}")
        else:
            roles = frozenset(map(Role, names))
            found.append(GroupRoles(group=group, organisation=organisation, roles=roles))
    return tuple(found), problems


def roles_of(entries: Iterable[GroupRoles], groups: Iterable[str]) -> Mapping[str, frozenset[Role]]:
    """Return the roles of a member of these groups, by the names of organisations."""
    member_of = frozenset(groups)
    found: dict[str, frozenset[Role]] = {}
    for entry in entries:
        if entry.applies_to(member_of):
            found[entry.organisation] = found.get(entry.organisation, frozenset()) | entry.roles
    return found
