"""What can go wrong while Rooms starts its own processes.

EmbeddedError
├── DataInUseError        another supervisor holds the data folder
├── IdentityError         no user was found that PostgreSQL would run as
├── InitialisationError   the data folder could not be made or does not fit
└── StartError            a process did not become ready
"""


class EmbeddedError(Exception):
    """The root: its text is meant for the person at the terminal and names the way out."""


class DataInUseError(EmbeddedError):
    """Another supervisor works on the same data folder."""


class IdentityError(EmbeddedError):
    """PostgreSQL refuses root, and no other way to run it was allowed."""


class InitialisationError(EmbeddedError):
    """The data folder could not be made, or is of another version of PostgreSQL."""


class StartError(EmbeddedError):
    """A process died again and again, or did not become ready in time."""
