"""One thread, one seed, two budgets for the generated tests, and the machine that the tests see.

The profile ``ci`` generates the same calls in every run and on every machine, so that no run is red by chance;
HYPOTHESIS_PROFILE=full spends the larger budget and draws anew.

CLEARHEAD_TEST_ISA names the best instruction set of the native kernel (``none``: it was not built),
CLEARHEAD_TEST_VENDOR the processor's vendor as it names itself (``GenuineIntel``, ``AuthenticAMD``); by default both
are those of this machine. PyTorch's own is forced with its ATEN_CPU_CAPABILITY.

CLEARHEAD_TEST_INSTALLED=1 refuses to test a checkout's sources.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the programs that tests start: several tests run at once

import pytest
import torch
import torch.testing._internal.common_utils  # it loads a profile of its own: ours is loaded after it
from hypothesis import HealthCheck, Phase, settings

if os.environ.get("CLEARHEAD_TEST_ISA") == "none":
    sys.modules["clearhead._native._attention"] = None  # type: ignore[assignment]  # its import raises ModuleNotFoundError


import clearhead._layer.linear
import clearhead._layer.plan
import clearhead._native

_SLOW_DRAWS = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "ci", max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW_DRAWS
)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=_SLOW_DRAWS)
settings.register_profile(  # a mutant is caught by any failure: no smaller one is looked for
    "mutants", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)


def _require_installed() -> None:
    """In every worker: the tests see the wheel, and never the sources beside them."""
    where = Path(clearhead.__file__)
    if os.environ.get("CLEARHEAD_TEST_INSTALLED") == "1" and "site-packages" not in where.parts:
        raise pytest.UsageError(f"CLEARHEAD_TEST_INSTALLED=1: clearhead was imported from {where.parent}")


def _emulate_machine() -> None:
    best, vendor = os.environ.get("CLEARHEAD_TEST_ISA", "none"), os.environ.get("CLEARHEAD_TEST_VENDOR")
    if best != "none":
        sets = tuple(clearhead._native.instruction_sets())
        if best not in sets:
            raise pytest.UsageError(f"CLEARHEAD_TEST_ISA={best}: this machine has {', '.join(sets)}")
        for better in sets[: sets.index(best)]:
            del clearhead._native.instruction_sets()[better]
    if vendor is not None:
        clearhead._layer.linear.processor_maker = lambda: vendor


_require_installed()
_emulate_machine()

from tests.support.native import FLOAT_SETS, use_instruction_set  # noqa: E402  # of the machine that the tests see


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.default_generator.manual_seed(20170612)  # torch.manual_seed formats the stack, for devices that are not here
    clearhead._layer.plan._plans_of.cache_clear()  # some tests change what kernels say
    clearhead._layer.layer_plan._plan_of_key.cache_clear()
    yield
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert threads == 1, "it left more threads to all later tests, which would take the other worker's processor"


@pytest.fixture(name="small_blocks")
def _small_blocks() -> Iterator[None]:
    """Cut score matrices and masks into blocks of about fifty elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.kernels._blocks.BLOCK_ELEMENTS", 50)
        patch.setattr("clearhead.kernels._blocks._ROWS", 3)
        patch.setattr("clearhead.kernels._blocks._FEWEST_ROWS", 2)
        patch.setattr("clearhead.masks._coverage._ROWS_AT_A_TIME", 50)
        yield


@pytest.fixture(name="instructions", params=FLOAT_SETS)
def _instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the native kernel on each instruction set of this machine in turn."""
    with use_instruction_set(request.param):
        yield request.param


@pytest.fixture(name="fresh_compiler")
def _fresh_compiler() -> Iterator[None]:
    """Without graphs of other tests, and none of this test's left."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_collection_finish() -> None:
    """Leave the million objects of modules and tests out of later searches for garbage: each took 0.6 s with them."""
    gc.collect()
    gc.freeze()
