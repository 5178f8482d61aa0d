"""Test which roles a set of scopes has, and which a group of the provider gives."""

import pytest

from rooms.domain.role import GroupRoles, Role, parse_group_roles, roles_in, roles_of, scopes_of


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


def test_entries_are_separated_by_semicolons() -> None:
    text = " ops = default : operator + auditor ;*=default:viewer;; CN=Admins,OU=x=other:owner;"
    found, problems = parse_group_roles(text)
    assert problems == []
    assert found == (
        GroupRoles(
            group="ops",
            organisation="default",
            roles=frozenset({Role.OPERATOR, Role.AUDITOR}),
        ),
        GroupRoles(group="*", organisation="default", roles=frozenset({Role.VIEWER})),
        GroupRoles(group="CN=Admins,OU=x", organisation="other", roles=frozenset({Role.OWNER})),
    )
    assert parse_group_roles("") == ((), [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ops", "form"),
        ("ops=default", "form"),
        ("=default:owner", "form"),
        ("ops=:owner", "form"),
        ("ops=default:", "form"),
        ("ops=default:root", "'root'"),
        ("ops=default:owner+", "''"),
        ("ops=default:Owner", "'Owner'"),
    ],
)
def test_each_wrong_entry_is_a_problem(text: str, problem: str) -> None:
    found, problems = parse_group_roles(f"{text}; right=default:viewer; {text}")
    assert [entry.group for entry in found] == ["right"]
    assert len(problems) == 2
    assert all(problem in one for one in problems)


def test_roles_add_up_by_organisation() -> None:
    entries, _ = parse_group_roles("a=x:viewer;b=x:auditor;b=y:owner;*=z:developer")
    assert roles_of(entries, ["a", "b"]) == {
        "x": {Role.VIEWER, Role.AUDITOR},
        "y": {Role.OWNER},
        "z": {Role.DEVELOPER},
    }
    assert roles_of(entries, []) == {"z": {Role.DEVELOPER}}
    assert roles_of(entries[:3], ["c"]) == {}
