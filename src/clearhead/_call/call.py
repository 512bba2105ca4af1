"""The call: operands and options, what a kernel computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .._checks import PLAIN, flag, number
from .._environment import Environment, read_environment
from ..errors import ClearheadError, ShapeError
from ..masks._base import Mask
from ..masks._bound import BoundMask, bind
from ..masks._coverage import COVERS_ALL, Coverage, coverage
from ..masks._grid import Block, Grid, Offset
from .dropout import dropout_factors
from .heads import split_heads
from .layout import Layout, key_of, layout_of, plain_key_of
from .saved import restored, restored_biases, restored_sinks, with_saved
from .sequences import PackedSequences, require_within
from .validation import NO_SINK, read_positions, read_sinks, require_numbers, require_shapes, require_tensors

_NUMBERS = (float, int)


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


def weights_wanted(need_weights: bool, average_attn_weights: bool) -> str | None:
    """`Call.weights` from the two arguments of a module's call, which are checked."""
    if need_weights is False and average_attn_weights is True:
        return None
    need_weights = flag("need_weights", need_weights)
    average_attn_weights = flag("average_attn_weights", average_attn_weights)
    return ("average" if average_attn_weights else "heads") if need_weights else None


@dataclass(slots=True)
class Call:
    """Operands and options: what a kernel computes.

    Args:
        query: (B, H, L, D).
        key: (B, Hkv, S, D); Hkv divides H, query head h reads key/value head h // (H / Hkv).
        value: (B, Hkv, S, Dv). With `heads` the operands are merged: (B, L, H·D), (B, S, Hkv·D) and (B, S, Hkv·Dv).
        mask: which keys each query may attend to.
        scale, softcap, sinks, dropout_p, query_positions, key_positions: as for `attention`. `read` gives tensors of
            sinks and positions the dtype that kernels read.
        lse: whether the log-sum-exp is returned.
        weights: which weights are returned: ``"heads"`` for (B, H, L, S), ``"average"`` for their average over the
            heads (B, L, S), ``None`` for none. ``"mixed"`` and ``"mixed once"`` are (B, H, L, S) in the query's dtype,
            and the graph of the output contains them (`_layer/mixing.py`).
        sequences: packed sequences. Query, key and value are then (1, H, T, D), (1, Hkv, Tk, D) and
            (1, Hkv, Tk, Dv), and each sequence attends to itself.
        seed: int64 scalar that dropout is drawn from. Default: the kernel draws a seed.
        offset: where the call lies in a larger call, for dropout. Default: it is a call of its own.
        heads: H and Hkv of merged operands, as projections give them. The output is then (B, L, H·Dv).
        bound_: the mask on the call's grid; see `bound`.
        is_unbatched: whether the batch of one was added; `read` sets it.
        environment: of the call, or the layout of the call that it was made from; `read` sets it.
        plan_key: of its plan, but for the mask; ``None`` if no plan is cached; `read` sets it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    query_positions: Tensor | int | None = None
    key_positions: Tensor | int | None = None
    lse: bool = False
    weights: str | None = None
    sequences: PackedSequences | None = None
    seed: Tensor | None = None
    offset: Offset | None = None
    heads: tuple[int, int] | None = None
    bound_: BoundMask | None = field(default=None, init=False, repr=False)
    environment: Environment | Layout = field(init=False, repr=False)
    is_unbatched: bool = field(default=False, init=False, repr=False)
    plan_key: tuple[object, ...] | None = field(default=None, init=False, repr=False)
    layout_: Layout | None = field(default=None, init=False, repr=False)
    # Results of `zero_hidden` and `as_one_sequence`. Other tensors have other results.
    zeroed_: Call | None = field(default=None, init=False, repr=False)
    as_one_: Call | None = field(default=None, init=False, repr=False)
    # Of a call that `zero_hidden` has made: query and key without zeros where nothing is selected, for the lost mass.
    whole_: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def read(self, environment: Environment) -> Call:
        """The call with a key, a batch of one where there is none, and positions and sinks as kernels read them.

        It checks only what the key does not hold. `validate` checks the rest, once for all calls of a key.
        """
        query, key, value = self.query, self.key, self.value
        plain = type(query) in PLAIN and type(key) in PLAIN and type(value) in PLAIN
        if not plain:
            require_tensors(query, key, value)
        try:
            if self.heads is None and (query.dim() != 4 or key.dim() != 4 or value.dim() != 4):
                require_shapes(query, key, value)
                self.query, self.key, self.value = query[None], key[None], value[None]  # (1, H, L, D)
                self.is_unbatched = True
            self.read_others(environment)
            self.plan_key = plain_key_of(self) if plain and not environment.tracing else None
        except (ClearheadError, RuntimeError):  # PyTorch's errors are those of tensors without strides
            require_tensors(query, key, value)  # whose errors come first
            raise
        return self

    def read_others(self, environment: Environment) -> None:
        """Read the options, of which no key holds all."""
        self.environment = environment
        first = self.query_positions
        if first is not None and not (type(first) is int and first >= 0):
            self.query_positions = read_positions("query_positions", first, self.query)
        if self.key_positions is not None:
            heads = self.query.shape[1]
            self.key_positions = read_positions("key_positions", self.key_positions, self.key, heads=heads)
        if self.sinks is not None:
            self.sinks = read_sinks(self.sinks, self.query, self.heads[0] if self.heads else self.query.shape[1])
        if self.sequences is not None and self.row_sinks is not None:
            fix = "Pass one logit per head, or padded sequences."
            raise ShapeError("sinks", expected="(H,) for packed sequences", got="sinks of single queries", fix=fix)
        if self.sequences is not None and self.mask is not None:
            require_within(self.mask)
        # Plans are found by Python's numbers, to which valid ones of other types are equal. `validate` checks ranges.
        if self.scale is not None and type(self.scale) is not float:
            self.scale = number("scale", self.scale, "a finite number, or None for 1/√D", lambda _: True)
        if self.softcap is not None and type(self.softcap) is not float:
            self.softcap = number("softcap", self.softcap, "a number > 0, or None", lambda _: True)
        if type(self.dropout_p) not in _NUMBERS:
            self.dropout_p = number("dropout_p", self.dropout_p, "a probability in [0, 1]", lambda _: True)
        if self.lse is not False and self.lse is not True:
            self.lse = flag("return_lse", self.lse)

    @property
    def layout(self) -> Layout:
        """Everything about the call but its tensors."""
        if self.layout_ is None:
            self.layout_ = layout_of(self)
        return self.layout_

    def split(self) -> Call:
        """The call with heads as a dimension of their own."""
        if self.heads is None:
            return self
        num_heads, num_kv_heads = self.heads
        query, key = split_heads(self.query, num_heads), split_heads(self.key, num_kv_heads)
        return self.rekeyed(query=query, key=key, value=split_heads(self.value, num_kv_heads), heads=None)

    @property
    def options(self) -> dict[str, Any]:
        """Every argument but query, key and value, by name."""
        return {name: getattr(self, name) for name in OPTIONS}

    @property
    def bound(self) -> BoundMask:
        """The mask on the grid of the call."""
        if self.bound_ is None:
            shape, keys, around = self.query.shape, self.key.shape[-2], getattr(self, "environment", None)
            batch, heads, length = (shape[0], self.heads[0], shape[1]) if self.heads else shape[:3]
            if not isinstance(around, Environment):  # a layout may come from another pass, around which there was more
                around = None
            positions = self.query_positions, self.key_positions
            self.bound_ = bind(self.mask, Grid(batch, heads, length, keys, self.query.device, *positions, around))
        return self.bound_

    @property
    def grid(self) -> Grid:
        """Sizes and positions for the mask."""
        return self.bound.grid

    @property
    def coverage(self) -> Coverage:
        """The fully masked rows, and the keys that are masked for every query."""
        return coverage(self.bound)

    @property
    def bias_tensors(self) -> tuple[Tensor, ...]:
        return () if self.mask is None else self.mask.bias_tensors()

    @property
    def finite_sinks(self) -> Tensor | None:
        """The sinks, with a finite number instead of −∞: it would be the only term of a fully masked row."""
        return None if self.sinks is None else self.sinks.clamp_min(NO_SINK)

    @property
    def row_sinks(self) -> Tensor | None:
        """The sinks, if each query has its own."""
        return None if self.sinks is None or self.sinks.dim() == 1 else self.sinks

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor that gradients may be asked for."""
        sinks = () if self.sinks is None else (self.sinks,)
        return (self.query, self.key, self.value, *sinks, *self.bias_tensors)

    def dropout_factors(self, block: Block, dtype: torch.dtype) -> Tensor:
        """The dropout factors of a block's weights, (b, h, l, s), for a call that has a seed."""
        return dropout_factors(cast(Tensor, self.seed), self.layout.dropout_p, block, dtype, self.offset)

    @property
    def read_again(self) -> tuple[Tensor, ...]:
        """The tensors that a backward pass reads besides `inputs`: those of mask and positions.

        Functions save them through autograd, which refuses a backward pass after they were written to.
        """
        masks = () if self.mask is None else self.mask.tensors()
        positions = (self.query_positions, self.key_positions)
        tensors = (*masks, *(each for each in positions if isinstance(each, Tensor)))
        # Inference tensors cannot be saved: writes to them are not counted.
        return tuple(tensor for tensor in tensors if not tensor.is_inference())

    def changed(self, *operands: Tensor, **changes: Any) -> Call:
        """The call of another query, key and value, if they are given, and of other options. Its layout follows."""
        query, key, value = operands or (self.query, self.key, self.value)
        changed = Call(query, key, value, **{**self.options, **changes})
        changed.environment = self.layout
        changed.plan_key = key_of(changed)
        return changed

    def alike(self, **changes: Any) -> Call:
        """A copy with other tensors of the same sizes. Its layout and its mask are the same."""
        bound, layout = changes.pop("bound_", self.bound_), changes.pop("layout_", self.layout_)
        other = replace(self, **changes)
        other.bound_, other.layout_, other.environment = bound, layout, self.environment
        other.plan_key, other.is_unbatched = self.plan_key, self.is_unbatched
        return other

    def rekeyed(self, **changes: Any) -> Call:
        """A copy with changes that its key and its layout follow, in the same environment. The mask is the same."""
        other = self.alike(**changes, layout_=None)
        other.plan_key = key_of(other)
        return other

    def rebuild(self, read_again: tuple[Tensor, ...] = ()) -> Callable[..., Call]:
        """A function that makes the same call of other inputs, in the order of `inputs`.

        It holds none of this call's own: for a backward pass only autograd may hold them, so that it can free them.
        Tensors that were one (self-attention, a bias used twice) get gradients of their own when views are given.

        Args:
            read_again: this call's, if they were saved too. The function then accepts them after the inputs, as they
                come back. Hooks may have changed all of them: see `restored`.
        """
        layout, mask, options = self.layout, self.mask, self.options
        covered = None if self.bound_ is None else self.bound_.covered
        options["sinks"] = None
        has_sinks = self.sinks is not None

        def build(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> Call:
            if layout.subclass is None:
                one = key is value  # also where weights, which have no value, are saved
                shapes, dtype, device = layout.operand_shapes, layout.dtype, layout.device
                query = restored("saved query", query, shapes[0], dtype, device)
                key = restored("saved key", key, shapes[1], dtype, device)
                value = key if one else restored("saved value", value, shapes[2], dtype, device)
            changed = dict(options)
            if others:
                tensors = iter(others)
                if has_sinks:
                    changed["sinks"] = restored_sinks(next(tensors), layout)
                if mask is not None:
                    changed["mask"] = mask.with_bias_tensors(restored_biases(mask, tensors))
                if returned := tuple(tensors):
                    changed |= with_saved(changed, read_again, returned)
            call = Call(query, key, value, **changed)
            call.environment = call.layout_ = layout
            if covered is not None:
                call.bound.covered = covered
            return call

        return build


#: Every argument of a call but query, key and value.
OPTIONS = tuple(item.name for item in fields(Call) if item.init)[3:]


def validate(call: Call) -> None:
    """Raise unless tensors, sizes and numbers of a call fit together. Equal layouts pass alike."""
    call = call.split()
    require_tensors(call.query, call.key, call.value)
    require_shapes(call.query, call.key, call.value)
    require_numbers(call.layout)


def valid_call(call: Call, environment: Environment | None = None) -> Call:
    """A call with a layout, all of it checked."""
    call.read(read_environment() if environment is None else environment)
    validate(call)
    call.bound.validate()
    return call


def build_call(call: Call) -> Call:
    """`valid_call`, with zeros for what the mask hides; for computing from the call without a kernel."""
    return zero_hidden(valid_call(call))


def zero_hidden(call: Call, queries: bool = True) -> Call:
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
        zeroed = call.alike(key=key, value=value)
    if queries and covered.masked_queries is not None and zeroed.query is call.query:
        zeroed = zeroed.alike(query=call.query.masked_fill(covered.masked_queries, 0))
    if call.bound.selection is not None:
        zeroed.whole_ = call.query, call.key
    call.zeroed_ = zeroed
    return zeroed
