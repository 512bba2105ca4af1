"""A census: what every head of a model does, over a corpus."""
