"""The structure of a mask is computed once in each call: by the layer, or by the kernels."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import clearhead
from clearhead import masks


@pytest.mark.parametrize("kernel", ["native", "chunked", "sdpa"])
@pytest.mark.parametrize("length", [5, 512])  # the second is long enough to leave padding out
def test_once_in_a_first_call_and_in_later_ones(kernel: str, length: int) -> None:
    attend = clearhead.MultiHeadAttention(16, 2).eval()
    x, lengths = torch.randn(3, length, 16), torch.tensor([2, 4, length])
    rules = [type(masks.causal()), type(masks.lengths(lengths))]
    with torch.no_grad(), clearhead.use_kernel(kernel):
        for _ in range(3):
            mask = masks.causal() & masks.lengths(lengths)
            with (
                mock.patch.object(rules[0], "structure", autospec=True, side_effect=rules[0].structure) as of_causal,
                mock.patch.object(rules[1], "structure", autospec=True, side_effect=rules[1].structure) as of_lengths,
            ):
                attend(x, mask=mask)
            assert of_lengths.call_count == 1
            assert of_causal.call_count <= 2  # packed sequences are another call
