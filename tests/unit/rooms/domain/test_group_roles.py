"""Test how the roles of a provider's groups are written."""

import pytest

from rooms.domain.group_roles import GroupRoles, parse_group_roles, roles_of
from rooms.domain.role import Role


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
