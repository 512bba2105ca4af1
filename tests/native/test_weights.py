"""Weights from the native kernel, on every instruction set: all rows or chosen ones, each head's or their mean."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
import clearhead._layer.plan
import clearhead.kernels._weights
from clearhead import masks
from tests.support.native import needs_native, on_every_set, threads
from tests.support.native_cases import CASES, Case
from tests.support.requests import requested

EVERY = [name for name in CASES if not name.startswith("dropout")]
#: Masks that would have to be written down, which is not done for a few rows.
NOT_IN_PLACE = ("where", "scattered documents")

pytestmark = needs_native


@pytest.fixture(name="ran")
def _ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passes over the scores that return weights only."""
    passes: list[str] = []
    places = ((clearhead.kernels._weights, "native_weights"), (clearhead._layer.plan, "compute_weights"))
    for module, name in places:
        original = getattr(module, name)

        def noting(*arguments: Any, function: Any = original, **options: Any) -> Any:
            found = function(*arguments, **options)
            if found is not None:
                passes.append(function.__name__)
            return found

        monkeypatch.setattr(module, name, noting)
    return passes


def attention_with_weights(*inputs: Tensor, average: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    results = requested(*inputs, weights="average" if average else "heads", **options)
    assert results.weights is not None
    return results.output, results.weights


def arguments_of(case: Case, dtype: torch.dtype) -> tuple[dict[str, Tensor], dict[str, Any]]:
    inputs = {name: tensor.detach().to(dtype) for name, tensor in case.inputs().items()}
    mask = case.mask(case.batch, case.kv_heads * case.group, case.length, case.count)
    options = {name: value for name, value in case.options.items() if name != "dropout_p"}
    return inputs, {**options, "mask": mask, "sinks": inputs.get("sinks")}


@on_every_set({"name": EVERY}, {"average": [False, True]})
def test_equal_those_of_float64(name: str, average: bool, instructions: str, ran: list[str]) -> None:
    case = CASES[name]
    chosen = [case.length - 1, *range(0, case.length, 5), 0]
    for queries in (None, chosen):
        found, exact = _weights(case, torch.float32, queries, average), _exact_weights(case, average)
        exact = exact if queries is None else exact[..., queries, :]
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6)
        assert torch.equal(found[exact == 0], torch.zeros_like(found[exact == 0])), "hidden keys weigh nothing"
    assert len(ran) == (1 if name in NOT_IN_PLACE else 2)
    inputs, options = arguments_of(case, torch.float32)
    query, key, value = inputs["query"], inputs["key"], inputs["value"]
    ran.clear()
    output, weights = attention_with_weights(query, key, value, average=average, **options)
    assert not ran, "output and weights come from one pass"
    expected = clearhead.attention(query, key, value, **options)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert output.stride() == expected.stride()
    torch.testing.assert_close(weights, _weights(case, torch.float32, None, average), rtol=0, atol=1e-6)


def _weights(case: Case, dtype: torch.dtype, queries: list[int] | None, average: bool) -> Tensor:
    inputs, options = arguments_of(case, dtype)
    return clearhead.attention_weights(
        inputs["query"], inputs["key"], queries=queries, average_attn_weights=average, **options
    )


@functools.lru_cache(maxsize=128)
def _exact_weights(case: Case, average: bool) -> Tensor:
    return _weights(case, torch.float64, None, average)


@on_every_set({"name": EVERY}, {"of": ["both", "output", "weights"]})
def test_gradients_equal_those_of_float64(name: str, of: str, instructions: str) -> None:
    exact = _exact_gradients(CASES[name], of)
    for found, expected in zip(_gradients(CASES[name], torch.float32, of), exact, strict=True):
        atol = 1e-5 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=atol)


@functools.lru_cache(maxsize=256)
def _exact_gradients(case: Case, of: str) -> tuple[Tensor, ...]:
    return _gradients(case, torch.float64, of)


def _gradients(case: Case, dtype: torch.dtype, of: str, *, create_graph: bool = False) -> tuple[Tensor, ...]:
    """Of query, key, value and sinks."""
    plain, options = arguments_of(case, dtype)
    inputs = {name: tensor.requires_grad_() for name, tensor in plain.items()}
    options["sinks"] = inputs.get("sinks")
    results = attention_with_weights(inputs["query"], inputs["key"], inputs["value"], **options)
    random = torch.Generator().manual_seed(11)
    factors = [torch.randn(x.shape, generator=random, dtype=torch.float64).to(dtype) for x in results]
    losses = [(x * factor).sum() for x, factor in zip(results, factors, strict=True)]
    loss = {"output": losses[0], "weights": losses[1], "both": sum(losses)}[of]
    return torch.autograd.grad(loss, list(inputs.values()), create_graph=create_graph, materialize_grads=True)


