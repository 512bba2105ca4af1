"""Whole encoders of transformers, and sentence-transformers."""
