"""Disentangled attention of DeBERTa (He et al., 2021): scores that depend on content and relative position.

    s_ij = scale · (q_i·k_j + q_i·r_b + k_j·t_b),    b = the bucket of i − j

r are vectors of relative positions for queries, t those for keys. The kernel makes the products q·r and k·t of one head
at a time, and reads them inside its tiles, so there is no (B, H, L, S) tensor. Only `integrations` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .._call.dropout import draw_seed, dropout_factors
from .._call.saved import restored
from .._call.sequences import PackedSequences
from .._checks import PLAIN
from .._native import extension, instruction_set_number
from .._torch_private import is_batched
from ..masks._grid import Block, Grid, Offset
from ._distance_buckets import STEP, DistanceBuckets
from ._native_arguments import DTYPES, address_of, broadcast_strides
from ._native_plan import placed
from ._second_order import OptionalTensors, gradients_through

_UNITS_PER_THREAD = 4  # heads of one group of batch items, of which a thread computes several for an even load
_LEVELS = 1 << 16  # of the bits that decide about dropout

#: Whether the kernel was built, and so whether `disentangled_attention` can run.
BUILT = extension is not None


def disentangled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_vectors: Tensor | None,
    key_vectors: Tensor | None,
    buckets: DistanceBuckets,
    *,
    scale: float,
    visible: Tensor | None = None,
    sequences: PackedSequences | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Softmax(s) · v without the scores in memory, forward and backward.

    Tensors that the kernel cannot read, such as those in half precision, go through PyTorch's operations.

    Args:
        query: (B, H, L, D), for the kernel float32 on the CPU; with `sequences` (1, H, T, D).
        key, value: (B, H, S, D) and (B, H, S, Dv).
        query_vectors: r, (H, buckets, D), or ``None`` for scores without them.
        key_vectors: t, likewise.
        buckets: of all distances within `reach_of` the longest text.
        scale: factor of the scores.
        visible: bool (B, 1, 1 or L, S), True for the keys that a query sees; not with `sequences`. Default: all.
        sequences: boundaries of packed sequences. Default: a batch.
        dropout_p: probability that a weight is dropped. Default 0.

    Returns:
        (B, H, L, Dv). Zero for a fully masked row.
    """
    vectors = _for_kernel(query_vectors, scale), _for_kernel(key_vectors, scale)
    seed = draw_seed(query.device) if dropout_p > 0 else None
    problem = _Problem(buckets, scale, visible, sequences, seed, dropout_p)
    inputs = query, key, value, *vectors
    if not all(map(_is_readable, inputs)):
        return cast(Tensor, problem.formula(*inputs)[0])
    return cast(Tensor, _Disentangled.apply(problem, *inputs))


def _is_readable(x: Tensor | None) -> bool:
    return x is None or (x.dtype is torch.float32 and x.is_cpu and type(x) in PLAIN)


def _for_kernel(vectors: Tensor | None, scale: float) -> Tensor | None:
    """Scaled vectors, padded to whole steps."""
    if vectors is None:
        return None
    buckets, features = vectors.shape[1:]
    return F.pad(vectors * scale, (0, -features % STEP, 0, -buckets % STEP)).contiguous()


_OPERANDS = "query", "key", "value"
_SIDES = "query", "key"


@dataclass(frozen=True)
class _Backward:
    """What a backward pass reads and writes besides the forward pass.

    Args:
        output: the gradient of the output.
        operands: gradients of query, key and value, to write.
        vectors: those of the vectors for each group of batch items, zero at first.
        correction: float32 (B, H, L), to write.
    """

    output: Tensor
    operands: tuple[Tensor, ...]
    vectors: OptionalTensors
    correction: Tensor

    def arguments(self) -> dict[str, Any]:
        """By their names in C++, without those of the vectors."""
        return {
            "output_gradient": self.output.data_ptr(),
            "output_gradient_strides": self.output.stride(),
            "correction": self.correction.data_ptr(),
            **{f"{name}_gradient": x.data_ptr() for name, x in zip(_OPERANDS, self.operands, strict=True)},
        }