@pytest.mark.parametrize("of", ["output", "weights", "both"])
def test_second_derivatives(of: str, ran: list[str]) -> None:
    case = Case(batch=1, length=7, count=11, mask=lambda b, h, n, s: masks.causal("bottom_right"), sinks=True)
    exact = _gradients(case, torch.float64, of, create_graph=True)
    ran.clear()
    found = _gradients(case, torch.float32, of, create_graph=True)
    assert not ran
    for gradient, expected in zip(found, exact, strict=True):
        atol = 1e-5 * max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=atol)
        assert gradient.requires_grad == expected.requires_grad


@pytest.mark.parametrize("shape", [(1, 3, 7, 11), (7, 11)], ids=["differentiated here", "left to others"])
def test_a_learnt_bias_gets_the_gradients_of_both_results(shape: tuple[int, ...]) -> None:
    query, key, bias = torch.randn(2, 3, 7, 5), torch.randn(2, 3, 11, 5), torch.randn(shape)

    def gradient(dtype: torch.dtype) -> Tensor:
        learnt, k = bias.to(dtype, copy=True).requires_grad_(), key.to(dtype)
        results = attention_with_weights(query.to(dtype), k, k, mask=masks.bias(learnt))
        return torch.autograd.grad(sum(x.square().sum() for x in results), learnt)[0]

    torch.testing.assert_close(gradient(torch.float32).double(), gradient(torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("dtype", "dropout_p"), [(torch.float32, 0.5), (torch.bfloat16, 0.0)], ids=str)
def test_dropout_and_half_precision_take_two_passes(dtype: torch.dtype, dropout_p: float, ran: list[str]) -> None:
    x = torch.randn(2, 3, 7, 5).to(dtype)
    attention_with_weights(x, x, x, dropout_p=dropout_p)
    assert ran.count("native_weights") == 1


def test_the_same_bits_with_and_without_gradients_and_watched(ran: list[str]) -> None:
    """So that checkpointing computes again what it computed, and a record changes nothing, in one step or not."""
    attend = clearhead.MultiHeadAttention(24, 3)
    x = torch.randn(2, 61, 24)
    wanted = attend(x, need_weights=True)
    with torch.no_grad():
        alone = attend(x, need_weights=True)
        with clearhead.record(attend, ("entropy",)) as found:
            watched = attend(x, need_weights=True)
    assert not ran
    assert len(found) == 1
    for other in (alone, watched):
        assert all(torch.equal(one, two) for one, two in zip(wanted, other, strict=True))


@pytest.mark.parametrize("average", [False, True], ids=["per head", "average"])
@pytest.mark.parametrize("name", ["causal", "keep"])
def test_a_forced_kernel_computes_weights_too(name: str, average: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = {"causal": masks.causal(), "keep": masks.keep(torch.ones(7, 7).tril(-1).bool())}[name]
    x = torch.randn(2, 3, 7, 5, requires_grad=True)
    expected = attention_with_weights(*(x.double(),) * 3, mask=mask, average=average)
    monkeypatch.setattr(clearhead.kernels._native_statistics, "refusals", lambda call: pytest.fail("native"))
    for forced in ("chunked", "reference"):
        with clearhead.use_kernel(forced):
            found = attention_with_weights(x, x, x, mask=mask, average=average)
        for result, exact in zip(found, expected, strict=True):
            torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6)
            gradients = [torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0] for y in (result, exact)]
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    message = r"use_kernel\('sdpa'\): this kernel cannot run the call: it gives no weights. Leave the choice"
    with clearhead.use_kernel("sdpa"), pytest.raises(clearhead.errors.KernelError, match=message):
        attention_with_weights(x, x, x, mask=mask)


def test_few_rows_do_not_write_a_rule_down() -> None:
    """A rule in Python is asked about the chosen rows alone."""
    asked: list[int] = []

    def rule(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        asked.append(query.numel())
        return query >= key

    query, key = torch.randn(1, 2, 509, 4), torch.randn(1, 2, 509, 4)
    found = clearhead.attention_weights(query, key, masks.mask_mod(rule), queries=[3, 500])
    assert max(asked[1:], default=0) <= 509
    expected = clearhead.attention_weights(query, key, masks.causal(), queries=[3, 500])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_same_bits_whatever_the_threads() -> None:
    query, key = torch.randn(2, 6, 499, 8), torch.randn(2, 3, 131, 8)
    for average in (False, True):
        results = []
        for count in (1, 2, 3):
            with threads(count):
                results.append(clearhead.attention_weights(query, key, average_attn_weights=average))
        assert all(torch.equal(weights, results[0]) for weights in results[1:])
