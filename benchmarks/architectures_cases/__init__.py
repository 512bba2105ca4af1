"""The parts of `python -m benchmarks.architectures`."""
