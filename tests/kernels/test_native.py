"""The native kernel against attention written a second time, over generated calls, on every instruction set here."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given

import clearhead
from tests.support.calls import Call, calls
from tests.support.comparing import eval_output, expected_numbers, kernel_numbers, require_close, require_half_as_good
from tests.support.native import fewer_unless_best, needs_native
from tests.support.oracle import solve

HALVES = [torch.bfloat16, torch.float16]

pytestmark = needs_native


def refused(call: Call) -> bool:
    return bool(clearhead.explain(*call.attention_arguments, **call.options).reasons["native"])


@pytest.mark.parametrize("fusable", [False, True], ids=["any", "fusable"])
def test_equals_oracle(fusable: bool, instructions: str) -> None:
    ran: Counter[bool] = Counter()

    @fewer_unless_best(instructions)
    @given(calls(torch.float32, fusable=fusable))
    def compare(call: Call) -> None:
        expected = expected_numbers(call)
        with torch.no_grad():
            forward_runs = not refused(call)
        if forward_runs:
            require_close({"output": eval_output(call, "native")}, {"output": expected["output"]})
        runs = not refused(call)
        ran[runs] += 1
        if runs:
            require_close(kernel_numbers(call, "native"), expected)

    compare()
    assert ran[True] > 2 * ran[False]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_as_good_as_reference(dtype: torch.dtype, instructions: str) -> None:
    @fewer_unless_best(instructions)
    @given(calls(dtype))
    def compare(call: Call) -> None:
        with torch.no_grad():
            if not refused(call):
                found, reference = ({"output": eval_output(call, name)} for name in ("native", "reference"))
                require_half_as_good(found, reference, {"output": solve(call.problem).output.detach()}, dtype)
        if not refused(call):
            found, reference = (kernel_numbers(call, name) for name in ("native", "reference"))
            require_half_as_good(found, reference, expected_numbers(call), dtype)

    compare()
