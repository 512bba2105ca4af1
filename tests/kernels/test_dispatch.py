"""Which kernel runs and why: `explain`, `use_kernel`, refusals in words, threads."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead
from clearhead import masks
from clearhead.errors import ArgumentError, KernelError
from clearhead.kernels import Refusal
from clearhead.masks import Mask

X = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(1))
NO_FUSED = "PyTorch has no fused kernel for this call and would build (B, H, L, S)"


@pytest.fixture(autouse=True)
def _without_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice among the kernels that every installation has."""
    monkeypatch.setattr("clearhead.kernels._native_support.extension", None)


@pytest.fixture(name="flex_is_built")
def _flex_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a compiler is here decides what `flex` says."""
    monkeypatch.setattr("clearhead.kernels._flex._builds_for_this_cpu", lambda: True)
    monkeypatch.setenv("CXX", sys.executable)


def chosen(*args: Tensor, **options: object) -> str | None:
    return clearhead.explain(*(args or (X, X, X)), **options).kernel


@pytest.mark.parametrize(
    ("options", "reason", "flex_reason"),
    [
        ({"return_lse": True}, "PyTorch does not give out the log-sum-exp", "it gives out no log-sum-exp"),
        ({"softcap": 3.0}, "it has no soft-cap", None),
        ({"dropout_p": 0.5}, NO_FUSED, "it has no dropout"),
        (
            {"mask": masks.bias(torch.zeros(7, 7, requires_grad=True))},
            "its fused kernels give no gradient for a bias",
            "it has no backward on the CPU",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_reasons_against_sdpa(
    options: dict[str, object], reason: str, flex_reason: str | None, flex_is_built: None
) -> None:
    explanation = clearhead.explain(X, X, X, **options)
    assert explanation.kernel == "chunked"
    against_flex = () if flex_reason is None else (flex_reason,)
    assert explanation.reasons["sdpa"] == (reason,)
    assert explanation.reasons["flex"] == against_flex
    assert explanation.reasons["chunked"] == explanation.reasons["reference"] == ()
    with pytest.raises(KernelError) as raised, clearhead.use_kernel("sdpa"):
        clearhead.attention(X, X, X, **options)
    assert str(raised.value) == (
        f"use_kernel('sdpa'): this kernel cannot run the call: {reason}. "
        f"Leave the choice to Clearhead, or force one that can: chunked, {'' if flex_reason else 'flex, '}reference."
    )


def test_every_reason_is_named(flex_is_built: None) -> None:
    explanation = clearhead.explain(X, X, X, softcap=3.0, sinks=torch.zeros(3), return_lse=True)
    assert explanation.reasons["sdpa"] == (
        "PyTorch does not give out the log-sum-exp",
        "it has no soft-cap",
    )
    lines = str(explanation).splitlines()
    assert lines[0] == "runs on: chunked"
    assert "  sdpa       PyTorch does not give out the log-sum-exp; it has no soft-cap" in lines
    assert "  flex       it gives out no log-sum-exp; it has no sinks" in lines
    assert "  reference  can run it" in lines
    assert lines[-1].startswith("projections: PyTorch's: ") or lines[-1].startswith("projections: oneDNN's")


@pytest.mark.parametrize(
    "mask", [None, masks.causal(), masks.sliding_window(2, 2), masks.lengths(torch.tensor([7, 3]))]
)
def test_plain_calls_run_on_sdpa(mask: masks.Mask | None) -> None:
    assert chosen(mask=mask) == "sdpa"


def test_sizes_of_zero_and_a_wider_value_leave_sdpa() -> None:
    empty = torch.randn(2, 3, 0, 5)
    assert clearhead.explain(empty, X, X).reasons["sdpa"] == ("a size is 0",)
    assert clearhead.explain(X, X, torch.randn(2, 3, 7, 11)).reasons["sdpa"] == (NO_FUSED,)


def test_a_frozen_bias_and_a_bias_without_gradients_stay_on_sdpa() -> None:
    learnt = masks.bias(torch.zeros(7, 7, requires_grad=True))
    assert chosen(mask=masks.bias(torch.zeros(7, 7))) == "sdpa"
    with torch.no_grad():
        assert chosen(mask=learnt) == "sdpa"


def test_explain_computes_nothing_and_raises_what_attention_raises() -> None:
    with pytest.raises(clearhead.errors.ShapeError) as from_explain:
        clearhead.explain(X, X[:1], X)
    with pytest.raises(clearhead.errors.ShapeError) as from_attention:
        clearhead.attention(X, X[:1], X)
    assert str(from_explain.value) == str(from_attention.value)
    state = torch.get_rng_state()
    clearhead.explain(X, X, X, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), state)


def test_explain_takes_inputs_without_a_batch_and_of_mixed_dtypes_under_autocast() -> None:
    assert chosen(X[0], X[0], X[0]) == "sdpa"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert chosen(X, X.bfloat16(), X) == "chunked"  # both are bfloat16 by then


@pytest.mark.parametrize(("forced", "runs_on"), [("reference", "reference"), ("sdpa", None)])
def test_a_forced_kernel_runs_or_refuses(forced: str, runs_on: str | None) -> None:
    with clearhead.use_kernel(forced):
        explanation = clearhead.explain(X, X, X, softcap=3.0)
    assert (explanation.kernel, explanation.forced) == (runs_on, True)
    assert str(explanation).startswith(f"runs on: {runs_on or 'no kernel'} (forced by use_kernel)")


def test_one_object_entered_twice() -> None:
    force = clearhead.use_kernel("chunked")
    with force:
        with clearhead.use_kernel("reference"):
            with force:
                assert chosen() == "chunked"
            assert chosen() == "reference"
        assert chosen() == "chunked"
    assert chosen() == "sdpa"
    with force:
        assert chosen() == "chunked"


def test_an_exception_restores_what_was() -> None:
    with clearhead.use_kernel("reference"):
        with pytest.raises(ZeroDivisionError), clearhead.use_kernel("chunked"):
            raise ZeroDivisionError
        assert chosen() == "reference"
        with pytest.raises(KernelError), clearhead.use_kernel("sdpa"):
            clearhead.attention(X, X, X, softcap=1.0)
        assert chosen() == "reference"
    assert chosen() == "sdpa"


@pytest.mark.parametrize("name", ["flash", "", "SDPA", None, 3])
def test_an_unknown_kernel(name: object) -> None:
    with pytest.raises(ArgumentError, match=r"name: expected one of native, sdpa, chunked, flex, reference, got "):
        clearhead.use_kernel(name)


def test_one_object_shared_by_two_threads() -> None:
    """Each thread gets back what it had, in whatever order they leave."""
    force = clearhead.use_kernel("chunked")
    entered, may_leave = threading.Event(), threading.Event()

    def other_thread() -> str | None:
        with force:
            entered.set()
            may_leave.wait(timeout=60)
        return chosen()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(other_thread)
        assert entered.wait(timeout=60)
        assert chosen() == "sdpa"
        with clearhead.use_kernel("reference"), force:
            may_leave.set()
            assert found.result(timeout=60) == "sdpa"
    assert chosen() == "sdpa"


def test_a_refusal_is_put_together_when_it_is_read() -> None:
    class Unreadable:
        def __str__(self) -> str:
            raise AssertionError("formatted too early")

    refusal = Refusal("longer than {limit}", limit=Unreadable())
    with pytest.raises(AssertionError, match="too early"):
        str(refusal)
    assert str(Refusal("longer than {limit}", limit=3)) == "longer than 3"


# PyTorch's choice among its attention backends, which decides whether `sdpa` runs a call: on CUDA, and under flags.


B, H, L, S, D = 2, 3, 5, 7, 11


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(2, 1)], ids=["none", "causal", "window"])
def test_a_forced_math_backend_is_not_fused_after_a_normal_call(
    mask: Mask | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    operands = torch.randn(B, H, L, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)
    attention = Mock(wraps=F.scaled_dot_product_attention)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    for calls in (1, 2):  # the second time with plans of both
        expected = clearhead.attention(*operands, mask)
        assert clearhead.explain(*operands, mask).kernel == "sdpa"
        with sdpa_kernel(SDPBackend.MATH):
            assert clearhead.explain(*operands, mask).reasons["sdpa"] == (NO_FUSED,)
            assert torch.allclose(clearhead.attention(*operands, mask), expected, atol=1e-6)
            with pytest.raises(KernelError, match="PyTorch has no fused kernel"), clearhead.use_kernel("sdpa"):
                clearhead.attention(*operands, mask)
        assert attention.call_count == calls
