"""A child for supervisor tests: says its name and number on a socket, and again when it is asked to stop.

Arguments: path of the socket, name, and what to do about SIGTERM (`obey` or `ignore`).
"""

import os
import signal
import socket
import sys


def main() -> None:
    path, name, attitude = sys.argv[1:4]
    line = socket.socket(socket.AF_UNIX)
    line.connect(path)

    def asked(_number: int, _frame: object) -> None:
        line.sendall(f"{name} stopping\n".encode())
        if attitude == "obey":
            sys.exit(0)

    signal.signal(signal.SIGTERM, asked)
    sys.stderr.write(f"WARNING {name} has started\n")
    sys.stderr.flush()
    line.sendall(f"{name} {os.getpid()}\n".encode())
    while line.recv(1):
        pass


if __name__ == "__main__":
    main()
