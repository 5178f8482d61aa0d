"""Test which roles a set of scopes has."""

import pytest

from rooms.domain.role import Role, roles_in, scopes_of


@pytest.mark.parametrize("role", Role)
def test_a_role_is_found_by_its_own_scopes(role: Role) -> None:
    assert roles_in(scopes_of([role])) == [role]


def test_several() -> None:
    assert roles_in(scopes_of([Role.AUDITOR, Role.OPERATOR])) == [Role.OPERATOR, Role.AUDITOR]
    assert roles_in(scopes_of([Role.OWNER, Role.PLATFORM, Role.VIEWER])) == [
        Role.PLATFORM,
        Role.OWNER,
    ]
    assert roles_in([]) == []
