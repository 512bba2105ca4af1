"""Wrong arguments raise the same error whether or not the cache holds plans of valid calls like theirs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import clearhead
from clearhead import masks
from tests.masks.test_refusals import REFUSED as OF_MASKS
from tests.support.exact import exact_attention
from tests.support.forgetting import forget
from tests.support.refusals import Refusal
from tests.test_errors import REFUSED, K, Q

POSITIONS = {"query_positions": torch.arange(5), "key_positions": torch.arange(7).expand(2, 6, 7)}
#: Valid calls, beside which the wrong ones are refused. True is equal to 1, and 1 is not always as wrong.
VALID: tuple[dict[str, Any], ...] = (
    *({}, {"sinks": torch.zeros(6)}, POSITIONS, {"query_positions": 2}, {"key_positions": 1}),
    *({"mask": masks.lengths(torch.tensor([3, 7]))}, {"mask": torch.ones(5, 7, dtype=torch.bool)}),
    *({"scale": 0.5}, {"scale": 1.0}, {"softcap": 2.0}, {"softcap": 1.0}, {"dropout_p": 1.0}, {"return_lse": True}),
)


def _error(case: Refusal) -> tuple[type[BaseException], str]:
    with pytest.raises(clearhead.errors.ClearheadError) as caught:
        case[1]()
    return caught.type, str(caught.value)


@pytest.mark.parametrize("case", [*REFUSED, *OF_MASKS], ids=lambda case: case[0])
def test_a_hit_raises_what_a_miss_raises(case: Refusal) -> None:
    """Sinks and positions are among the options of valid calls and of wrong ones."""
    forget()
    missed = _error(case)
    for options in VALID:
        clearhead.attention(Q, K, K, **options)
    assert _error(case) == missed


# The same call on two devices, in both orders: each result lies where its inputs do.


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_devices_in_turn(causal: bool, learns: bool) -> None:
    inputs = [torch.randn(2, 3, 5, 7) for _ in range(3)]
    mask = masks.causal() if causal else None
    visible = torch.ones(5, 5).tril().bool()[None, None] if causal else None
    expected = exact_attention(*inputs, visible).output
    for order in itertools.permutations(("cpu", "meta")):
        forget()
        for device in (*order, *order):
            output = clearhead.attention(*(x.to(device).requires_grad_(learns) for x in inputs), mask)
            assert output.device.type == device
            assert output.requires_grad == learns
            if device == "cpu":
                torch.testing.assert_close(output.detach().double(), expected, rtol=0, atol=1e-5)
