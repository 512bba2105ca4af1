"""One thread, one seed, and two budgets for the generated tests: HYPOTHESIS_PROFILE=full spends the larger one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import clearhead.kernels.blocks
import clearhead.known_calls
import clearhead.masks.reach
from clearhead.native import instruction_sets, use_instruction_set

_SLOW_DRAWS = [HealthCheck.too_slow, HealthCheck.data_too_large]

# The same calls on every machine, so that a red run can be repeated by anybody.
settings.register_profile(
    "ci", max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW_DRAWS
)
settings.register_profile("full", max_examples=2000, deadline=None, suppress_health_check=_SLOW_DRAWS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(20170612)
    clearhead.known_calls.forget_calls()  # some tests change what kernels say


@pytest.fixture(name="small_blocks")
def _small_blocks() -> Iterator[None]:
    """Cut score matrices and masks into blocks of about fifty elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clearhead.kernels.blocks, "BLOCK_ELEMENTS", 50)
        patch.setattr(clearhead.kernels.blocks, "_ROWS", 3)
        patch.setattr(clearhead.kernels.blocks, "_FEWEST_ROWS", 2)
        patch.setattr(clearhead.masks.reach, "_ROWS_AT_A_TIME", 50)
        yield


@pytest.fixture(name="instructions", params=instruction_sets())
def _instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the native kernel on each instruction set of this machine in turn."""
    with use_instruction_set(request.param):
        yield request.param
