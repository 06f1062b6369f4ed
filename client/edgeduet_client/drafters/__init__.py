"""Clients that train drafters of a language model: where the federated part and the language model meet."""
