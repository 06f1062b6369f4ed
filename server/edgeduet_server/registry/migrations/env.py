"""Run by Alembic with the connection that ``edgeduet_server.registry.migrate`` hands over."""

from __future__ import annotations

from alembic import context

from edgeduet_server.registry.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    # SQLite cannot change a column; Alembic copies the table instead.
    render_as_batch=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
