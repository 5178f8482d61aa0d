"""Rooms: what people talk to, from the domain to REST and the command line."""
