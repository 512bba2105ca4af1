"""The version, in the one place that states it."""

__version__ = "1.0.0rc2.dev0"
