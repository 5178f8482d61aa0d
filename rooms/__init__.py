"""Publish messages to rooms: the domain, its storage, the REST API and the command line."""
