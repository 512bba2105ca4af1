"""Calls that are parts of a larger one, one after another: each drops what the larger one drops there."""

from __future__ import annotations

import itertools

import pytest
import torch

import clearhead
from clearhead._call.request import Request
from clearhead._environment import read_environment
from clearhead._layer.plan import attend
from clearhead.masks._grid import Offset
from tests.support.forgetting import forget

B, H, L, S, D = 2, 6, 5, 19, 7
_PLACES = [(0, 0), (3, 0), (2, 2), (3, 2), (0, 1)]


@pytest.mark.parametrize("kernel", ["native", "chunked", "reference"])
def test_parts_in_turn(kernel: str) -> None:
    seed = torch.tensor(20170612 << 8)
    query, key = torch.randn(B, H, L, D), torch.randn(B, H, S, D)
    units = torch.eye(S).expand(B, H, S, S)  # outputs are the weights that are left
    with clearhead.use_kernel(kernel):
        environment = read_environment()
        request = Request(dropout_p=0.4, seed=seed)
        expected = attend(query, key, units, request._replace(offset=Offset(H)), environment).output
        assert (expected == 0).any()
        for pair in itertools.permutations(_PLACES, 2):
            forget()
            for head, row in (*pair, *pair):
                part = query[:, head : head + 3, row : row + 3], key[:, head : head + 3], units[:, head : head + 3]
                result = attend(*part, request._replace(offset=Offset(H, head, row)), environment).output
                torch.testing.assert_close(result, expected[:, head : head + 3, row : row + 3], rtol=1e-5, atol=1e-6)
