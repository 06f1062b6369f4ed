"""The edge client: Flower ClientApp, local training, personal state."""
