"""One architecture: eager attention beside another implementation, by both routes."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import clearhead
from clearhead.errors import ClearheadError
from clearhead.integrations import _deberta

from .building import build, twin
from .inputs import Inputs, find_inputs
from .mechanisms import effects
from .observing import CAUSALITY, GENERATION, GRADIENTS, OBSERVATIONS, NotApplicable, Observation, cast, generated
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
    reference = _Reference(architecture, eager, inputs, implementation)
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
    outcome.seconds = round(time.perf_counter() - started, 2)
    return outcome


def _compare_route(
    outcome: Outcome,
    route: str,
    reference: _Reference,
    calls: Callable[[], int],
    observations: tuple[str, ...] = tuple(OBSERVATIONS),
) -> None:
    implementation = reference.implementation
    try:
        model = _by_route(route, reference, outcome)
    except Exception as error:
        outcome.refused[route] = first_line(error)
        return
    if implementation not in _implementations(model):
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


def _by_route(route: str, reference: _Reference, outcome: Outcome) -> PreTrainedModel:
    if route == "from_config":
        return twin(reference.architecture, reference.eager, reference.implementation)
    model = copy.deepcopy(reference.eager)
    if route == BY_UPGRADE:
        outcome.left = clearhead.upgrade(model, linears=False).left
    else:
        model.set_attn_implementation(reference.implementation)
    return model


def _implementations(model: PreTrainedModel) -> set[str]:
    return {part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)}


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


@final
class _Reference:
    """Observations of eager attention, and of what its differences are held against."""

    def __init__(self, architecture: Architecture, eager: PreTrainedModel, inputs: Inputs, implementation: str) -> None:
        self.architecture, self.eager, self.inputs = architecture, eager, inputs
        self.implementation = implementation
        self._seen: dict[str, Observation | Exception] = {}

    def eager_observation(self, name: str) -> Observation:
        if name not in self._seen:
            try:
                self._seen[name] = _observe(name, self.eager, self.inputs)
            except Exception as error:
                self._seen[name] = error
        found = self._seen[name]
        if isinstance(found, Exception):
            raise NotApplicable(first_line(found)) from found
        return found

    def gives_nan(self) -> bool:
        """Whether there is nothing to compare with."""
        try:
            return any(bool(tensor.isnan().any()) for tensor in self.eager_observation("outputs").values())
        except NotApplicable:
            return False

    @cached_property
    def _sdpa(self) -> PreTrainedModel | None:
        for implementation in ("sdpa", None):  # None: SDPA in those parts that have it
            try:
                model = twin(self.architecture, self.eager, implementation)
            except Exception:  # transformers refuses it
                continue
            if "sdpa" in _implementations(model):
                return model
        return None

    @cached_property
    def _double(self) -> PreTrainedModel:
        return copy.deepcopy(self.eager).double()

    def sdpa_differences(self, name: str) -> dict[str, float]:
        """How far SDPA is from eager attention; empty where the model has no SDPA."""
        return {} if self._sdpa is None else self._differences(name, self._sdpa, self.inputs)

    def double_differences(self, name: str) -> dict[str, float]:
        """How far float64 is from float32, both with eager attention."""
        return self._differences(name, self._double, cast(self.inputs, torch.float64))

    def gradient_errors(self, actual: Observation) -> dict[str, float]:
        """How far gradients, and SDPA's, are from eager attention's in float64; empty where one is missing."""
        if self._sdpa is None:
            return {}
        try:
            exact = _observe(GRADIENTS, self._double, cast(self.inputs, torch.float64))
            sdpa = _observe(GRADIENTS, self._sdpa, self.inputs)
        except Exception:  # some models have float32 numbers in their code
            return {}
        found = {"clearhead": differences(actual, exact), "sdpa": differences(sdpa, exact)}
        return {name: errors[GRADIENTS] for name, errors in found.items()}

    def _differences(self, name: str, model: PreTrainedModel, inputs: Inputs) -> dict[str, float]:
        try:
            return differences(_observe(name, model, inputs), self.eager_observation(name))
        except Exception:  # what it cannot compute, it cannot explain
            return {}


def _observe(name: str, model: PreTrainedModel, inputs: Inputs) -> Observation:
    observe, side = OBSERVATIONS[name]
    return observe(model, inputs, side)


def _compare_observation(
    outcome: Outcome, route: str, name: str, model: PreTrainedModel, reference: _Reference
) -> None:
    try:
        expected = reference.eager_observation(name)
    except NotApplicable as reason:
        outcome.skipped[name] = str(reason)
        return
    try:
        actual = _observe(name, model, reference.inputs)
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


def differences(actual: Observation, expected: Observation) -> dict[str, float]:
    """The largest difference of each tensor that both have, relative to its largest number."""
    return {name: _relative(actual[name], expected[name]) for name in expected if name in actual}


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


def _relative(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    distance = torch.where(same, 0.0, (actual - expected).abs())
    if distance.isnan().any():
        return float("inf")
    if distance.numel() == 0 or not distance.max() > 0:
        return 0.0
    finite = expected[expected.isfinite()]
    largest = finite.abs().max() if finite.numel() else torch.tensor(0.0)
    return float(distance.max() / largest) if largest > 0 else float("inf")
