"""The shapes of one call."""

PICTURES = {}
