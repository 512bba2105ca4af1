"""One architecture: eager attention beside another implementation, by both routes."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import clearhead
from clearhead.errors import ClearheadError
from clearhead.integrations import _deberta

from .building import build
from .inputs import find_inputs
from .mechanisms import effects
from .observing import CAUSALITY, GENERATION, GRADIENTS, OBSERVATIONS, NotApplicable, Observation, generated
from .redrawing import redrawn
from .reference import Reference, by_route, differences, implementations, observe
from .results import BY_UPGRADE, LIMIT, Finding, Outcome, first_line
from .source import calls_attention_function
from .types import Architecture, generating

__all__ = ["compare"]

#: What is observed after `upgrade` where the other routes have shown the rest.
UPGRADED = ("outputs", "outputs, left padding", "outputs, right padding", "cache", GRADIENTS)
ROUTES = ("set_attn_implementation", "from_config")
#: Eager attention of these model types returns weights that sum to 1 although a sink takes part of the output away;
#: Clearhead's weights are those that the output is made of, so their rows sum to less than 1.
SINKS_IN_WEIGHTS = frozenset({"granite_swa", "granitemoe_swa"})
#: What a change of a later token may move earlier outputs by, in float32.
CAUSAL = 1e-6


def compare(architecture: Architecture, implementation: str = "clearhead") -> Outcome:
    """Compare an attention implementation with eager attention on one architecture."""
    started = time.perf_counter()
    outcome = Outcome(architecture.name, architecture.class_name)
    try:
        eager = build(architecture)
        inputs = find_inputs(eager)
    except Exception as error:
        outcome.not_built = first_line(error)
        outcome.without_interface = not calls_attention_function(architecture)
        return outcome
    outcome.inputs = sorted(inputs)
    reference = Reference(architecture, eager, inputs, implementation)
    if reference.gives_nan():
        outcome.not_built = "eager attention gives NaN for random parameters and inputs"
        return outcome
    outcome.mechanisms = effects(architecture, eager, inputs)
    with _counted(implementation) as calls:
        for route in ROUTES:
            _compare_route(outcome, route, reference, calls)
        if implementation == "clearhead":
            # `upgrade` swaps attention classes where transformers cannot set an attention function.
            seen = any(outcome.calls.values())
            _compare_route(outcome, BY_UPGRADE, reference, calls, UPGRADED if seen else tuple(OBSERVATIONS))
            _compare_generation(outcome, architecture)
        outcome.differences = redrawn(outcome.differences, reference)
    outcome.seconds = round(time.perf_counter() - started, 2)
    return outcome


def _compare_route(
    outcome: Outcome,
    route: str,
    reference: Reference,
    calls: Callable[[], int],
    observations: tuple[str, ...] = tuple(OBSERVATIONS),
) -> None:
    implementation = reference.implementation
    try:
        model, left = by_route(route, reference)
    except Exception as error:
        outcome.refused[route] = first_line(error)
        return
    outcome.left |= left
    if implementation not in implementations(model):
        outcome.kept_eager.append(route)
        if route == BY_UPGRADE:
            return
    before = calls()
    for name in observations:
        _compare_observation(outcome, route, name, model, reference)
    outcome.calls[route] = calls() - before


def _compare_generation(outcome: Outcome, architecture: Architecture) -> None:
    """Compare what the model that generates text generates before and after `upgrade`."""
    kind = generating(architecture)
    try:
        if kind is None:
            raise NotApplicable("no class that generates")
        eager = build(kind)
        expected = generated(eager)
    except Exception as error:
        outcome.skipped[GENERATION] = first_line(error)
        return
    model = copy.deepcopy(eager)
    clearhead.upgrade(model, linears=False)
    try:
        found = differences(generated(model), expected)
    except Exception as error:
        outcome.errors.append(Finding(BY_UPGRADE, GENERATION, text=first_line(error)))
        return
    outcome.compared += 1
    if beyond := {where: value for where, value in found.items() if value > LIMIT}:
        double = differences(generated(eager.double()), expected)
        outcome.differences += [
            Finding(BY_UPGRADE, GENERATION, value, where, double=double.get(where)) for where, value in beyond.items()
        ]


@contextmanager
def _counted(implementation: str) -> Iterator[Callable[[], int]]:
    """How often models have called an attention implementation."""
    function, disentangled, count = ALL_ATTENTION_FUNCTIONS[implementation], _deberta.disentangled_attention, 0

    def counting(called: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(called)
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return called(*args, **kwargs)

        return counted

    AttentionInterface.register(implementation, counting(function))
    if implementation == "clearhead":
        _deberta.disentangled_attention = counting(disentangled)  # no attention function of transformers
    try:
        yield lambda: count
    finally:
        AttentionInterface.register(implementation, function)
        _deberta.disentangled_attention = disentangled


def _compare_observation(outcome: Outcome, route: str, name: str, model: PreTrainedModel, reference: Reference) -> None:
    try:
        expected = reference.eager_observation(name)
    except NotApplicable as reason:
        outcome.skipped[name] = str(reason)
        return
    try:
        actual = observe(name, model, reference.inputs)
    except Exception as error:
        outcome.errors.append(
            Finding(route, name, text=first_line(error), refused=_is_refusal(error, reference.implementation))
        )
        return
    outcome.compared += 1
    if name == GRADIENTS and not outcome.gradient_errors:
        outcome.gradient_errors = reference.gradient_errors(actual)
    if name == CAUSALITY:
        before, now = float(expected["change"]), float(actual["change"])
        if before <= CAUSAL < now:
            outcome.violations.append(Finding(route, name, value=now))
        return
    missing = sorted(set(expected) - set(actual))
    if missing:
        outcome.missing.append(Finding(route, name, text=", ".join(missing)))
    expected = _zero_masked_rows(actual, expected)
    if reference.architecture.model_type in SINKS_IN_WEIGHTS:
        expected, sinks = _split(expected)
        outcome.known += [Finding(route, name, value, where) for where, value in differences(actual, sinks).items()]
    found = differences(actual, expected)
    outcome.largest = max([outcome.largest, *(value for value in found.values() if value <= LIMIT)])
    if beyond := {where: value for where, value in found.items() if value > LIMIT}:
        sdpa, double = reference.sdpa_differences(name), reference.double_differences(name)
        outcome.differences += [
            Finding(route, name, value, where, sdpa=sdpa.get(where), double=double.get(where))
            for where, value in beyond.items()
        ]


def _split(found: Observation) -> tuple[Observation, Observation]:
    """Outputs, and weights."""
    return (
        {name: tensor for name, tensor in found.items() if "attentions" not in name},
        {name: tensor for name, tensor in found.items() if "attentions" in name},
    )


def _is_refusal(error: Exception, implementation: str) -> bool:
    """Whether Clearhead refused by name, or transformers because the class has no such implementation."""
    return isinstance(error, ClearheadError) or (isinstance(error, KeyError) and error.args == (implementation,))


def _zero_masked_rows(actual: Observation, expected: Observation) -> Observation:
    """What is expected, with zero weights for queries that see no key.

    Eager attention gives them the same weight for every key, because its mask is a finite number. Padding is left out
    of what is compared where it has the shape of the text; weights of other sequences, such as patches, have it.
    """
    found = dict(expected)
    for name, weights in expected.items():
        ours = actual.get(name)
        if "attentions" in name and ours is not None and ours.shape == weights.shape:
            masked = (ours == 0).all(-1, keepdim=True) & (weights.amax(-1, True) - weights.amin(-1, True) < LIMIT)
            found[name] = weights.masked_fill(masked, 0.0)
    return found
