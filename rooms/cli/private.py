"""Files that nobody else may read."""

import os
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write one line into a file of mode 600, as a whole or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.new")
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(f"{text}\n")
    unfinished.replace(path)
