"""The command line `rooms`: one module a noun, each loaded when its command is called.

Every command takes `--url`, `--key` and `--json`, in front of its name or behind it. Tables are for people; with
`--json` standard output carries JSON and nothing else (one document, or a line each where things keep coming), and
errors are a line of JSON on standard error.

    0     done
    1     refused, failed or unreachable; problem details are shown with every field
    2     wrong usage, or a setting in the environment that cannot be read
    130   Ctrl-C
"""

from collections.abc import Sequence

from rooms.cli.group import Mount, RootGroup
from rooms.cli.mounts import MOUNTS


def build(extra: Sequence[Mount] = ()) -> RootGroup:
    """The command line with further commands mounted; one of an existing name takes its place."""
    return RootGroup("rooms", [*MOUNTS, *extra])


def main(extra: Sequence[Mount] = ()) -> None:
    """Run the command that `sys.argv` names, and exit with its code."""
    build(extra).main(prog_name="rooms")
