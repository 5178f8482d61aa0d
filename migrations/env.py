"""Alembic's entry: the connection comes from `rooms.storage.schema.migrate`, nothing is read from a file."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=None, transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
