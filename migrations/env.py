"""Run the revisions on the connection that `rooms.db.schema.migrate` opened; no file is read."""

from alembic import context

attributes = context.config.attributes
context.configure(
    connection=attributes["connection"],
    target_metadata=None,
    transaction_per_migration=True,
    on_version_apply=attributes.get("on_version_apply"),
)
with context.begin_transaction():
    context.run_migrations()
