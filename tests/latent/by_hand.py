"""A small latent attention, and the same head by head, as the paper has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from clearhead import MultiHeadLatentAttention, masks
from clearhead.caches import Cache
from clearhead.masks import Mask
from clearhead.positions import Rotary

B, L, E, H = 2, 11, 17, 3
RANK, NOPE, ROPE, VALUE, LOW = 13, 5, 4, 3, 7
#: More query rows than this are cheaper expanded: 18 more products per row and key against 104 per key.
FEW = 5
CAUSAL = masks.causal()
SIZES: dict[str, Any] = {
    **{"embed_dim": E, "num_heads": H, "kv_lora_rank": RANK},
    **{"qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE},
}


def module(low: int | None = LOW, *, dtype: torch.dtype = torch.float64, **options: Any) -> MultiHeadLatentAttention:
    torch.manual_seed(3)
    options = {"position": Rotary(ROPE, base=50.0, interleaved=True)} | options
    built = MultiHeadLatentAttention(**SIZES, q_lora_rank=low, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # norms and biases are constants otherwise
    return built.eval()


def tokens(length: int = L, *, batch: int = B, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, E, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def by_hand(
    attend: MultiHeadLatentAttention, x: Tensor, mask: Mask | None = None, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Head by head, as the paper has it: output (B, L, E) and weights (B, H, L, S)."""
    source = x if memory is None else memory
    if isinstance(attend.q_proj, nn.Linear):
        queries = attend.q_proj(x)
    else:
        down, norm, up = attend.q_proj
        queries = rms(down(x), norm.weight) @ up.weight.T
    latent, rotary = attend.kv_down(source).split((RANK, ROPE), -1)
    latent = rms(latent, attend.kv_norm.weight)
    visible = torch.ones(1, 1, 1, 1).bool() if mask is None else mask.dense(x.shape[1], source.shape[1], batch_size=B)
    outputs: list[Tensor] = []
    weights: list[Tensor] = []
    for h in range(H):
        query = queries[..., h * (NOPE + ROPE) : (h + 1) * (NOPE + ROPE)]
        up = attend.kv_up.weight[h * (NOPE + VALUE) : (h + 1) * (NOPE + VALUE)]
        key, value = (latent @ up.T).split((NOPE, VALUE), -1)
        q_rope, k_rope = query[..., None, :, NOPE:], rotary[..., None, :, :]
        if attend.position is not None:
            q_rope, k_rope = attend.position(q_rope, k_rope, 0)
        scores = query[..., :NOPE] @ key.mT + (q_rope @ k_rope.mT)[..., 0, :, :]
        scores = (attend.scale * scores).masked_fill(~visible[:, h % visible.shape[1]], -torch.inf)
        weights.append(scores.softmax(-1).nan_to_num(0.0))
        outputs.append(weights[-1] @ value)
    return attend.out_proj(torch.cat(outputs, -1)), torch.stack(weights, -3)


@torch.no_grad()
def fed(attend: MultiHeadLatentAttention, x: Tensor, cache: Cache, sizes: list[int]) -> Tensor:
    return torch.cat([attend(part, mask=CAUSAL, cache=cache) for part in x.split(sizes, 1)], 1)
