"""Which form computes statistics, and why the forms before it do not."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import clearhead
from clearhead import masks
from clearhead._call.call import Call, valid_call
from clearhead._statistics.compute import FORMS
from clearhead.errors import KernelError
from clearhead.kernels import _native_statistics, _native_support
from clearhead.kernels._triton_check import triton_refusals
from tests.support.native import needs_native


def built(mask: masks.Mask | None = None, dtype: torch.dtype = torch.float32) -> Call:
    query, key = torch.randn(2, 4, 5, 8, dtype=dtype), torch.randn(2, 2, 7, 8, dtype=dtype)
    return valid_call(Call(query, key, key, mask))


def reasons(call: Call) -> list[str]:
    return [str(reason) for reason in _native_statistics.refusals(call)]


@needs_native
def test_the_native_kernel_says_why_it_computes_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons(built()) == []
    assert reasons(built(dtype=torch.float64)) == ["it computes in float32, and the tensors are torch.float64"]
    with FlopCounterMode(display=False):
        assert reasons(built()) == ["its weights and statistics are no operator that a TorchDispatchMode could see"]
    monkeypatch.setattr(_native_support, "_MOST_CELLS", 2 * 5 * 7 - 1)
    assert reasons(built(masks.causal())) == []
    large = "for weights and statistics it would write down a mask of 70 cells"
    assert reasons(built(~masks.causal() | masks.lengths(torch.tensor([3, 7])))) == [large]


def test_the_triton_kernels_say_why_they_compute_no_statistics() -> None:
    (reason,) = triton_refusals(built())
    assert str(reason) == "it needs Triton, a CUDA device, D ≤ 256, no float64 and no empty tensor"
    with FlopCounterMode(display=False):
        (reason,) = triton_refusals(built())
    assert str(reason) == "graphs, transforms, dispatch modes and subclasses of tensors need PyTorch's own operators"


@needs_native
def test_the_first_form_without_a_refusal_computes() -> None:
    first = [[not form.refusals(built(dtype=dtype)) for form in FORMS] for dtype in (torch.float32, torch.float64)]
    assert first == [[False, True, True], [False, False, True]]


@pytest.mark.parametrize("names", [("rows",), ("entropy",), ("entropy", "output_norm", "rows")], ids=len)
def test_queries_that_see_a_key_are_in_every_result_and_last(names: tuple[str, ...]) -> None:
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    visible = torch.ones(2, 4, 5, 7, dtype=torch.bool)
    visible[0, 1, 3], visible[0, 0, 2], visible[0, 1, 2] = False, False, False
    found = clearhead.attention_statistics(query, key, visible, value=key, statistics=names)
    assert found.names[-1] == "sees"
    assert found.sees.logical_not().nonzero().tolist() == [[0, 0, 2], [0, 1, 2], [0, 1, 3]]
    if "rows" not in names:
        averaged = clearhead.attention_statistics(query, key, visible, value=key, statistics=names, per="kv_head")
        assert averaged.sees.logical_not().nonzero().tolist() == [[0, 0, 2]]


@needs_native
def test_a_forced_kernel_says_why_it_gives_no_weights() -> None:
    message = r"use_kernel\('native'\): this kernel cannot run the call: its weights and statistics are no operator"
    with clearhead.use_kernel("native"), FlopCounterMode(display=False), pytest.raises(KernelError, match=message):
        clearhead.MultiHeadAttention(8, 2)(torch.randn(1, 3, 8), need_weights=True)
