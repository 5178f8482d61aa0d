"""`python -m rooms`: the command line."""

from rooms.composition.commands import main

if __name__ == "__main__":
    main()
