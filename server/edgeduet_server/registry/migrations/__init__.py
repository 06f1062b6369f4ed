"""Alembic's migrations of the registry; :mod:`edgeduet_server.registry.migrate` runs them."""
