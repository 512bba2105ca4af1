"""The same call on two devices, in both orders: each result lies where its inputs do."""

from __future__ import annotations

import itertools

import pytest
import torch

import clearhead
from clearhead import masks
from clearhead.errors import DeviceError
from tests.support.exact import exact_attention
from tests.support.forgetting import forget


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


def test_a_device_that_differs_is_refused_after_calls_on_one() -> None:
    query, key, value = (torch.randn(2, 3, 5, 7) for _ in range(3))
    for _ in range(2):
        clearhead.attention(query, key, value)
        clearhead.attention(query.to("meta"), key.to("meta"), value.to("meta"))
        for wrong in ((query, key.to("meta"), value), (query, key, value.to("meta")), (query.to("meta"), key, value)):
            with pytest.raises(DeviceError, match="query's device"):
                clearhead.attention(*wrong)
