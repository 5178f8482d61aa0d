"""Test that the name of a migration says what it does."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.service import ROOT

FIRST = 53
"""Those before it keep their names: they are in databases and logs."""
_INDEX = re.compile(r"\d{4}_(?:add|replace|drop)_\w+_index(?:es)?")
_OF_INDEXES = frozenset({"build_index", "create_index", "drop_index", "rebuild_index"})


def changes_only_indexes(source: str) -> bool:
    """Return whether each call in `upgrade` is about indexes, of which it has one."""
    (upgrade,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "upgrade"
    )
    calls = [node for node in ast.walk(upgrade) if isinstance(node, ast.Call)]
    return bool(calls) and all(_is_about_index(call) for call in calls)


def _is_about_index(call: ast.Call) -> bool:
    name = ast.unparse(call.func).rpartition(".")[2]
    text = ast.unparse(call)
    return (
        name in _OF_INDEXES or re.search(r"\b(?:CREATE|DROP) (?:UNIQUE )?INDEX\b", text) is not None
    )


def misnamed(path: Path) -> bool:
    if int(path.stem[:4]) < FIRST or not changes_only_indexes(path.read_text()):
        return False
    return _INDEX.fullmatch(path.stem) is None


def test_a_migration_of_indexes_says_so() -> None:
    versions = sorted((ROOT / "migrations" / "versions").glob("[0-9]*.py"))
    assert [path.name for path in versions if misnamed(path)] == []


@pytest.mark.parametrize(
    ("name", "body", "expected"),
    [
        ("0053_leases_by_time", 'build_index("a", "b (c)")', True),
        ("0053_leases_by_time", 'op.execute("CREATE INDEX a ON b (c)")', True),
        ("0053_add_leases_time_index", 'build_index("a", "b (c)")', False),
        ("0053_replace_leases_time_index", 'op.execute("DROP INDEX a")', False),
        ("0053_leases", 'op.execute("ALTER TABLE b ADD d int"); build_index("a", "b (c)")', False),
        ("0052_leases_by_time", 'build_index("a", "b (c)")', False),
    ],
)
def test_names_are_checked(tmp_path: Path, name: str, body: str, *, expected: bool) -> None:
    path = tmp_path / f"{name}.py"
    path.write_text(f"def upgrade() -> None:\n    {body}\n")
    assert misnamed(path) is expected


def test_former_migrations_of_indexes_are_found() -> None:
    (path,) = (ROOT / "migrations" / "versions").glob("0052_*.py")
    assert changes_only_indexes(path.read_text())
