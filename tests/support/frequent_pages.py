"""Serve the console with open pages that change at once: `python -m tests.support.frequent_pages serve`.

The product asks for a page every few seconds, and less often the longer it takes.
"""

from typing import Final

from rooms.cli import main
from rooms.console import live

EVERY_S: Final = 0.2


def hurry() -> None:
    """Let the streams of this process pause for a fraction of a second."""
    defaults = live.LiveStreams.__init__.__kwdefaults__
    assert defaults is not None
    assert "every_s" in defaults
    defaults["every_s"] = EVERY_S
    assert "_PAUSE_FACTOR" in vars(live)
    vars(live)["_PAUSE_FACTOR"] = 1


if __name__ == "__main__":
    hurry()
    main()
