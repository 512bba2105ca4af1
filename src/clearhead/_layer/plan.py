"""From arguments to results: the plan of a call, what it adds to a kernel's own, and the cache of plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from .._call.call import AttentionCall, Results, make_call, validate, zero_hidden
from .._call.dropout import draw_seed
from .._call.observers import computing, notify
from .._call.packed import as_one_sequence, each_sequence, validate_mask_of_packed
from .._call.request import Request
from .._call.sequences import PackedSequences
from .._call.spec import AttentionSpec
from .._call.validation import NO_SINK
from .._environment import Environment, autocast_off, cast_for_autocast
from ..kernels._base import Kernel, Plan
from ..kernels._choice import choose, choose_for_packed
from ..kernels._saved_by_pytorch import saved_as_given
from ..kernels._second_order import allow_second_derivatives
from ..kernels._weights import compute_weights
from ..masks._grid import Grid
from .mixing import MIXED, MIXED_ONCE, plan_mixed

#: Shows a call and its output to the observers of this thread in another form than its own.
Show = Callable[[AttentionCall, Tensor], None]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    request: Request,
    environment: Environment,
    show: Show | None = None,
    grid: Grid | None = None,
) -> Results:
    """Compute `attention`, and weights if they are wanted, in an environment that was read before.

    Sizes, dtypes and numbers of a call are checked where its spec has no plan yet; values are checked in every call.
    A layer that has validated the mask or read its structure passes its grid, which holds both results.
    """
    if environment.autocast:
        query, key, value = cast_for_autocast(query, key, value)
        with autocast_off(query):
            return attend(query, key, value, request, environment._replace(autocast=False), show, grid)
    call = make_call(query, key, value, request, environment, grid)
    cached = _cached(call.spec, environment)
    if not cached:
        validate(call)
    # Equal specs need not pass alike, because values of a mask can change.
    if request.sequences is not None:
        validate_mask_of_packed(call)
    elif request.mask is not None and call.grid.memo.get("validated") is not request.mask:
        request.mask.validate(call.grid)
    if not cached:
        cached.append(_plan(call, environment))
    results = _observed(call, cached[0], show) if environment.observed else cached[0](call)
    return results if query.dim() == 4 and results.lse is None else _returned(results, call, query.dim() == 3)


def _returned(results: Results, call: AttentionCall, unbatched: bool) -> Results:
    """Results as they are returned: lse of −∞ where the sink is none, and no batch where there was none."""
    output, lse, weights = results
    if lse is not None and call.spec.sinks:
        lse = lse.masked_fill(lse <= NO_SINK, float("-inf"))
    if unbatched:
        squeezed = [None if tensor is None else tensor.squeeze(0) for tensor in (output, lse, weights)]
        return Results(*cast(Any, squeezed))
    return Results(output, lse, weights)


def _observed(call: AttentionCall, plan: Plan, show: Show | None) -> Results:
    """Compute a call and show it to the observers of this thread."""
    # Calls inside, such as those of single sequences, are parts of the call that observers receive.
    with computing():
        results = plan(call)
    with torch.no_grad():  # what checkpointing computes again, without observers, must save the same
        if show is not None:
            show(call, results.output)
            return results
        # A copy: observers do not see how the call computed the tensors that it keeps.
        shown_call = zero_hidden(as_one_sequence(replace(call)))
    return results._replace(output=notify(shown_call, results.output))


def run_call(call: AttentionCall, environment: Environment) -> Results:
    """Compute a validated call on the kernel that is forced, or the first that does not refuse it."""
    cached = _cached(call.spec, environment)
    if not cached:
        cached.append(_plan(call, environment))
    return cached[0](call)


def _cached(spec: AttentionSpec, environment: Environment) -> list[Plan]:
    """A list for the plan of calls of this spec: empty until the plan is made. It is a new one if no plan is cached."""
    # A subclass may hold what no spec does, sizes of a graph are symbols, and a mask without a signature may be
    # another one in the next call.
    if spec.subclass is not None or spec.tracing or (spec.masked and spec.mask is None):
        return []
    return _plans_of(spec, environment.kernel, environment.fused)


# Decoding makes a spec for each length: room for many, and those of a training in between stay.
@lru_cache(256)
def _plans_of(spec: AttentionSpec, forced: Kernel | None, fused: tuple[object, ...]) -> list[Plan]:
    return []


def _plan(call: AttentionCall, environment: Environment) -> Plan:
    spec, mask, grid = call.spec, call.request.mask, call.grid
    # Kernels read memory, in which a lazily negated view has the opposite sign.
    if spec.negative:
        return _with_numbers_written(environment)
    if spec.weights in (MIXED, MIXED_ONCE):
        return plan_mixed(lambda call: run_call(call, environment), environment.kernel)
    if spec.sequences is not None:
        kernel = None if spec.tracing else choose_for_packed(call, environment.kernel)
        if kernel is None and not cast(PackedSequences, call.request.sequences).queries:
            # A graph and an accelerator have no values of boundaries to cut sequences by: a mask hides the others.
            return lambda call: run_call(as_one_sequence(call), environment)
        if kernel is None:
            one_by_one = _each_alone(environment)
            return _with_seed(one_by_one) if spec.dropout_p > 0 else one_by_one
    else:
        kernel = choose(call, environment.kernel)
    wants_weights = spec.weights is not None
    together = wants_weights and kernel.gives_weights(spec, mask, grid)
    # The kernel is innermost. Each function around it adds a step that the kernel lacks.
    compute = kernel.plan(spec if together or not wants_weights else spec._replace(weights=None), mask, grid)
    if spec.dropout_p > 0 and kernel.seeds_dropout:
        compute = _with_seed(compute)
    if mask is not None and not kernel.isolates_hidden:
        # A kernel may keep NaN of a masked query out of its output, but not out of gradients.
        only_values = not (spec.gradients or spec.transformed or spec.tracing)
        compute = _with_zeros(compute, not (only_values and kernel.isolates_queries))
    if spec.gradients and not kernel.twice_differentiable and not spec.tracing:
        compute = _with_second_derivatives(kernel.name, compute)
    return _with_weights(compute, environment.kernel) if wants_weights and not together else compute


def _with_numbers_written(environment: Environment) -> Plan:
    """For lazily negated views, whose numbers are written out first: kernels read memory."""

    def resolved(call: AttentionCall) -> Results:
        operands = (tensor.resolve_neg().contiguous() for tensor in (call.query, call.key, call.value))
        return run_call(call.changed(*operands), environment)

    return resolved


def _with_seed(compute: Plan) -> Plan:
    def seeded(call: AttentionCall) -> Results:
        if call.request.seed is not None:  # drawn for all parts of a larger call
            return compute(call)
        return compute(replace(call, request=call.request._replace(seed=draw_seed(call.query.device))))

    return seeded


def _with_zeros(compute: Plan, queries: bool) -> Plan:
    return lambda call: compute(zero_hidden(call, queries))


def _with_second_derivatives(name: str, compute: Plan) -> Plan:
    return lambda call: allow_second_derivatives(name, call, saved_as_given(compute, call))


def _with_weights(compute: Plan, forced: Kernel | None) -> Plan:
    def both(call: AttentionCall) -> Results:
        weights = compute_weights(zero_hidden(call), None, call.spec.weights == "average", forced)
        return compute(call)._replace(weights=weights)

    return both


def _each_alone(environment: Environment) -> Plan:
    """For packed sequences, one by one: they share no block of keys, so no NaN passes from one to another."""

    def each(call: AttentionCall) -> Results:
        results: list[Results] = []
        for sequence in each_sequence(call):
            if sequence.query.shape[2] == 0:
                continue
            # Without keys nothing is computed, and fused kernels refuse it.
            unforced = environment._replace(kernel=None)
            results.append(run_call(sequence, unforced if sequence.spec.empty else environment))
        if not results:
            return run_call(as_one_sequence(call), environment)
        output = torch.cat([each.output for each in results], 2)  # (1, H, T, Dv)
        return Results(output, torch.cat([cast(Tensor, each.lse) for each in results], 2) if call.spec.lse else None)

    return each
