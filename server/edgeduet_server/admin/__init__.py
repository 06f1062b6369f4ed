"""The admin service: gRPC over TLS, tokens with roles, everything that changes something in the audit log."""
