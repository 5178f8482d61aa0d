"""Provide the command line `rooms`: one module per noun, loaded when its command is called.

Every command takes `--url`, `--key` and `--json`, before its name or after it. With `--json`,
standard output carries only JSON: one document, or one line per item for streams. Errors are then
one line of JSON on standard error.

    0     done
    1     refused, failed or unreachable; all fields of the problem details are shown
    2     wrong usage, or an invalid setting in the environment
    130   Ctrl-C
"""

from rooms.cli.app import COMMANDS, RENAMED, RootGroup


def build_cli() -> RootGroup:
    """Return the root command. Subcommands are loaded on demand."""
    return RootGroup("rooms", COMMANDS, RENAMED)


def main() -> None:
    """Run the command that `sys.argv` names, and exit with its code."""
    build_cli().main(prog_name="rooms")
