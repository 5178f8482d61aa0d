"""Run a supervisor for tests, as a program. Arguments: its data folder, and its plan as JSON.

The plan has `children` as lists of name and command, and `database_url` or null. The program prints
`ready URL` once everything is ready.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

from rooms.local import Child, EmbeddedError, Started, Supervisor


def main() -> int:
    data, plan = Path(sys.argv[1]), json.loads(sys.argv[2])

    def ready(started: Started) -> None:
        sys.stdout.write(f"ready {started.database_url}\n")
        sys.stdout.flush()

    async def never() -> bool:
        return False

    supervisor = Supervisor(
        data=data,
        children=[
            Child(name=name, argv=argv, ready=never if name == "broken" else None)
            for name, argv in plan["children"]
        ],
        environment=os.environ,
        database_url=plan["database_url"],
        on_ready=ready,
        drain_s=plan["drain_s"],
    )
    try:
        asyncio.run(supervisor.run())
    except EmbeddedError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
