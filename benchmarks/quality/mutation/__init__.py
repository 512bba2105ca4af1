"""The parts of ``python -m benchmarks.quality.mutants``: the changes of sources, and the tests each is tried with."""
