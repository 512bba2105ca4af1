"""Prints the errors of the Triton kernels as JSON. It runs in a process of its own, in Triton's interpreter."""

from __future__ import annotations

import json
import warnings

import torch

from benchmarks.kernel_checks import MASKS, errors_of

LENGTH = 70  # more than one tile of queries and of keys, and no multiple of a tile
OTHERS = [("causal", "bfloat16", 40), ("drop keys", "float16", 16), ("causal", "float32", 72)]
CASES = [*((name, "float32", 16) for name in MASKS), *OTHERS]


def main() -> None:
    # The interpreter is NumPy, which warns of −∞ − −∞ and log 0; both are meant.
    warnings.simplefilter("ignore", RuntimeWarning)
    found = {
        f"{name}, {dtype}, D={dim}": errors_of(
            name, getattr(torch, dtype), dim, torch.device("cpu"), length=LENGTH, heads=2
        )
        for name, dtype, dim in CASES
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
