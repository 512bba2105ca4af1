"""The call: a spec and its operands, what a kernel computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._checks import PLAIN
from .._environment import Environment, read_environment
from ..masks._coverage import COVERS_ALL, Coverage, coverage
from ..masks._grid import Block, Grid
from .dropout import dropout_factors
from .request import Request
from .saved import restored, restored_biases, restored_sinks, with_saved
from .sequences import require_within
from .spec import AttentionSpec, spec_of
from .validation import read_positions, read_sinks, require_numbers, require_shapes, require_tensors


class Results(NamedTuple):
    """The results of a call.

    Args:
        output: (B, H, L, Dv).
        lse: (B, H, L), on request.
        weights: (B, H, L, S) or (B, L, S), on request.
    """

    output: Tensor
    lse: Tensor | None = None
    weights: Tensor | None = None


@dataclass(slots=True)
class AttentionCall:
    """A spec, its operands and its request: what a kernel computes.

    Args:
        spec: everything but the tensors.
        query: (B, H, L, D).
        key: (B, Hkv, S, D); Hkv divides H, query head h reads key/value head h // (H / Hkv).
        value: (B, Hkv, S, Dv).
        request: how it attends.
    """

    spec: AttentionSpec
    query: Tensor
    key: Tensor
    value: Tensor
    request: Request
    grid_: Grid | None = field(default=None, repr=False)
    coverage_: Coverage | None = field(default=None, repr=False)
    # Results of `zero_hidden` and `as_one_sequence`. `replace` does not copy them: other tensors have other results.
    zeroed_: AttentionCall | None = field(default=None, init=False, repr=False)
    as_one_: AttentionCall | None = field(default=None, init=False, repr=False)

    @property
    def grid(self) -> Grid:
        """Sizes and positions for the mask."""
        if self.grid_ is None:
            (batch, heads, length, _), keys = self.query.shape, self.key.shape[2]
            positions = (self.request.query_positions, self.request.key_positions)
            self.grid_ = Grid(batch, heads, length, keys, self.query.device, *positions)
        return self.grid_

    @property
    def coverage(self) -> Coverage:
        """The fully masked rows, and the keys that are masked for every query."""
        if self.coverage_ is None:
            mask = self.request.mask
            self.coverage_ = COVERS_ALL if mask is None else coverage(mask, self.grid)
        return self.coverage_

    @property
    def bias_tensors(self) -> tuple[Tensor, ...]:
        return () if self.request.mask is None else self.request.mask.bias_tensors()

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor that gradients may be asked for."""
        sinks = () if self.request.sinks is None else (self.request.sinks,)
        return (self.query, self.key, self.value, *sinks, *self.bias_tensors)

    def dropout_factors(self, block: Block, dtype: torch.dtype) -> Tensor:
        """The dropout factors of a block's weights, (b, h, l, s), for a call that has a seed."""
        return dropout_factors(cast(Tensor, self.request.seed), self.spec.dropout_p, block, dtype, self.request.offset)

    @property
    def read_again(self) -> tuple[Tensor, ...]:
        """The tensors that a backward pass reads besides `inputs`: those of mask and positions.

        Functions save them through autograd, which refuses a backward pass after they were written to.
        """
        masks = () if self.request.mask is None else self.request.mask.tensors()
        positions = (self.request.query_positions, self.request.key_positions)
        tensors = (*masks, *(each for each in positions if isinstance(each, Tensor)))
        # Inference tensors cannot be saved: writes to them are not counted.
        return tuple(tensor for tensor in tensors if not tensor.is_inference())

    def changed(self, *operands: Tensor, **changes: Any) -> AttentionCall:
        """The call of another query, key and value, if they are given, and of a changed request. Its spec follows."""
        query, key, value = operands or (self.query, self.key, self.value)
        request = self.request._replace(**changes)
        return AttentionCall(spec_of(query, key, value, request, self.spec), query, key, value, request)

    def rebuild(self, read_again: tuple[Tensor, ...] = ()) -> Callable[..., AttentionCall]:
        """A function that makes the same call of other inputs, in the order of `inputs`.

        It holds none of this call's own: for a backward pass only autograd may hold them, so that it can free them.
        Tensors that were one (self-attention, a bias used twice) get gradients of their own when views are given.

        Args:
            read_again: this call's, if they were saved too. The function then accepts them after the inputs, as they
                come back. Hooks may have changed all of them: see `restored`.
        """
        spec, mask, coverage = self.spec, self.request.mask, self.coverage_
        has_sinks, without_sinks = self.request.sinks is not None, self.request._replace(sinks=None)

        def build(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> AttentionCall:
            if spec.subclass is None:
                one = key is value  # also where weights, which have no value, are saved
                query = restored("saved query", query, spec.query, spec.dtype, spec.device)
                key = restored("saved key", key, spec.key, spec.dtype, spec.device)
                value = key if one else restored("saved value", value, spec.value, spec.dtype, spec.device)
            if not others:
                return AttentionCall(spec, query, key, value, without_sinks, coverage_=coverage)
            tensors = iter(others)
            sinks = restored_sinks(next(tensors), spec) if has_sinks else None
            with_biases = None if mask is None else mask.with_bias_tensors(restored_biases(mask, tensors))
            request = without_sinks._replace(sinks=sinks, mask=with_biases)
            if returned := tuple(tensors):
                request = with_saved(request, read_again, returned)
            return AttentionCall(spec, query, key, value, request, coverage_=coverage)

        return build


def make_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    request: Request,
    environment: Environment,
    grid: Grid | None = None,
) -> AttentionCall:
    """A call of arguments, with a batch of one where there is none, and positions and sinks as kernels read them.

    It checks only what the spec does not hold. `validate` checks the rest, once for all calls of a spec.
    """
    # The spec holds one dtype and one device, and no tensors without strides.
    for x in (query, key, value):
        is_plain = type(x) in PLAIN and x.layout is torch.strided and not x.is_nested
        if not is_plain or x.dtype is not query.dtype or x.device != query.device:
            require_tensors(query, key, value)
            break
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        require_shapes(query, key, value)
        query, key, value = query[None], key[None], value[None]  # (1, H, L, D)
    changes: dict[str, Any] = {}
    if request.query_positions is not None:
        changes["query_positions"] = read_positions("query_positions", request.query_positions, query)
    if request.key_positions is not None:
        positions = read_positions("key_positions", request.key_positions, key, heads=query.shape[1])
        changes["key_positions"] = positions
    if request.sinks is not None:
        changes["sinks"] = read_sinks(request.sinks, query)
    if changes:
        request = request._replace(**changes)
    if request.sequences is not None and request.mask is not None:
        require_within(request.mask)
    spec = spec_of(query, key, value, request, environment)
    return AttentionCall(spec, query, key, value, request, grid_=grid)


