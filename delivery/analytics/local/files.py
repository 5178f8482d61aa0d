"""Keep the files of the output in a folder of this machine."""

import shutil
from pathlib import Path

from delivery.analytics.runs.files import StoredFile
from delivery.analytics.sealing.files import replace_file


class LocalOutput:
    """Write files below a folder."""

    def __init__(self, folder: str) -> None:
        self.root = str(Path(folder).absolute())

    @property
    def local_folder(self) -> str:
        """Return the folder."""
        return self.root

    def path(self, name: str) -> Path:
        """Return the path of a file or folder."""
        return Path(self.root, name)

    def list_files(self, name: str = "") -> list[StoredFile]:
        """Return every file below `name`, sorted by path; empty if there is none."""
        found = (path for path in self.path(name).rglob("*") if path.is_file())
        return [
            StoredFile(
                path=str(path), size=about.st_size, modified_ms=about.st_mtime_ns // 1_000_000
            )
            for path in sorted(found)
            for about in (path.stat(),)
        ]

    def read(self, name: str) -> str | None:
        """Return the text of a file, or None if it does not exist."""
        path = self.path(name)
        return path.read_text(encoding="utf-8") if path.exists() else None

    def write(self, name: str, content: str | bytes) -> None:
        """Write a whole file at once, replacing an existing one."""
        replace_file(self.path(name), content)

    def delete(self, name: str) -> None:
        """Delete everything at `name`, if it exists."""
        shutil.rmtree(self.path(name), ignore_errors=True)

    def folders(self, name: str) -> list[str]:
        """Return the names of the folders directly in `name`."""
        path = self.path(name)
        return sorted(one.name for one in path.iterdir() if one.is_dir()) if path.is_dir() else []
