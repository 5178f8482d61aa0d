"""Check that tests are where one looks for them: in the folder of the module that they test."""

from pathlib import Path

import pytest

from tests.support import event_loops, xdist_order

ROOT = Path(__file__).parents[2]
SCENARIOS = "scenarios"


def parts_of(package: Path) -> list[str]:
    """Return the names of the modules and packages in a package."""
    return [
        one.stem
        for one in package.iterdir()
        if one.suffix == ".py" or (one / "__init__.py").exists()
    ]


def is_named(test: str, parts: list[str]) -> bool:
    """Return whether a test is named by a part, or by a part and an aspect of it."""
    return any(test == f"test_{part}" or test.startswith(f"test_{part}_") for part in parts)


def misplaced(tests: Path) -> list[str]:
    """Return the tests below a folder whose name or folder leads to no module."""
    found = []
    for source in ("rooms", "delivery"):
        for path in sorted((tests / source).rglob("test_*.py")):
            folder = path.relative_to(tests).parent
            spans = folder.name == SCENARIOS
            package = ROOT / (folder.parent if spans else folder)
            if not package.is_dir() or not (spans or is_named(path.stem, parts_of(package))):
                found.append(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize("kind", ["unit", "integration"])
def test_a_test_is_named_by_its_module_or_is_a_scenario(kind: str) -> None:
    assert misplaced(ROOT / "tests" / kind) == []


@pytest.mark.parametrize(
    ("test", "expected"), [("test_ids", True), ("test_ids_order", True), ("test_idle", False)]
)
def test_an_aspect_follows_the_name_of_the_module(test: str, *, expected: bool) -> None:
    assert is_named(test, parts_of(ROOT / "rooms" / "domain")) is expected


def test_paths_by_which_tests_are_chosen_exist() -> None:
    chosen = [*event_loops.BOTH_LOOPS, *xdist_order._LONGEST_FIRST]
    assert [path for path in chosen if not (ROOT / path).exists()] == []