def validate(call: AttentionCall) -> None:
    """Raise unless tensors, sizes and numbers of a call fit together. Equal specs pass alike."""
    require_tensors(call.query, call.key, call.value)
    require_shapes(call.query, call.key, call.value)
    require_numbers(call.spec)


def valid_call(
    query: Tensor, key: Tensor, value: Tensor | None, request: Request, environment: Environment | None = None
) -> AttentionCall:
    """A call of arguments, all of them checked. Without a `value` the key is used for it."""
    environment = read_environment() if environment is None else environment
    call = make_call(query, key, key if value is None else value, request, environment)
    validate(call)
    if call.request.mask is not None:
        call.request.mask.validate(call.grid)
    return call


def build_call(query: Tensor, key: Tensor, value: Tensor | None, request: Request) -> AttentionCall:
    """`valid_call`, with zeros for what the mask hides; for computing from the call without a kernel."""
    return zero_hidden(valid_call(query, key, value, request))


def zero_hidden(call: AttentionCall, queries: bool = True) -> AttentionCall:
    """The call with zeros in fully masked queries and in keys and values that are masked for every query.

    NaN or inf stored there then reaches neither outputs nor gradients, whatever the kernel. Queries may be left as they
    are for a kernel that isolates them. The call keeps the result, so that its kernel, weights and observers share it.
    """
    covered = call.coverage
    if covered is COVERS_ALL or (covered.queries is None and covered.keys is None):
        return call
    zeroed = call.zeroed_
    if zeroed is None:
        key, value = call.key, call.value
        masked = covered.masked_keys_of(key.shape[1])
        if masked is not None:
            # One tensor stays one, so that it is filled, and read by the kernel, once.
            same = key is value
            key = key.masked_fill(masked, 0)
            value = key if same else value.masked_fill(masked, 0)
        # Grid and coverage follow from sizes and mask, which are the same.
        zeroed = replace(call, key=key, value=value)
    if queries and covered.masked_queries is not None and zeroed.query is call.query:
        zeroed = replace(zeroed, query=call.query.masked_fill(covered.masked_queries, 0))
    call.zeroed_ = zeroed
    return zeroed
