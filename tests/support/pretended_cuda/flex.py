"""FlexAttention on the pretended device. Its stand-in knows the block mask, and nothing of Clearhead's masks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, create_block_mask
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from .mode import PretendedDevice

operators: Any = torch.ops.pretended_cuda


def connect(mode: PretendedDevice) -> None:
    """Let calls that Clearhead would compile run the stand-in. Graphs hold PyTorch's own operator."""
    flex: Any = import_module("clearhead.kernels._flex")
    library: Any = import_module("torch.nn.attention.flex_attention")
    original = library.flex_attention

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
        if torch.compiler.is_dynamo_compiling():
            return original(query, key, value, score_mod, block_mask, scale, enable_gqa, return_aux=return_aux)
        if scale is None:
            raise NotImplementedError("the stand-in computes calls with a scale")
        with mode.unseen(), torch.no_grad():
            block_mask = block_mask or create_block_mask(_all, None, None, query.shape[2], key.shape[2], query.device)
            _require_supported(query, key, value, block_mask, enable_gqa)
            visible = _cells(block_mask, by_keys=False)
            wants_gradients = block_mask.q_indices is not None
            by_keys = _cells(block_mask, by_keys=True) if wants_gradients else visible
        if not wants_gradients and any(each.requires_grad for each in (query, key, value)):
            raise RuntimeError("the backward pass needs the blocks of each column")
        if score_mod is not None:
            inputs = query, key, value, *_learned(score_mod)
            output, lse = _Scored.apply(mode, score_mod, visible, scale, *inputs)  # pyright: ignore
        else:
            output, lse = _Flex.apply(query, key, value, visible, by_keys, scale)  # pyright: ignore
        return output if return_aux is None else (output, AuxOutput(lse if return_aux.lse else None))

    library.flex_attention = flex_attention
    compiled = flex._compiled
    flex._compiled = lambda signature: flex._attend if signature[1].type == "cuda" else compiled(signature)


def _all(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j >= 0


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


class _Scored(torch.autograd.Function):
    """With a `score_mod`, by PyTorch's operators, which are counted as one kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: PretendedDevice,
        score_mod: Callable[..., Tensor],
        visible: Tensor,
        scale: float,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(visible, *inputs[:3])
        ctx.of_call = mode, score_mod, scale, inputs[3:]
        mode.seen.operators["flex_attention"] += 1
        mode.seen.backends.append("flex")
        with mode.unseen():
            return _scored(score_mod, visible, scale, *inputs[:3])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        (mode, score_mod, scale, learned), (visible, *inputs) = ctx.of_call, ctx.saved_tensors
        mode.seen.operators["flex_backward"] += 1
        with mode.unseen(), torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in inputs]
            results = _scored(score_mod, visible, scale, *leaves)
            return None, None, None, None, *torch.autograd.grad(results, [*leaves, *learned], gradients)


def _learned(score_mod: Callable[..., Tensor]) -> list[Tensor]:
    """The tensors that a function reads and that need gradients."""
    read = tree_leaves([cell.cell_contents for cell in score_mod.__closure__ or ()])
    return [each for each in read if isinstance(each, Tensor) and each.requires_grad]


def _scored(
    score_mod: Callable[..., Tensor], visible: Tensor, scale: float, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, in float32 until the output is rounded. Rows without a key are zero."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1) for x in (key, value))
    b, h, i, j = (torch.arange(n, device=query.device) for n in (*query.shape[:3], key.shape[2]))
    places = b[:, None, None, None], h[:, None, None], i[:, None], j
    scores = score_mod(query.float() @ key.transpose(-2, -1) * scale, *places)
    empty = ~visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~(visible | empty), float("-inf"))
    output = (scores.softmax(-1) @ value).masked_fill(empty, 0)
    return output.to(query.dtype), scores.logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))


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
