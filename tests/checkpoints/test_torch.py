"""PyTorch's own module: packed or separate weights, every combination of biases, and what has no place here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead.checkpoints import identify, load, save
from clearhead.errors import ArgumentError, CheckpointError
from tests.support.randomised import randomised

from .lessons import assert_same_bits

B, H, D, L, S = 3, 5, 7, 11, 13
E = H * D


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kdim", "vdim"), [(None, None), (17, None), (17, 19)])
def test_same_outputs_and_weights(bias: bool, kdim: int | None, vdim: int | None) -> None:
    theirs = randomised(nn.MultiheadAttention(E, H, bias=bias, kdim=kdim, vdim=vdim, dtype=torch.float64), 0.1)
    ours = load(theirs)
    assert identify(theirs).naming.fused == (kdim is None and vdim is None)
    query, key, value = (torch.randn(B, n, size or E).double() for n, size in ((L, E), (S, kdim), (S, vdim)))
    padding = torch.arange(S) >= torch.tensor([S, 4, 1])[:, None]
    attn_mask = torch.rand(L, S) < 0.3
    attn_mask[:, 0] = False
    inputs = (x.transpose(0, 1) for x in (query, key, value))
    expected, expected_weights = theirs(*inputs, key_padding_mask=padding, attn_mask=attn_mask)
    output, weights = ours(query, key, value, mask=masks.drop(attn_mask) & masks.drop(keys=padding), need_weights=True)
    torch.testing.assert_close(output, expected.transpose(0, 1), atol=1e-10, rtol=0)
    torch.testing.assert_close(weights, expected_weights, atol=1e-10, rtol=0)


@pytest.mark.parametrize("biases", [{}, {"in_proj_bias": 3 * E}, {"out_proj.bias": E}], ids=str)
def test_input_and_output_biases_are_kept_apart(biases: dict[str, int]) -> None:
    state = {"in_proj_weight": torch.randn(3 * E, E), "out_proj.weight": torch.randn(E, E)}
    state |= {name: torch.randn(size) for name, size in biases.items()}
    assert_same_bits(save(load(state, H), "torch"), state)


@pytest.mark.parametrize("biased", ["q", "qv", "ko"])
def test_a_missing_bias_among_query_key_and_value_becomes_zeros(biased: str) -> None:
    state = {f"w_{part}.weight": torch.randn(E, E) for part in "qkvo"}
    state |= {f"w_{part}.bias": torch.randn(E) for part in biased}
    ours = load(state, H)
    roles = {"q": "query", "k": "key", "v": "value"}
    missing = [part for part in roles if part not in biased]
    assert f"biases of zeros added: {', '.join(roles[part] for part in missing)}" in str(ours.loaded_from)
    saved = save(ours, "w_q")
    assert saved.keys() == state.keys() | {f"w_{part}.bias" for part in missing}
    assert all(torch.equal(tensor, state.get(key, torch.zeros(E))) for key, tensor in saved.items())


def test_extra_keys_are_refused_with_the_name_of_the_class_that_has_them() -> None:
    theirs = nn.MultiheadAttention(E, H, add_bias_kv=True)
    with pytest.raises(CheckpointError, match=r"got bias_k \(.*clearhead\.nn\.MultiheadAttention has them\); bias_v"):
        load(theirs)
    with pytest.raises(CheckpointError, match=r"add_zero_attn\. clearhead\.nn\.MultiheadAttention has it"):
        load(nn.ModuleDict({"self_attn": nn.MultiheadAttention(E, H, add_zero_attn=True)}))


def grouped(query: int, key: int) -> dict[str, Tensor]:
    sizes = {"q": (query, E), "k": (key, E), "v": (key, E), "o": (E, query)}
    return {f"{part}_proj.weight": torch.randn(*size) for part, size in sizes.items()}


@pytest.mark.parametrize(
    ("state", "heads", "expected"),
    [
        (grouped(E, E), {}, "num_heads: expected an int ≥ 1, got None. Shapes of weights do not say it"),
        (grouped(E, E), {"num_heads": 4}, "num_heads: expected a divisor of 35, the features of the queries, got 4"),
        (grouped(E, E), {"num_heads": 0}, "num_heads: expected a divisor of 35"),
        (grouped(E, E), {"num_heads": 5.0}, "num_heads: expected a divisor of 35"),
        (grouped(24, 6), {"num_heads": 3}, "24 features of queries and 6 of keys into heads of one size"),
        (grouped(24, 18), {"num_heads": 4}, "24 features of queries and 18 of keys"),
        (grouped(24, 6), {"num_heads": 8, "num_kv_heads": 4}, "num_kv_heads: expected 2, as the shapes say"),
        (nn.MultiheadAttention(E, H), {"num_heads": 7}, "num_heads: expected 5, which is what the module says, got 7"),
    ],
)
def test_heads_that_do_not_fit(state: Any, heads: dict[str, int], expected: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        load(state, **heads)
    assert expected in str(raised.value)
