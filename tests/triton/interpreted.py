"""Prints the errors of the Triton kernels as JSON. It runs in a process of its own, in Triton's interpreter."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from benchmarks.gpu.kernel_checks import MASKS, errors_of
from clearhead.kernels._triton import Operands
from clearhead.kernels._triton._calls import pooled
from clearhead.masks._terms import Terms

OTHERS = [("causal", "bfloat16", 40), ("drop keys", "float16", 16), ("causal", "float32", 72)]
CASES = [*((name, "float32", 16) for name in MASKS), *OTHERS]
THOROUGH = ("causal", "float32", 16)
#: Masks that skip tiles on both sides of a row of tiles, which takes three. Two show the same of all others.
BANDS = ("window", "lengths", "documents")
#: Masks that are the same for every batch item; other masks show how kernels find an item.
SHARED = ("none", "causal", "window", "ALiBi", "bias", "prefix")


def maps_with_nan() -> dict[str, list[float]]:
    """Maps of two lines and one column. A query of the second line is NaN, and lies in the last tile of the first."""
    count = 80
    query, key = torch.ones(1, 1, count, 16), torch.ones(1, 1, count // 2, 16)
    query[0, 0, count // 2 + 1] = float("nan")
    lse = (query @ key.mT).logsumexp(-1)
    operands = Operands(query, key, Terms(-count, count, count // 2), 1.0)
    maps = {each: pooled(operands, lse, (2, 1), largest=each == "max") for each in ("mass", "max")}
    return {pooling: numbers.flatten().tolist() for pooling, numbers in maps.items()}


def _length(name: str, dtype: str, dim: int) -> int:
    """More than one tile of queries and of keys, and no multiple of a tile."""
    return 70 if name in BANDS or (dtype, dim) != ("float32", 16) else 45


_CALL, _replaced = InterpretedFunction.__call__, set[str]()


def call_a_function(self: Any, *arguments: Any, **options: Any) -> Any:
    """A kernel's call of a function. The interpreter replaces Triton's language before each, which takes half the time.

    One call for each module is enough: launches replace what kernels name themselves, and the rest stays replaced.
    """
    module = self.fn.__module__
    if module in _replaced:
        return self.rewrite()(*arguments, **options)
    _replaced.add(module)
    return _CALL(self, *arguments, **options)


def main() -> None:
    InterpretedFunction.__call__ = call_a_function
    # The interpreter is NumPy, which warns of −∞ − −∞ and log 0; both are meant.
    warnings.simplefilter("ignore", RuntimeWarning)
    errors = {
        f"{name}, {dtype}, D={dim}": errors_of(
            name,
            getattr(torch, dtype),
            dim,
            torch.device("cpu"),
            length=_length(name, dtype, dim),
            heads=2,
            thorough=(name, dtype, dim) == THOROUGH,
            batch=1 if name in SHARED and (name, dtype, dim) != THOROUGH else 2,
        )
        for name, dtype, dim in CASES
    }
    print(json.dumps({"errors": errors, "maps with NaN": maps_with_nan()}))


if __name__ == "__main__":
    main()
