"""Read and write the files of the output, at one address."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """Hold a file with its path, size in bytes, and time in ms since 1970."""

    path: str
    size: int
    modified_ms: int = 0


class OutputFiles(Protocol):
    """Write files below one address. Names are relative to it, with /. It needs no rename."""

    @property
    def root(self) -> str:
        """Return the address."""
        ...

    @property
    def local_folder(self) -> str | None:
        """Return the folder if it is on this machine."""
        ...

    def list_files(self, name: str = "") -> list[StoredFile]:
        """Return every file below `name`, sorted by path; empty if there is none."""
        ...

    def read(self, name: str) -> str | None:
        """Return the text of a file, or None if it does not exist."""
        ...

    def write(self, name: str, content: str | bytes) -> None:
        """Write a whole file, replacing an existing one; on this machine at once."""
        ...

    def delete(self, name: str) -> None:
        """Delete everything at `name`, if it exists."""
        ...

    def folders(self, name: str) -> list[str]:
        """Return the names of the folders directly in `name`."""
        ...
