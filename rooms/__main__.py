"""`python -m rooms`: the command line."""

from rooms.cli import main

if __name__ == "__main__":
    main()
