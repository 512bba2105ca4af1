"""Position parts inside `MultiHeadAttention`: padding, caches and moved positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.positions import ALiBi, RelativeBias, Rotary, YarnScaling

BATCH, HEADS, KV_HEADS, HEAD_DIM, EMBED, LENGTH = 3, 6, 3, 10, 17, 13

PARTS = {
    "partial rotary": lambda: {"position": Rotary(HEAD_DIM, fraction=0.4, interleaved=True)},
    "yarn": lambda: {"position": Rotary(HEAD_DIM, scaling=YarnScaling(4.0, 7))},
    "alibi": lambda: {"mask": ALiBi(HEADS)},
    "relative": lambda: {"mask": RelativeBias(HEADS, 8, 9)},
    "all": lambda: {
        "position": Rotary(HEAD_DIM),
        "mask": ALiBi(HEADS) & RelativeBias(HEADS) & masks.sliding_window(5, 0),
    },
}


def module(parts: str, dtype: torch.dtype = torch.float64) -> clearhead.MultiHeadAttention:
    sizes = {"num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    made = clearhead.MultiHeadAttention(EMBED, HEADS, **sizes, **PARTS[parts](), dtype=dtype)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made.to(dtype)


def close(one: Tensor, other: Tensor) -> None:
    tolerance = 1e-5 if one.dtype == torch.float32 else 1e-12
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance * float(other.detach().abs().max()))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("parts", PARTS)
def test_a_padded_batch_gives_what_each_item_gives_alone(parts: str, side: str) -> None:
    attend = module(parts, torch.float32)
    lengths = [13, 5, 2]
    x = torch.full((BATCH, LENGTH, EMBED), torch.nan)
    positions = torch.full((BATCH, LENGTH), -1)
    places = [slice(LENGTH - n, LENGTH) if side == "left" else slice(0, n) for n in lengths]
    for item, (place, n) in enumerate(zip(places, lengths, strict=True)):
        x[item, place] = torch.randn(n, EMBED)
        positions[item, place] = torch.arange(n)
    together = attend(x, mask=masks.causal(), positions=positions)
    padding = together[positions < 0]
    close(padding, attend.out_proj.bias.expand_as(padding))
    for item, place in enumerate(places):
        close(together[item, place], attend(x[item : item + 1, place], mask=masks.causal())[0])


@pytest.mark.parametrize("parts", PARTS)
def test_steps_with_a_cache_equal_one_pass_at_any_position(parts: str) -> None:
    attend, x = module(parts), torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    cache = attend.make_cache(BATCH, LENGTH)
    with torch.no_grad():
        outputs = [attend(x[:, i:j], mask=masks.causal(), cache=cache) for i, j in ((0, 4), (4, 5), (5, 11), (11, 13))]
        expected = attend(x, mask=masks.causal())
        close(torch.cat(outputs, 1), expected)
        moved = attend(x, mask=masks.causal(), positions=1009)  # only distances count
        torch.testing.assert_close(moved, expected, rtol=0, atol=1e-10)
