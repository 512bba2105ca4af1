"""An attention layer: unpad → project → attend → project out → pad, for every attention module."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._call.caching import Cache, KeyValues, Positions, unchanged_if_refused
from .._call.call import Call, Results
from .._call.heads import merge_heads
from .._call.sequences import PackedSequences
from .._environment import Environment, cast_for_autocast
from ..kernels._sdpa_sequences import is_one_kernel
from ..masks._base import Mask
from ..masks._bound import BoundMask, bind
from ..masks._grid import Grid
from ..masks._tensors import as_mask
from .layer_plan import LayerPlan, plan_of_layer
from .linear import Multiply, linear
from .operands import Operands, called, heads_of
from .plan import Show, attend
from .positions import (
    PositionPart,
    positions_of_keys,
    positions_of_queries,
    require_one_length,
    split_axes,
    with_hidden,
)
from .unmodified import Linears, apply_linear
from .unpadding import Unpadded, costs_of, unpad


@dataclass(slots=True)
class Layer:
    """The parts and settings of an attention module for one call. Each class of modules makes its own.

    Args:
        project: the input projections, from (…, features) of query, key and value to (…, H·D), (…, Hkv·D) and
            (…, Hkv·Dv), multiplied by `multiply` where they are unmodified. Without a key it projects only the query.
        out_proj: the output projection.
        num_heads, num_kv_heads: H and Hkv.
        mask: the module's own.
        options: scale, soft-cap, sinks and dropout of the module, and the offset of its heads, by the names of `Call`.
        projections: the modules that `project` calls.
        q_norm, k_norm: of every head's query and key.
        position: applied to queries and keys after the norms.
        head_dim: D = Dv of a module whose padding is removed where that is faster. ``None`` keeps the padding.
        batch_first: whether memory holds (B, L, E) rather than (L, B, E). Tensors are (B, L, E) either way.
        form: makes attention's operands from the projected query, the key and the cache. ``None`` uses the projections
            as they are.
        all_heads: collects the weights of all heads of the module, if this process computes only some of them.
        linears: the parameters of all projections, if they are unmodified; those of the output projection come last.
        settings: what determines the layouts of projections and the plan of attention, besides inputs and parameters.
        multiply: the GEMM of unmodified projections.
        plan: of the call, if it has one (`fits`).
        gate: from the query (…, features) to factors of the heads' outputs, (…, H·Dv) or (…, H).
    """

    project: Callable[[Tensor, Tensor | None, Tensor | None, Multiply], tuple[Tensor, Any, Any]]
    out_proj: nn.Module
    num_heads: int
    num_kv_heads: int
    mask: Mask | None
    options: dict[str, Any]
    projections: tuple[nn.Module, ...] = ()
    q_norm: nn.Module | None = None
    k_norm: nn.Module | None = None
    position: PositionPart | None = None
    head_dim: int | None = None
    batch_first: bool = True
    form: Callable[[Tensor, Tensor, Cache | None], Operands] | None = None
    all_heads: Callable[[Tensor], Tensor] | None = None
    linears: Linears | None = None
    settings: Hashable = ()
    multiply: Multiply = linear
    plan: LayerPlan | None = None
    gate: Callable[[Tensor], Tensor] | None = None

    def fits(self, query: Tensor, key: Tensor, value: Tensor, environment: Environment) -> bool:
        """Find the plan of the call, and return whether the module has checked equal inputs before."""
        self.plan = plan = plan_of_layer((query, key, value), self.linears, self.settings, environment)
        if plan is None or plan.multiply is None:
            return False
        self.multiply = plan.multiply
        return plan.fits

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Mask | Tensor | None,
        environment: Environment,
        positions: Positions | None = None,
        cache: Cache | None = None,
        weights: str | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The output (B, L, E), or (L, E) without a batch, and the weights if they are wanted.

        Args:
            query: (B, L, features), or (L, features) without a batch.
            key, value: likewise, or ``None`` if a cache holds all keys.
            mask, environment: of the call.
            positions: of the queries, and of the keys that are projected with them.
            cache: stores the new keys and values, and returns all keys.
            weights: as in `Call`.
        """
        plan = self.plan
        if plan is not None:  # the module has checked the inputs
            plan.fits = True
        if mask is not None or self.mask is not None:
            mask = self.combined(mask)
        if positions is not None or cache is not None:
            # Masks are checked against a grid of which the new keys are a part: after the cache has stored them.
            new_tokens = query if key is None else key
            undoing = nullcontext() if cache is None else unchanged_if_refused((cache,), new_tokens, mask)
            with undoing:
                return self._run_at_positions(query, key, value, mask, environment, positions, cache, weights)
        bound = None
        if mask is not None and key is not None and not environment.tracing:
            *batch, length, _ = query.shape
            grid = Grid(batch[0] if batch else 1, self.num_heads, length, key.shape[-2], query.device)
            bound = bind(mask, grid)
            # Only a mask marks padding, and returned weights have rows and columns for it.
            if value is not None and weights is None and (plan is None or not plan.keeps_padding):
                unpadded = self._unpadded(bound, (query, key, value), environment)
                if unpadded is not None:
                    return self._run_unpadded(unpadded, query, key, value, environment), None
        q, k, v = self.project(query, key, value, self.multiply)
        form, heads, known = None, None, None
        merged = self.is_plain and weights is None and query.dim() == 3 and query.is_cpu and not environment.tracing
        if merged and q.dim() == k.dim() == v.dim() == 3:
            # Nothing is applied to heads, so a kernel reads them in the projections as they are.
            heads, known = (self.num_heads, self.num_kv_heads), None if plan is None else plan.attention
        else:
            q, k, v = self._at_positions(q, k, v, 0, environment)
            form = None if self.form is None else self.form(q, k, None)
        if form is not None:
            q, k, v = form.query, form.key, form.value
        call = Call(q, k, v, mask, **self.options, weights=weights, heads=heads)
        # Projections may have changed the sizes, and the module may have appended keys.
        if bound is not None and bound.grid.has_sizes(q.shape[0], q.shape[-2], k.shape[-2]):
            call.bound_ = bound
        results = attend(call, environment, known=known)
        return self.projected_out(results, query, environment, form, batched=query.dim() == 3)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is applied between the projections and attention."""
        return self.q_norm is self.k_norm is self.position is self.form is None

    def _run_at_positions(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Mask | None,
        environment: Environment,
        positions: Positions | None,
        cache: Cache | None,
        weights: str | None,
    ) -> tuple[Tensor, Tensor | None]:
        """`run` with positions or a cache. The mask is the module's and the call's."""
        of_tokens, of_axes = split_axes(positions, self.position)
        at = positions_of_queries(of_tokens, cache, query.shape[-2])
        # In self-attention, and with a position part, the new keys have the positions of the queries.
        new_key_positions = at if cache is None and (key is query or self.position is not None) else None
        attended = None if cache is None else cache.get()
        if attended is not None:  # cross-attention to a memory whose keys are projected already
            q = self.projected_query(query, environment)
        else:
            q, k, v = self.projected(query, key, value, at if of_axes is None else of_axes, environment)
            attended = KeyValues(k, v) if cache is None else cache.update(k, v, at)
        mask = with_hidden(mask, attended, at)
        form = None if self.form is None else self.form(q, attended.key, cache)
        operands = (q, attended.key, attended.value) if form is None else (form.query, form.key, form.value)
        keys_at = positions_of_keys(attended, new_key_positions, self.num_heads)
        positions_at: dict[str, Any] = {"query_positions": at, "key_positions": keys_at}
        call = Call(*operands, mask, **self.options, **positions_at, weights=weights)
        scale, softcap, sinks = call.scale, call.softcap, call.sinks
        results = attend(call, environment)
        returned = self.projected_out(results, query, environment, form, batched=query.dim() == 3)
        # Only now: these queries have attended to the keys that the cache may evict.
        observed = q if form is None else form.observed
        if cache is not None and observed is not None:
            cache.observe(observed, attended, mask, at, scale=scale, softcap=softcap, sinks=sinks)
        return returned

    def projected_out(
        self,
        results: Results,
        query: Tensor,
        environment: Environment,
        form: Operands | None = None,
        *,
        batched: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """The output after gate and output projection, and the weights; without a batch where the inputs have none."""
        mixed, weights = results.output, results.weights  # (B, H, L, Dv), or merged (B, L, H·Dv)
        if form is not None and form.finish is not None:
            mixed = form.finish(mixed)
        if weights is not None and self.all_heads is not None:
            # First, so that a process without weights waits in the output's exchange instead of returning.
            weights = self.all_heads(weights)
        if not batched:
            merged = merge_heads(mixed.squeeze(0))  # (L, H·Dv)
        elif not self.batch_first:
            # The GEMM then writes (L, B, E), and transposing it back for a sequence-first module copies nothing.
            merged = mixed.transpose(0, 1) if mixed.dim() == 3 else mixed.permute(2, 0, 1, 3).flatten(2)  # (L, B, H·Dv)
        elif mixed.dim() == 3:
            merged = mixed
        elif self.plan is not None and mixed.shape[2] == 1:
            merged = mixed.reshape(mixed.shape[0], 1, mixed.shape[1] * mixed.shape[3])  # (B, 1, H·Dv)
        else:
            merged = mixed.transpose(1, 2).flatten(2)  # (B, L, H·Dv)
        merged = self.gated(merged, query)
        if self.plan is None or self.linears is None:
            output = apply_linear(self.out_proj, merged, environment)  # (…, E)
        else:
            output = self.multiply(merged, self.linears[-2], self.linears[-1])
        if batched and not self.batch_first:
            output = output.transpose(0, 1)
        return output, weights if weights is None or batched else weights.squeeze(0)

    def gated(self, merged: Tensor, query: Tensor) -> Tensor:
        """The outputs of all heads (…, H·Dv) times the factors that the gate makes of the query (…, features)."""
        if self.gate is None:
            return merged
        factors = self.gate(query).unflatten(-1, (self.num_heads, -1))  # (…, H, Dv or 1)
        return (merged.unflatten(-1, (self.num_heads, -1)) * factors).flatten(-2)

    def combined(self, mask: Mask | Tensor | None) -> Mask | None:
        """The module's own mask and the call's."""
        module_mask = self.mask
        if mask is None:
            return None if module_mask is None else called(module_mask)
        if not isinstance(mask, Mask):
            mask = as_mask(mask)
        return called(mask if module_mask is None else module_mask & mask)

    def projected(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, positions: Positions, environment: Environment
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv), at their positions."""
        return self._at_positions(*self.project(query, key, value, self.multiply), positions, environment)

    def _at_positions(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Positions, environment: Environment
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projections with heads, norms and positions."""
        one_row = q.shape[-2] == k.shape[-2] == 1 and not environment.tracing and self.plan is not None
        q = heads_of(q, self.num_heads, self.q_norm, one_row=one_row)
        k = heads_of(k, self.num_kv_heads, self.k_norm, one_row=one_row)
        v = heads_of(v, self.num_kv_heads, None, one_row=one_row)
        if self.position is not None:
            require_one_length(q.shape[2], k.shape[2])
            q, k = self.position(q, k, positions)
        if environment.autocast:
            q, k, v = cast_for_autocast(q, k, v)
        return q, k, v

    def projected_query(self, query: Tensor, environment: Environment) -> Tensor:
        """(B, H, L, D), for keys that are projected already."""
        q = heads_of(self.project(query, None, None, self.multiply)[0], self.num_heads, self.q_norm)
        return cast_for_autocast(q)[0] if environment.autocast else q

    def run_packed(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sequences: PackedSequences,
        mask: Mask | None,
        environment: Environment,
        *,
        positions: Positions = 0,
        show: Show | None = None,
    ) -> Tensor:
        """Attention within packed sequences (T, features), up to the output projection: (T, H·Dv).

        Args:
            query, key, value: (T, features), or (Tk, features).
            sequences: their boundaries.
            mask: the module's and the call's.
            environment: of the call.
            positions: (T,) of the tokens, for a position part.
            show: passes the call to observers. By default they receive all sequences as one item.
        """
        q, k, v = self.projected(query, key, value, positions, environment)  # (1, H, T, D) …
        results = attend(Call(q, k, v, mask, **self.options, sequences=sequences), environment, show)
        return self.gated(results.output.squeeze(0).transpose(0, 1).flatten(1), query)  # (T, H·Dv)

    def _unpadded(
        self, bound: BoundMask, inputs: tuple[Tensor, Tensor, Tensor], environment: Environment
    ) -> Unpadded | None:
        """The tokens of a padded batch, if leaving the padding out is faster."""
        head_dim = self.head_dim
        if head_dim is None or inputs[0].dim() != 3:
            return None
        costs, most = costs_of(inputs, (self.num_heads, self.num_kv_heads, head_dim))
        if self.plan is not None:
            self.plan.keeps_padding = most < 0
        if most < 0:
            return None
        return unpad(
            bound,
            costs,
            most,
            environment,
            parts=(*self.projections, self.q_norm, self.k_norm, self.position),
            side_by_side=self.position is not None,
            in_one_kernel=inputs[0].is_cuda and self._is_one_kernel(inputs[0], head_dim, environment),
        )

    def _is_one_kernel(self, query: Tensor, head_dim: int, environment: Environment) -> bool:
        """Whether a CUDA device computes packed sequences of this module in one kernel."""
        dtype, options = query.dtype, self.options
        if environment.autocast and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
        plain = options.get("softcap") is options.get("sinks") is None and not options.get("dropout_p")
        return plain and environment.kernel is None and is_one_kernel(dtype, head_dim)

    def _run_unpadded(
        self, unpadded: Unpadded, query: Tensor, key: Tensor, value: Tensor, environment: Environment
    ) -> Tensor:
        """The output of a padded batch, computed without its padding."""
        mixed = self.run_packed(
            *unpadded.tokens(query, key, value),
            unpadded.sequences,
            unpadded.rest,
            environment,
            positions=0 if self.position is None else unpadded.queries.positions,
            show=unpadded.show,
        )
        return unpadded.project_out(mixed, self.out_proj, environment, batch_first=self.batch_first)
