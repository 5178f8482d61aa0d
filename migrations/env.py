"""Run the revisions on the connection that `rooms.db.schema.migrate` opened; no file is read."""

from alembic import context

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=None, transaction_per_migration=True)
with context.begin_transaction():
    context.run_migrations()
