"""Define the values and pure decisions of Rooms, with the standard library only."""
