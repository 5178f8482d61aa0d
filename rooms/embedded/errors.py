"""What can go wrong while Rooms starts its own processes.

EmbeddedError
├── DataInUseError        another supervisor holds the data folder
├── FetchError            Maven could not fetch a program
├── IdentityError         no user was found that PostgreSQL would run as
├── InitialisationError   the data folder could not be made or does not fit
├── MissingError          a program that has to be installed first is not there
└── StartError            a process did not become ready
"""


class EmbeddedError(Exception):
    """The root: its text is meant for the person at the terminal and names the way out."""


class DataInUseError(EmbeddedError):
    """Another supervisor works on the same data folder."""


class FetchError(EmbeddedError):
    """Maven could not bring a program: its repository was out of reach, or has no such version."""


class IdentityError(EmbeddedError):
    """PostgreSQL refuses root, and no other way to run it was allowed."""


class InitialisationError(EmbeddedError):
    """The data folder could not be made, or is of another version of PostgreSQL."""


class MissingError(EmbeddedError):
    """Java or Maven is not there, or too old."""


class StartError(EmbeddedError):
    """A process died again and again, or did not become ready in time."""
