"""Every node test that the `onnx` package carries for Attention, on `clearhead.attention` and the cache."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

import clearhead

from .onnx_node import PREFIX, cases, names_in_the_source, run


@pytest.mark.parametrize("kernel", [None, "chunked", "reference"])
@pytest.mark.parametrize("name", cases())
def test_a_case(name: str, kernel: str | None) -> None:
    case = cases()[name]
    with contextlib.nullcontext() if kernel is None else clearhead.use_kernel(kernel):
        found = run(case)
    assert found.keys() == case.outputs.keys()
    for output, expected in case.outputs.items():
        judge(output, found[output], expected, case.rtol, case.atol)


def judge(output: str, found: Tensor, expected: Tensor, rtol: float, atol: float) -> None:
    """Cached keys and values to the last bit, float32 as everywhere here, half precision as ONNX's own runner does."""
    if output.startswith("present"):
        rtol = atol = 0.0
    elif expected.dtype == torch.float32:
        rtol, atol = 0.0, 1e-5 * float(expected[expected.isfinite()].abs().max())
    elif expected.dtype == torch.bfloat16:
        rtol = max(rtol, 2**-6)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{output}: {text}")


def test_no_case_is_left_out() -> None:
    """All that the package's source names are there, each also spelt out in other operators."""
    carried = names_in_the_source()
    plain = {name for name in cases() if "_expanded" not in name}
    assert plain == carried
    assert len(plain) > 0
    assert {name.split("_expanded")[0] for name in cases() if "_expanded" in name} == carried


def test_the_cases_cover_what_they_are_meant_to() -> None:
    """What the operator can be asked for occurs in some case."""
    everything = cases().values()
    assert {case.inputs["Q"].dtype for case in everything} == {torch.float32, torch.float16, torch.bfloat16}
    assert {case.inputs["Q"].dim() for case in everything} == {3, 4}
    asked = {name for case in everything for name in (*case.inputs, *case.outputs, *case.attributes)}
    assert asked >= {"past_key", "nonpad_kv_seqlen", "present_value", "qk_matmul_output", "softcap", "is_causal"}
    ranks = {case.inputs["attn_mask"].dim() for case in everything if "attn_mask" in case.inputs}
    assert 3 in ranks, "a mask per head"
    assert all(name.startswith(PREFIX) for name in cases())
