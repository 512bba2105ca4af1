"""The parts of `python -m benchmarks.quality.architectures`."""
