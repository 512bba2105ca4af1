"""From arguments to results: the plan of a call, what it adds to a kernel's own, and the cache of plans."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from .._call.call import Call, Results, validate, zero_hidden
from .._call.dropout import draw_seed
from .._call.heads import split_heads
from .._call.layout import Layout, gradients_of, sizes_of
from .._call.observers import computing, notify
from .._call.packed import as_one_sequence, each_sequence, in_one_call, validate_mask_of_packed
from .._call.sequences import PackedSequences
from .._call.validation import NO_SINK
from .._environment import Environment, autocast_off, cast_for_autocast
from .._torch_private import sdpa_settings
from ..kernels._base import Kernel, Plan
from ..kernels._choice import choose, choose_for_packed
from ..kernels._saved_by_pytorch import saved_as_given
from ..kernels._sdpa import share_worth_skipping
from ..kernels._second_order import allow_second_derivatives
from ..kernels._weights import compute_weights
from ..masks._lowering import hides_nothing
from ..masks._selected import selects
from .mixing import MIXED, MIXED_ONCE, plan_mixed

_MOST_MASKS = 64  # plans of one key, of masks that the kernels read differently

#: A plan, and the layout of its calls if all sizes are in their key.
Planned = tuple[Plan, Layout | None]
#: The plans of calls with one key, by the keys of their masks.
Plans = dict[Hashable, Planned]
#: The key of calls, and their plans.
Known = tuple[tuple[object, ...], Plans]
#: Shows a call and its output to the observers of this thread in another form than its own.
Show = Callable[[Call, Tensor], None]


def attend(
    call: Call, environment: Environment, show: Show | None = None, known: dict[Hashable, Known] | None = None
) -> Results:
    """Compute `attention`, and weights if they are wanted, in an environment that was read before.

    Sizes, dtypes and numbers of a call are checked where its layout has no plan yet; values are checked in every call.
    A layer that has validated the mask or read its structure passes a bound mask, which holds both results. `known` are
    the keys of a layer's calls, by the layout of its projections, on the CPU.
    """
    if environment.autocast:
        call.query, call.key, call.value = cast_for_autocast(call.query, call.key, call.value)
        with autocast_off(call.query):
            return attend(call, environment._replace(autocast=False), show)
    in_layer = known is not None
    plan = _plan_in_layer(call, environment, known) if in_layer else _plan_of(call.read(environment), environment)
    results = _observed(call, plan, show) if environment.observed else plan(call)
    return _returned(results, call) if call.is_unbatched or results.lse is not None else results


def _returned(results: Results, call: Call) -> Results:
    """Results as they are returned: lse of −∞ where the sink is none, and no batch where there was none."""
    output, lse, weights = results
    if lse is not None and call.sinks is not None:
        lse = lse.masked_fill(lse <= NO_SINK, float("-inf"))
    if call.is_unbatched:
        squeezed = [None if tensor is None else tensor.squeeze(0) for tensor in (output, lse, weights)]
        return Results(*cast(Any, squeezed))
    return Results(output, lse, weights)


def _observed(call: Call, plan: Plan, show: Show | None) -> Results:
    """Compute a call and show it to the observers of this thread."""
    # Calls inside, such as those of single sequences, are parts of the call that observers receive.
    with computing():
        results = plan(call)
    with torch.no_grad():  # what checkpointing computes again, without observers, must save the same
        if show is not None:
            show(call, results.output)
            return results
        # A copy: observers do not see how the call computed the tensors that it keeps.
        shown_call = zero_hidden(as_one_sequence(call.split().alike()))
    if call.heads is None:
        return results._replace(output=notify(shown_call, results.output))
    output = split_heads(results.output, call.heads[0])  # (B, H, L, Dv)
    return _merged(results._replace(output=notify(shown_call, output)))


def _plan_in_layer(call: Call, environment: Environment, known: dict[Hashable, Known]) -> Plan:
    """The plan of a layer's call. The layer's key determines strides, dtype and device of its projections."""
    query, key, value = call.query, call.key, call.value
    layout = query.shape, key.shape, value.shape, gradients_of(call) if environment.gradients else ()
    # A bias of another type may make projections of its own.
    found = known.get(layout) if type(query) is type(key) is type(value) is Tensor else None
    if found is None:
        of_call = call.read(environment).plan_key
        if of_call is not None:
            known[layout] = of_call, _plans_of(of_call, environment.kernel)
        return _plan_of(call, environment)
    call.plan_key, plans = found
    call.read_others(environment)
    planned = plans.get(()) if call.mask is None else None
    if planned is not None:
        plan, call.layout_ = planned
        return plan
    return _plan_of(call, environment, plans=plans)


def run_call(call: Call, environment: Environment) -> Results:
    """Compute a validated call on the kernel that is forced, or the first that does not refuse it."""
    return _plan_of(call, environment, checked=True)(call)


def _plan_of(
    call: Call,
    environment: Environment,
    *,
    checked: bool = False,
    sized: bool | None = None,
    plans: Plans | None = None,
) -> Plan:
    """The plan of a call, whose sizes are checked where its key is new, and whose mask in every call.

    Args:
        call: with a key.
        environment: of the call.
        checked: whether the call and its mask were checked before.
        sized: whether the key has all sizes. Default: unless `native` may run all of them.
        plans: of the key. Default: they are looked up.
    """
    key = call.plan_key
    if sized is None:
        sized = not call.query.is_cpu
    if plans is not None:
        pass
    elif key is None:
        plans = {}
    elif sized:
        plans = _plans_of((key, sdpa_settings()), environment.kernel)
    else:
        plans = _plans_of(key, environment.kernel)
    if not checked:
        if not plans:
            validate(call)
        # Equal keys need not pass alike, because values of a mask can change.
        if call.sequences is not None:
            validate_mask_of_packed(call)
        elif call.mask is not None:
            call.bound.validate()
    of_mask = () if key is None else _key_of_mask(call, sized)
    if of_mask is None:  # another mask of its kind may need another plan
        return _new_plan(call, environment)[0]
    known = plans.get(of_mask)
    if known is None:
        known = _put_plan(call, environment, plans, of_mask, sized)
    plan, call.layout_ = known if known[1] is not None else (known[0], call.layout_)
    return plan


def _put_plan(call: Call, environment: Environment, plans: Plans, of_mask: Hashable, sized: bool) -> Planned:
    """A new plan, which the next call of the same key and mask gets."""
    plan, fits_all = _new_plan(call, environment)
    layout, key = call.layout, call.plan_key
    has_keys = bool(layout.gradients) or layout.weights is not None
    # Without a key, as in a graph, sizes may be symbols, which are not compared.
    of_sizes = plan, layout if has_keys or key is None or not _sees_all_in_one_row(call) else None
    if len(plans) == _MOST_MASKS:
        plans.clear()
    if sized or fits_all or key is None:
        plans[of_mask] = known = of_sizes if sized else (plan, layout if has_keys else None)
        return known
    plans[of_mask] = _with_sizes(environment), None
    _plans_of((key, sdpa_settings()), environment.kernel)[_key_of_mask(call, True)] = of_sizes
    return of_sizes


def _key_of_mask(call: Call, sized: bool) -> Hashable | None:
    """What determines the plans of calls of one key: the mask and, if `sized`, the number of keys and positions.

    ``None`` if the next call needs another plan.
    """
    key: Hashable = ()
    if call.mask is not None:  # within sequences the mask has another structure
        key = call.bound.key(sized) if call.sequences is None else call.mask.signature()
    if key is None or not sized:
        return key
    if _sees_all_in_one_row(call):  # so that each step of a decoder finds its plan
        return min(call.key.shape[-2], 2)
    # On the CPU the only values of a mask by which a kernel is chosen.
    share = share_worth_skipping(call.bound) if call.mask is not None and call.query.is_cpu else None
    return sizes_of(call), key, share


def _sees_all_in_one_row(call: Call) -> bool:
    """Whether a call has one query, which sees every key. Kernels are chosen alike for all numbers of keys above 1."""
    return call.query.shape[-2] == 1 and call.sequences is None and hides_nothing(call.bound)


def _with_sizes(environment: Environment) -> Plan:
    """The plan of calls that are planned for each number of keys, and for each band."""
    return lambda call: _plan_of(call, environment, checked=True, sized=True)(call)


@lru_cache(512)
def _plans_of(key: tuple[object, ...], forced: Kernel | None) -> Plans:
    return {}


def _new_plan(call: Call, environment: Environment) -> tuple[Plan, bool]:
    """A plan, and whether it serves every number of keys, first position and band."""
    layout = call.layout
    # Kernels read memory, in which a lazily negated view has the opposite sign.
    if layout.negative:
        return _with_numbers_written(environment), True
    if layout.weights in (MIXED, MIXED_ONCE):
        return plan_mixed(lambda call: run_call(call, environment), environment.kernel), True
    if layout.sequences is not None:
        kernel = None if layout.tracing else choose_for_packed(call, environment.kernel)
        if kernel is None and (selects(call.mask) or not cast(PackedSequences, call.sequences).queries):
            # A graph and an accelerator have no values of boundaries to cut sequences by, and selected keys are those
            # of all sequences: a mask hides the others.
            return lambda call: run_call(in_one_call(call), environment), False
        if kernel is None:
            one_by_one = _each_alone(environment)
            return _with_seed(one_by_one) if layout.dropout_p > 0 else one_by_one, False
    else:
        kernel = choose(call, environment.kernel)
    if layout.merged and not (kernel.takes_merged and layout.reads_merged):
        return lambda call: _merged(run_call(call.split(), environment)), True
    return _plan_on(kernel, call, environment), kernel.fits_all_sizes


def _merged(results: Results) -> Results:
    return results._replace(output=results.output.transpose(1, 2).flatten(2))  # (B, L, H·Dv)


def _plan_on(kernel: Kernel, call: Call, environment: Environment) -> Plan:
    """The plan of a call on a kernel, which is innermost. Each function around it adds a step that the kernel lacks."""
    layout, bound = call.layout, call.bound
    wants_weights = layout.weights is not None
    together = wants_weights and kernel.gives_weights(layout, bound)
    compute = kernel.plan(layout if together or not wants_weights else layout._replace(weights=None), bound)
    if layout.dropout_p > 0 and kernel.seeds_dropout:
        compute = _with_seed(compute)
    if not (kernel.isolates_hidden or hides_nothing(bound)):
        # A kernel may keep NaN of a masked query out of its output, but not out of gradients.
        only_values = not (layout.gradients or layout.transformed or layout.tracing)
        compute = _with_zeros(compute, not (only_values and kernel.isolates_queries))
    if layout.gradients and not kernel.twice_differentiable and not layout.tracing:
        compute = _with_second_derivatives(kernel.name, compute)
    return _with_weights(compute, environment.kernel) if wants_weights and not together else compute


def _with_numbers_written(environment: Environment) -> Plan:
    """For lazily negated views, whose numbers are written out first: kernels read memory."""

    def resolved(call: Call) -> Results:
        operands = (tensor.resolve_neg().contiguous() for tensor in (call.query, call.key, call.value))
        return run_call(call.changed(*operands), environment)

    return resolved


def _with_seed(compute: Plan) -> Plan:
    def seeded(call: Call) -> Results:
        if call.seed is not None:  # drawn for all parts of a larger call
            return compute(call)
        return compute(call.alike(seed=draw_seed(call.query.device)))

    return seeded


def _with_zeros(compute: Plan, queries: bool) -> Plan:
    return lambda call: compute(zero_hidden(call, queries))


def _with_second_derivatives(name: str, compute: Plan) -> Plan:
    return lambda call: allow_second_derivatives(name, call, saved_as_given(compute, call))


def _with_weights(compute: Plan, forced: Kernel | None) -> Plan:
    def both(call: Call) -> Results:
        weights = compute_weights(zero_hidden(call), None, call.layout.weights == "average", forced)
        return compute(call)._replace(weights=weights)

    return both


def _each_alone(environment: Environment) -> Plan:
    """For packed sequences, one by one: they share no block of keys, so no NaN passes from one to another."""

    def each(call: Call) -> Results:
        results: list[Results] = []
        for sequence in each_sequence(call):
            if sequence.query.shape[2] == 0:
                continue
            # Without keys nothing is computed, and fused kernels refuse it.
            unforced = environment._replace(kernel=None)
            results.append(run_call(sequence, unforced if sequence.layout.empty else environment))
        if not results:
            return run_call(as_one_sequence(call), environment)
        output = torch.cat([each.output for each in results], 2)  # (1, H, T, Dv)
        return Results(output, torch.cat([cast(Tensor, each.lse) for each in results], 2) if call.layout.lse else None)

    return each
