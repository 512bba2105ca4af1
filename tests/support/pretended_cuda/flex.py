"""FlexAttention on the pretended device. Its stand-in knows the block mask, and nothing of Clearhead's masks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

if TYPE_CHECKING:
    from .mode import PretendedDevice

operators: Any = torch.ops.pretended_cuda


def connect(mode: PretendedDevice) -> None:
    """Let calls that Clearhead would compile run the stand-in."""
    flex: Any = import_module("clearhead.kernels._flex")
    library: Any = import_module("torch.nn.attention.flex_attention")

    def flex_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor] | None = None,
        block_mask: BlockMask | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        return_aux: AuxRequest | None = None,
    ) -> Tensor | tuple[Tensor, AuxOutput]:
        if score_mod is not None or block_mask is None or scale is None:
            raise NotImplementedError("the stand-in computes calls with a block mask, and without a score_mod")
        _require_supported(query, key, value, block_mask, enable_gqa)
        with mode.unseen(), torch.no_grad():
            visible = _cells(block_mask, by_keys=False)
            wants_gradients = block_mask.q_indices is not None
            by_keys = _cells(block_mask, by_keys=True) if wants_gradients else visible
        if not wants_gradients and any(each.requires_grad for each in (query, key, value)):
            raise RuntimeError("the backward pass needs the blocks of each column")
        output, lse = _Flex.apply(query, key, value, visible, by_keys, scale)  # pyright: ignore
        return output if return_aux is None else (output, AuxOutput(lse if return_aux.lse else None))

    library.flex_attention = flex_attention
    compiled = flex._compiled
    flex._compiled = lambda signature: flex._attend if signature[1].type == "cuda" else compiled(signature)


class _Flex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*arguments[:5])
        ctx.scale = arguments[5]
        return operators.flex_attention(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        found = operators.flex_backward(*gradients, *ctx.saved_tensors, ctx.scale)
        return *found, None, None, None


def _require_supported(query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask, enable_gqa: bool) -> None:
    if not query.dtype == key.dtype == value.dtype or query.dtype == torch.float64:
        raise ValueError(f"expected one dtype, not float64, got {query.dtype}, {key.dtype} and {value.dtype}")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError("grouped heads need enable_gqa=True")
    if min(query.shape[3], value.shape[3]) < 16:
        raise ValueError("the embedding dimension must be at least 16")
    if tuple(blocks.seq_lengths) != (query.shape[2], key.shape[2]):
        raise ValueError(f"block_mask was created for {blocks.seq_lengths}")
    for batch_or_heads, size in zip(blocks.kv_num_blocks.shape[:2], query.shape[:2], strict=True):
        if batch_or_heads not in (1, size):
            raise ValueError(f"block_mask of shape {tuple(blocks.kv_num_blocks.shape)} does not broadcast")


def _cells(blocks: BlockMask, by_keys: bool) -> Tensor:
    """The visible cells, bool (1 or B, 1 or H, L, S), by the blocks of each row, or by those of each column."""
    names = ("q_num_blocks", "q_indices") if by_keys else ("kv_num_blocks", "kv_indices")
    partial, full = (_marked(*(getattr(blocks, before + name) for name in names)) for before in ("", "full_"))
    if by_keys:
        partial, full = partial.mT, full.mT
    rows, columns = blocks.seq_lengths
    device = partial.device
    b = torch.arange(partial.shape[0], device=device)[:, None, None, None]
    h = torch.arange(partial.shape[1], device=device)[:, None, None]
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    partial, full = (_spread(each, blocks.BLOCK_SIZE)[..., :rows, :columns] for each in (partial, full))
    return full | (partial & blocks.mask_mod(b, h, i, j))


def _marked(counts: Tensor, places: Tensor) -> Tensor:
    """Which blocks are among the first of their list, bool, of the shape of the lists."""
    if counts.dtype != torch.int32 or places.dtype != torch.int32:
        raise ValueError(f"expected int32 lists of blocks, got {counts.dtype} and {places.dtype}")
    is_listed = torch.arange(places.shape[-1], device=places.device) < counts[..., None]
    return torch.zeros_like(is_listed).scatter_(-1, places.long(), is_listed)


def _spread(blocks: Tensor, sides: tuple[int, int]) -> Tensor:
    return blocks.repeat_interleave(sides[0], -2).repeat_interleave(sides[1], -1)
