"""The coordinator: Flower ServerApp, strategies, prompt orchestrator."""
