"""Name the user at the command line."""

import os
import pwd


def user_name() -> str:
    """Return the name of the process's user, and not the one that the environment claims."""
    identity = os.getuid()
    try:
        return pwd.getpwuid(identity).pw_name
    except KeyError:  # a container may run as a user without a name
        return f"uid {identity}"
