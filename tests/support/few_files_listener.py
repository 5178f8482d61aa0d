"""Run a listener that may open few files: `python -m tests.support.few_files_listener LIMIT`.

It prints its port. On each line of input it checks for files once and prints its counters.
"""

# ruff: noqa: T201 the test reads what is printed

import asyncio
import resource
import sys

import uvloop

from rooms.api.server.connections import ConnectionLimits
from tests.support.http_listener import served


async def main(limit: int) -> None:
    async with served(bounds=ConnectionLimits(per_address=0)) as place:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        print(place.address[1], flush=True)
        lines: asyncio.Queue[str] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(
            sys.stdin, lambda: lines.put_nowait(sys.stdin.readline())
        )
        while await lines.get():
            place.connections.check_files()
            print(len(place.connections), place.closed.count("files"), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1])))
