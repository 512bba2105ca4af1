"""Whole programs on Clearhead, each run as a script: ``python examples/translate_dates.py``."""
