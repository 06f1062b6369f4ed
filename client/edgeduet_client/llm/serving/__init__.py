"""Serving the local model: one worker per model behind an OpenAI-compatible HTTP API and a gRPC service."""
