"""The native CPU kernel: C++ without PyTorch's headers, built at install where there is a compiler.

`kernels/_native_plan.py` calls the kernel, `coverage.py` the search for the coverage of a mask.

The environment variable ``CLEARHEAD_ISA`` forces an instruction set, one of `instruction_sets`; it is read once, when
the extension is first used.
"""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

from ..errors import ArgumentError, explain_problem

__all__ = ["extension", "instruction_set", "instruction_sets", "why_missing"]


def _load() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("clearhead._native._attention"), ""
    except ModuleNotFoundError:
        return None, "it was not built when Clearhead was installed, which takes a C++ compiler (gcc or clang)"
    except ImportError as error:
        return None, f"it cannot be loaded: {error}"


#: The compiled module, or ``None``, and then why. Plain names, which a tracing compiler can read.
extension, why_missing = _load()


def require_declared(constant: str, *names: str) -> None:
    """Compare what Python and C++ both declare, such as the order of arguments.

    Args:
        constant: of the extension.
        names: which it holds, in order, as in ``module.cpp``.

    Raises:
        ImportError: if the extension was built from other sources.
    """
    expected, built = ", ".join(names), getattr(extension, constant, "none")
    if extension is not None and built != expected:
        raise ImportError(
            explain_problem(
                f"{constant.replace('_', ' ')} of {extension.__name__}",
                expected=expected,
                got=built,
                fix="It was built from other sources: run python setup.py build_ext --inplace --force, "
                "or install Clearhead again.",
            )
        )


@cache
def instruction_sets() -> dict[str, int]:
    """The instruction sets of this processor that the kernel was built for, starting with the one in use.

    Returns:
        Numbers in the extension by name.

    Example:
        >>> from clearhead._native import extension, instruction_sets
        >>> ("generic" in instruction_sets()) == (extension is not None)
        True
    """
    if extension is None:
        return {}
    numbers: dict[str, int] = {name: number for number, name in extension.instruction_sets()}
    names = best_first(list(numbers), extension.pairs_are_slow)
    wanted = os.environ.get("CLEARHEAD_ISA")
    if wanted:
        if wanted not in names:
            expected = f"an instruction set of this processor ({', '.join(names)})"
            raise ArgumentError(explain_problem("CLEARHEAD_ISA", expected=expected, got=repr(wanted)))
        names.sort(key=lambda name: name != wanted)
    return dict(zip(names, map(numbers.get, names), strict=True))  # pyright: ignore


def best_first(names: list[str], pairs_are_slow: bool) -> list[str]:
    """Order instruction sets, given from the most features to the fewest, by their speed.

    Args:
        names: of the instruction sets.
        pairs_are_slow: whether the vector instruction that multiplies pairs of bfloat16 is slower than plain float32.
    """
    pairs, plain = "avx512_bf16", "avx512"
    if not pairs_are_slow or pairs not in names or plain not in names:
        return names
    others = [name for name in names if name != pairs]
    return [ranked for name in others for ranked in ((name, pairs) if name == plain else (name,))]


def instruction_set() -> str | None:
    """The instruction set in use, or ``None`` without the extension."""
    return next(iter(instruction_sets()), None)


def instruction_set_number() -> int:
    """The same as the compiled module counts them."""
    return next(iter(instruction_sets().values()))
