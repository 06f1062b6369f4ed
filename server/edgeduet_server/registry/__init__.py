"""The registry: what ServerApp, admin service and supervisor know in common, in one SQL database."""
