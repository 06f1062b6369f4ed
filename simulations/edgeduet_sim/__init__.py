"""Simulation of non-IID clients: scenarios, engines, comparison, reports."""
