"""Files that nobody else may read."""

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 600, as a whole or not at all."""
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    unfinished.replace(path)
