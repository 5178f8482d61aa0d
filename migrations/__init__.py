"""Hold Alembic's revisions.

`rooms migrate` runs them, and so does the start of every process that needs the schema.
"""
