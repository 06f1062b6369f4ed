"""Engines: what carries messages between the ServerApp and simulated clients."""
