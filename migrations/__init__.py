"""Alembic's revisions, run by `rooms migrate` and at the start of every process that needs the schema."""
