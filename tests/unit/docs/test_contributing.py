"""Test that CONTRIBUTING.md and the layers of import-linter name every module that there is."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.markdown import blocks, spans, table_rows
from tests.support.service import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
CONTRACTS: list[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"][
    "importlinter"
]["contracts"]
LAYERS, DELIVERY_LAYERS = ([*found["layers"]] for found in CONTRACTS if found["type"] == "layers")


def modules(folder: Path) -> Iterator[str]:
    """Yield the modules and packages right below a package."""
    for path in folder.iterdir():
        if path.suffix == ".py" and path.stem != "__init__":
            yield path.stem
        elif (path / "__init__.py").exists():
            yield path.name


def test_every_module_of_rooms_is_in_a_layer() -> None:
    named = [module for layer in LAYERS for module in layer.split(" | ")]
    expected = ["delivery", *(f"rooms.{module}" for module in modules(ROOT / "rooms"))]
    assert sorted(named) == sorted(expected)


def test_the_page_shows_the_layers_that_are_checked() -> None:
    expected = []
    for layer in LAYERS:
        expected.append(layer)
        if layer == "delivery":
            expected += [
                "  " + re.sub(r"^|(?<= \| )", "delivery.", inner) for inner in DELIVERY_LAYERS
            ]
    shown = next(block.text for block in blocks(PAGE) if block.text.startswith("rooms."))
    assert shown.splitlines() == expected


def test_the_page_says_what_every_folder_has() -> None:
    rows = [cells[0] for _, cells in table_rows(PAGE)]
    named = {
        text
        for row in rows
        for _, text in spans(row)
        if re.fullmatch(r"(?:rooms|delivery)/\w+", text)
    }
    assert named == {
        f"{tree}/{module}"
        for tree in ("rooms", "delivery")
        for module in modules(ROOT / tree)
        if (ROOT / tree / module).is_dir()
    }
