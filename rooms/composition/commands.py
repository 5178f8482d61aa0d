"""The command line `rooms` with every command there is: those of `rooms.cli`, and what `delivery` adds."""

from delivery.cli import MOUNTS
from rooms.cli import build
from rooms.cli import main as run
from rooms.cli.group import RootGroup


def whole() -> RootGroup:
    """Every command, each loaded when it is called."""
    return build(MOUNTS)


def main() -> None:
    """Run the command that `sys.argv` names, and exit with its code."""
    run(MOUNTS)
