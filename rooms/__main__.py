"""Run the command line: `python -m rooms`."""

from rooms.cli import main

if __name__ == "__main__":
    main()
