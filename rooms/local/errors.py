"""Define the errors of the embedded servers and their supervisor.

EmbeddedError
├── DataInUseError        another supervisor holds the data folder
├── FetchError            Maven could not fetch a program
├── IdentityError         no user was found that PostgreSQL accepts
├── InitialisationError   the data folder could not be created, or does not fit
├── MissingError          a required program is not installed
└── StartError            a process did not become ready
"""


class EmbeddedError(Exception):
    """Report a problem to the person at the terminal. The text names the solution."""


class DataInUseError(EmbeddedError):
    """Report that another supervisor uses the same data folder."""


class FetchError(EmbeddedError):
    """Report that Maven could not fetch a program: no repository, or no such version."""


class IdentityError(EmbeddedError):
    """Report that PostgreSQL refuses root, and no other user could run it."""


class InitialisationError(EmbeddedError):
    """Report that the data folder could not be created, or is of another PostgreSQL version."""


class MissingError(EmbeddedError):
    """Report that Java or Maven is missing, or too old."""


class StartError(EmbeddedError):
    """Report that a process died repeatedly, or was not ready in time."""
