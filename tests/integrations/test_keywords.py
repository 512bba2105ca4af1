"""Every keyword that changes the result is honoured or refused by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.errors import ArgumentError, DeviceError, DTypeError, MaskTypeError, ShapeError
from clearhead.integrations.transformers import attention_forward
from tests.support.oracle import Problem, solve

B, H, HKV, L, S, D = 2, 6, 3, 5, 7, 4


def layer(**attributes: Any) -> Any:
    return SimpleNamespace(training=False, **attributes)


def tensors(length: int = L, keys: int = S, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(batch, H, length, D), torch.randn(batch, HKV, keys, D), torch.randn(batch, HKV, keys, D)


def formula(*inputs: Tensor, bias: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    """The output (B, L, H, D) and the weights of the oracle."""
    answer = solve(Problem(*inputs, lambda *_: True, () if bias is None else (bias,), **settings))
    return answer.output.transpose(1, 2), answer.weights


def hidden(visible: Tensor) -> Tensor:
    return torch.where(visible, 0.0, float("-inf")).double()


def check(expected: tuple[Tensor, Tensor], module: Any, *arguments: Any, **options: Any) -> None:
    output, weights = attention_forward(module, *arguments, output_attentions=True, **options)
    assert weights is not None
    torch.testing.assert_close(output.double(), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(weights.double(), expected[1], rtol=0, atol=1e-5)
    without, nothing = attention_forward(module, *arguments, **options)
    assert nothing is None
    assert without.equal(output)


@pytest.mark.parametrize("options", [{}, {"scaling": 0.3}, {"softcap": 1.5}, {"s_aux": torch.linspace(-2, 3, H)}])
def test_numbers_of_the_softmax(options: dict[str, Any]) -> None:
    inputs = tensors()
    ours = {"scaling": "scale", "softcap": "softcap", "s_aux": "sinks"}
    check(formula(*inputs, **{ours[name]: value for name, value in options.items()}), layer(), *inputs, None, **options)


def test_position_bias_adds_to_a_mask() -> None:
    inputs = tensors()
    position_bias, keep = torch.randn(1, H, L, S), torch.rand(B, 1, L, S) > 0.3
    keep[..., 0] = True
    expected = formula(*inputs, bias=position_bias + hidden(keep))
    check(expected, layer(), *inputs, keep, position_bias=position_bias)


@pytest.mark.parametrize(("length", "keys"), [(5, 5), (3, 7), (1, 7)])
def test_is_causal_in_the_call_is_bottom_right(length: int, keys: int) -> None:
    inputs = tensors(length, keys)
    visible = torch.ones(length, keys, dtype=torch.bool).tril(keys - length)
    check(formula(*inputs, bias=hidden(visible)), layer(), *inputs, None, is_causal=True)


@pytest.mark.parametrize("options", [{}, {"is_causal": None}, {"is_causal": False}])
def test_no_mask_hides_nothing_whatever_the_module_says(options: dict[str, Any]) -> None:
    inputs = tensors(5, 5)
    check(formula(*inputs), layer(is_causal=True), *inputs, None, **options)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "keys"), [(7, 7), (3, 7)])
def test_sliding_window_without_a_mask(causal: bool, length: int, keys: int) -> None:
    inputs = tensors(length, keys)
    distance = torch.arange(keys) - (torch.arange(length)[:, None] + keys - length)
    visible = (distance > -3) & (distance <= 0 if causal else distance < 3)
    check(formula(*inputs, bias=hidden(visible)), layer(), *inputs, None, sliding_window=3, is_causal=causal)


def test_packed_rows_by_their_boundaries() -> None:
    inputs = tensors(7, 7, batch=1)
    document = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    visible = (document == document[:, None]).tril()
    bounds = torch.tensor([0, 3, 5, 7], dtype=torch.int32)
    options = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 3, "max_length_k": 3}
    check(formula(*inputs, bias=hidden(visible)), layer(), *inputs, None, is_causal=True, **options)


@pytest.mark.parametrize("lowest", [None, torch.finfo(torch.float32).min, float("-inf")])
def test_masks_are_bool_or_hide_with_the_lowest_number(lowest: float | None) -> None:
    """A mask hides all that is hidden: a window of the call or what the module says adds nothing."""
    inputs = tensors(5, 5)
    keep = torch.rand(B, 1, 5, 5) > 0.3
    keep[..., 0] = True
    mask = keep if lowest is None else torch.where(keep, 0.0, lowest)
    check(formula(*inputs, bias=hidden(keep)), layer(is_causal=True), *inputs, mask, sliding_window=2)


def test_a_query_that_sees_nothing_gives_zero() -> None:
    inputs, keep = tensors(), torch.ones(B, 1, L, S, dtype=torch.bool)
    keep[0, :, 2] = False
    for mask in (keep, torch.where(keep, 0.0, torch.finfo(torch.float32).min)):
        output, weights = attention_forward(layer(), *inputs, mask, output_attentions=True)
        assert weights is not None
        assert output[0, 2].eq(0).all()
        assert weights[0, :, 2].eq(0).all()


def test_dropout_counts_only_while_training() -> None:
    inputs = tensors()
    evaluated, _ = attention_forward(layer(), *inputs, None, dropout=1.0)
    torch.testing.assert_close(evaluated.double(), formula(*inputs)[0], rtol=0, atol=1e-5)
    trained, _ = attention_forward(SimpleNamespace(training=True, is_causal=False), *inputs, None, dropout=1.0)
    assert trained.eq(0).all()


def test_half_precision_weights_have_the_models_dtype() -> None:
    output, weights = attention_forward(layer(), *(t.bfloat16() for t in tensors()), None, output_attentions=True)
    assert weights is not None
    assert output.dtype == weights.dtype == torch.bfloat16


def test_queries_shared_by_the_batch() -> None:
    query, key, value = tensors()
    expected = formula(query[:1].expand(B, -1, -1, -1), key, value)
    check(expected, layer(), query[:1], key, value, None)


@pytest.mark.parametrize("name", ["indices", "sinks"])
def test_unknown_keywords_are_refused_by_name(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{name}: .*may change the result"):
        attention_forward(layer(), *tensors(), None, **{name: torch.zeros(1)})


def test_unknown_keywords_of_none_and_known_ones_pass() -> None:
    inputs = tensors()
    check(formula(*inputs), layer(), *inputs, None, indices=None, use_cache=True, position_ids=torch.arange(L)[None])


def test_masks_that_cannot_be_read() -> None:
    inputs = tensors()
    with pytest.raises(DTypeError, match=r"attention_mask: .*torch.int64 of shape \(2, 1, 5, 7\)"):
        attention_forward(layer(), *inputs, torch.ones(B, 1, L, S, dtype=torch.long))
    with pytest.raises(MaskTypeError, match=r"attention_mask: .*got str"):
        attention_forward(layer(), *inputs, "causal")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="cu_seq_lens_q"):
        attention_forward(layer(), *inputs, None, cu_seq_lens_q=torch.tensor([0, 5]))


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_boundaries_without_data_are_refused(name: str) -> None:
    starts = torch.tensor([0, 3, 5])
    given: dict[str, Any] = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, name: starts.to("meta")}
    with pytest.raises(DeviceError, match=rf"{name}: expected the \w+'s cpu, got meta"):
        attention_forward(torch.nn.Module(), *tensors(5, 5, batch=1), None, **given)