@dataclass(frozen=True)
class _Problem:
    """All of a call but the tensors that may need gradients."""

    buckets: DistanceBuckets
    scale: float
    visible: Tensor | None
    sequences: PackedSequences | None
    seed: Tensor | None
    dropout_p: float

    def plan(self, operands: tuple[Tensor, ...], output: Tensor, gradients: tuple[Tensor, ...]) -> bytes:
        """Sizes and strides."""
        of_gradients = [f"{name}_gradient" for name in _OPERANDS]
        return cast(Any, extension).plan(
            type=DTYPES[torch.float32],
            query_shape=operands[0].shape,
            value_shape=operands[2].shape,
            **{name: x.stride() for name, x in zip(_OPERANDS, operands, strict=True)},
            **{name: x.stride() for name, x in zip(of_gradients, gradients, strict=False)},
            output=output.stride(),
            visible=broadcast_strides(placed(self.visible)),
            scale=self.scale,
            sequences=0 if self.sequences is None else self.sequences.count,
            drop_below=0 if self.seed is None else round(self.dropout_p * _LEVELS),
        )

    def groups(self, query: Tensor) -> int:
        """So many groups of batch items that all threads have work: vectors have a gradient for each group."""
        items = query.shape[0] if self.sequences is None else self.sequences.count
        return max(1, min(items, -(-_UNITS_PER_THREAD * torch.get_num_threads() // query.shape[1])))

    def run(
        self,
        operands: tuple[Tensor, ...],
        vectors: OptionalTensors,
        output: Tensor,
        lse: Tensor,
        backward: _Backward | None = None,
    ) -> None:
        """Call the kernel."""
        of_vectors = (None, None) if backward is None else backward.vectors
        bounds = None if self.sequences is None else self.sequences.cu_seqlens_q.data_ptr()
        cast(Any, extension).with_tables(
            self.plan(operands, output, () if backward is None else backward.operands),
            instruction_set_number(),
            backward is not None,
            threads=torch.get_num_threads(),
            **{name: x.data_ptr() for name, x in zip(_OPERANDS, operands, strict=True)},
            output=output.data_ptr(),
            lse=lse.data_ptr(),
            visible=address_of(self.visible),
            seed=address_of(self.seed),
            cu_seqlens_q=bounds,
            cu_seqlens_k=bounds,
            buckets=next(x.shape[1] for x in vectors if x is not None),
            bucket_of=self.buckets.at_zero,
            groups=self.groups(operands[0]),
            **{f"{side}_table_vectors": address_of(x) for side, x in zip(_SIDES, vectors, strict=True)},
            **{f"{side}_table_gradient": address_of(x) for side, x in zip(_SIDES, of_vectors, strict=True)},
            **({} if backward is None else backward.arguments()),
        )

    def formula(self, *inputs: Tensor | None) -> OptionalTensors:
        """The output, by PyTorch's operations."""
        query, key, value = cast("list[Tensor]", list(inputs[:3]))
        if self.sequences is None:
            return (self._formula(query, key, value, inputs[3:], self.visible, 0),)
        parts = [
            self._formula(query[:, :, rows], key[:, :, keys], value[:, :, keys], inputs[3:], None, number)
            for number, (rows, keys) in enumerate(self.sequences.slices())
        ]
        return (torch.cat(parts, 2),)

    def _formula(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        vectors: tuple[Tensor | None, ...],
        visible: Tensor | None,
        item: int,
    ) -> Tensor:
        (batch, heads, rows, features), keys = query.shape, key.shape[2]
        places, scores = self.buckets.matrix(rows, keys), self.scale * query @ key.mT
        of_queries, of_keys = vectors
        if of_queries is not None:
            table = query @ of_queries[:, :, :features].mT  # (B, H, L, buckets)
            scores = scores + table.gather(3, places.expand_as(scores))
        if of_keys is not None:
            table = key @ of_keys[:, :, :features].mT  # (B, H, S, buckets)
            scores = scores + table.gather(3, places.T.expand(batch, heads, keys, rows)).mT
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
            hidden = ~visible.any(-1, keepdim=True)
            scores = scores.masked_fill(hidden, 0)
            weights = scores.softmax(-1).masked_fill(hidden, 0)
        else:
            weights = scores.softmax(-1)
        if self.seed is not None:
            block = Block(Grid(batch, heads, rows, keys, query.device))
            offset = Offset(heads, item=item)
            weights = weights * dropout_factors(self.seed, self.dropout_p, block, weights.dtype, offset)
        return weights @ value


class _Disentangled(torch.autograd.Function):
    """Saves inputs, output and lse. The backward pass makes tables and weights again."""

    @staticmethod
    def forward(ctx: Any, problem: _Problem, *inputs: Tensor | None) -> Tensor:
        operands, vectors = _read(inputs)
        query, value = operands[0], operands[2]
        batch, heads, rows, _ = query.shape
        output = query.new_empty(batch, rows, heads, value.shape[3]).transpose(1, 2)
        lse = query.new_empty(batch, heads, rows, dtype=torch.float64)
        problem.run(operands, vectors, output, lse)
        ctx.problem, ctx.places = problem, [None if x is None else (x.shape, x.dtype, x.device) for x in inputs]
        ctx.save_for_backward(output, lse, *inputs)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        problem: _Problem = ctx.problem
        output, lse, *saved = ctx.saved_tensors
        inputs = [
            None if x is None else restored("saved input", x, *place)
            for x, place in zip(saved, ctx.places, strict=True)
        ]
        (output_gradient,) = gradients
        if torch.is_grad_enabled() or is_batched(output_gradient):
            return None, *gradients_through(inputs, problem.formula, gradients)
        operands, vectors = _read(inputs)
        output = restored("saved output", output, output_gradient.shape, torch.float32, operands[0].device)
        lse = restored("saved lse", lse, operands[0].shape[:3], torch.float64, operands[0].device).contiguous()
        (output, output_gradient), _ = _read((output, output_gradient))
        groups = problem.groups(operands[0])
        backward = _Backward(
            output_gradient,
            tuple(map(torch.empty_like, operands)),
            [None if x is None else x.new_zeros(groups, *x.shape) for x in vectors],
            torch.empty_like(lse, dtype=torch.float32),
        )
        problem.run(operands, vectors, output, lse, backward)
        return None, *backward.operands, *(None if x is None else x.sum(0) for x in backward.vectors)


def _read(inputs: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
    """Operands whose rows have no gaps, and vectors."""
    resolved = [None if x is None else x.detach().resolve_neg() for x in inputs]
    operands = tuple(x if x.stride(-1) == 1 else x.contiguous() for x in cast("list[Tensor]", resolved[:3]))
    return operands, tuple(None if x is None else x.contiguous() for x in resolved[3:])
