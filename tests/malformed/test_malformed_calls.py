"""Every public callable computes what it is given, or says what is wrong with it, naming the argument.

A call that is refused leaves what it was given, and what surrounds it, as it was.
"""

from __future__ import annotations

import inspect
import random
import warnings
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clearhead
import clearhead.integrations.transformers
from clearhead import caches, checkpoints, masks, plot, positions, transformer
from tests.malformed import cases  # noqa: F401  (registers them)
from tests.malformed.calls import CASES, malformed, problem_of
from tests.support.budgets import slow

NAMES = [name for name, case in CASES.items() for _ in range(case.weight)]


@pytest.mark.parametrize("calls", [1_000, *slow(100_000)])
def test_a_malformed_call_computes_or_names_the_argument(calls: int) -> None:
    @settings(max_examples=calls)
    @given(st.randoms(use_true_random=False))
    def require_clear(rng: random.Random) -> None:
        _require_clear(rng)

    require_clear()


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_drawn(name: str) -> None:
    """Each as often, whatever its weight."""
    rng = random.Random(name)
    for _ in range(8):
        _require_clear(rng, [name])


def _require_clear(rng: random.Random, names: list[str] = NAMES) -> None:
    with warnings.catch_warnings(action="ignore"):  # of PyTorch, about what some values are
        attempt = malformed(rng, names)
    problem = problem_of(attempt)
    assert not problem, f"{attempt!r}: {problem}"


@pytest.mark.parametrize("name", CASES)
def test_the_valid_call_computes(name: str) -> None:
    call = CASES[name].make()
    call.function(**call.arguments)


#: Public names that take no arguments of a user's, or that users write their own of.
WITHOUT_CASES = {
    "AttentionStatistics": "made by attention_statistics; its methods have cases",
    "Cache": "abstract",
    "KeyValues": "a tuple that caches return",
    "CrossKVCache": "takes no arguments",
    "activate": "takes no arguments",
    "check_values": "takes no arguments",
    "DecoderCache": "a tuple of two caches",
    "DecoderWeights": "a tuple that layers return",
    "Explanation": "made by explain",
    "EvictionPolicy": "abstract",
    "Finding": "made by identify",
    "Held": "made by caches; its method has a case",
    "PreparedMask": "made by Mask.prepare",
    "Mask": "abstract; its methods have cases",
    "MaskReport": "made by Mask.check",
    "Scaling": "abstract",
    "Summary": "made by record.summary; its method has a case",
    "TopK": "a tuple that attention_statistics returns",
    "UpgradeReport": "made by upgrade",
    "Walkthrough": "made by walkthrough; its method has a case",
    "Naming": "a list of entries; of_linears, which makes one, has a case",
    "Page": "made by page; its method has a case",
    "register": "takes no arguments",
}


PACKAGES = (
    *(clearhead, caches, checkpoints, masks, plot, positions, transformer),
    *(clearhead.nn, clearhead.nn.functional, clearhead.integrations.transformers),
)


@pytest.mark.parametrize("module", PACKAGES, ids=lambda module: module.__name__)
def test_every_public_callable_has_a_case(module: ModuleType) -> None:
    known = {part.split("(")[0] for name in CASES for part in name.replace(",", " ").replace("[", " ").split()}
    known |= {name.rpartition(".")[2] for name in known} | {name.split(".")[0] for name in known}
    missing = [name for name in _callables(module) if name not in known and name not in WITHOUT_CASES]
    assert missing == []


def _callables(module: Any) -> list[str]:
    public = [(name, getattr(module, name)) for name in module.__all__]
    return [name for name, value in public if callable(value) and not inspect.ismodule(value)]
