"""Measurements side by side, each a command: ``python -m benchmarks.NAME``."""
