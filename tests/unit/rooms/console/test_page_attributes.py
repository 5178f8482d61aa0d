"""Test that what only a screen reader says is in the reader's language, too."""

import re
from importlib.resources import files

WRITTEN = re.compile(r'\b(?:aria-label|aria-description|alt|title)="(?!\{\{)[^"]*[a-z][^"]*"')


def test_no_name_of_a_part_is_written_into_a_template() -> None:
    templates = list(files("rooms.console").joinpath("templates").iterdir())
    assert len(templates) > 50
    found = [
        f"{template.name}: {one}"
        for template in templates
        for one in WRITTEN.findall(template.read_text(encoding="utf-8"))
    ]
    assert not found, found
