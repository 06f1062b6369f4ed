"""What server and clients must agree on: models, data, messages, metrics, configuration, errors."""
