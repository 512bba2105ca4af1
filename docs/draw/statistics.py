"""A picture for each statistic."""

PICTURES = {}
