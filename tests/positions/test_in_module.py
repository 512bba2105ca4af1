"""Position parts inside `MultiHeadAttention`: padding, caches, and parameters that are found."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.positions import ALiBi, Llama3Scaling, RelativeBias, Rotary, YarnScaling

BATCH, HEADS, KV_HEADS, HEAD_DIM, EMBED, LENGTH = 3, 6, 3, 10, 17, 13

PARTS = {
    "rotary": lambda: {"position": Rotary(HEAD_DIM)},
    "partial rotary": lambda: {"position": Rotary(HEAD_DIM, fraction=0.4, interleaved=True)},
    "yarn": lambda: {"position": Rotary(HEAD_DIM, scaling=YarnScaling(4.0, 7))},
    "llama3": lambda: {"position": Rotary(HEAD_DIM, scaling=Llama3Scaling(4.0, 7))},
    "alibi": lambda: {"mask": ALiBi(HEADS)},
    "relative": lambda: {"mask": RelativeBias(HEADS, 8, 9)},
    "all": lambda: {
        "position": Rotary(HEAD_DIM),
        "mask": ALiBi(HEADS) & RelativeBias(HEADS) & masks.sliding_window(5, 0),
    },
}

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def module(parts: str, dtype: torch.dtype = torch.float32) -> clearhead.MultiHeadAttention:
    made = clearhead.MultiHeadAttention(
        EMBED, HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, **PARTS[parts](), dtype=dtype
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made.to(dtype)


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE[one.dtype] * float(other.detach().abs().max()))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("parts", PARTS)
def test_a_padded_batch_gives_what_each_item_gives_alone(parts: str, side: str) -> None:
    attend = module(parts)
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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("parts", PARTS)
def test_steps_with_a_cache_give_what_one_pass_gives(parts: str, dtype: torch.dtype) -> None:
    attend = module(parts, dtype)
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=dtype)
    cache = attend.make_cache(BATCH, LENGTH)
    with torch.no_grad():
        outputs = [attend(x[:, i:j], mask=masks.causal(), cache=cache) for i, j in ((0, 4), (4, 5), (5, 11), (11, 13))]
        close(torch.cat(outputs, 1), attend(x, mask=masks.causal()))


def test_only_distances_count() -> None:
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    for parts in PARTS:
        attend = module(parts, torch.float64)
        moved = attend(x, mask=masks.causal(), positions=1009)
        torch.testing.assert_close(moved, attend(x, mask=masks.causal()), rtol=0, atol=1e-10)
