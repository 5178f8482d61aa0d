"""Give roles in organisations to the groups of an OpenID Connect provider.

    GROUP=ORGANISATION:ROLE+ROLE; GROUP=ORGANISATION:ROLE; *=ORGANISATION:viewer

A group may have several entries, and contain every character but `;`. The group `*` is every person
who signs in.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rooms.domain.role import Role

EVERY_PERSON: Final = "*"
FORM: Final = "GROUP=ORGANISATION:ROLE+ROLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRoles:
    """Give the members of a group some roles in an organisation."""

    group: str
    organisation: str
    """Its name."""
    roles: frozenset[Role]


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
            problems.append(f"{part!r} has not the form {FORM}")
        elif unknown:
            known = ", ".join(Role)
            problems.append(f"{part!r} has the unknown role {unknown[0]!r}; there are {known}")
        else:
            roles = frozenset(map(Role, names))
            found.append(GroupRoles(group=group, organisation=organisation, roles=roles))
    return tuple(found), problems


def roles_of(entries: Iterable[GroupRoles], groups: Iterable[str]) -> Mapping[str, frozenset[Role]]:
    """Return the roles of a member of these groups, by the names of organisations."""
    member_of = {*groups, EVERY_PERSON}
    found: dict[str, frozenset[Role]] = {}
    for entry in entries:
        if entry.group in member_of:
            found[entry.organisation] = found.get(entry.organisation, frozenset()) | entry.roles
    return found
