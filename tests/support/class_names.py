"""Check that no two classes of the source have one name.

    python -m tests.support.class_names

A name has one meaning, in private classes too: a reader finds a class by searching for its name.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.prose import ROOT, files_in

SOURCE = ("rooms", "delivery", "migrations")


def repeated_names(sources: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield each name that is defined more than once, with its places, from paths and texts."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, text in sources:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, found in sorted(places.items()):
        if len(found) > 1:
            yield f"class {name} is defined {len(found)} times: {', '.join(found)}"


def main() -> int:
    """Print the repeated names, and return the exit code."""
    files = [file for file in files_in(ROOT / name for name in SOURCE) if file.suffix == ".py"]
    found = list(repeated_names((_name(file), file.read_text()) for file in files))
    if found:
        print(*found, sep="\n")
    return int(bool(found))


def _name(file: Path) -> str:
    return str(file.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
