"""Measurements on a GPU, and of the kernels for it."""
