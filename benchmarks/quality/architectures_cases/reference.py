"""Observations of eager attention, and of what differences from it are held against."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import final

import torch
from torch import Tensor
from transformers import PreTrainedModel

import clearhead

from .building import twin
from .inputs import Inputs
from .observing import GRADIENTS, OBSERVATIONS, NotApplicable, Observation, cast
from .results import BY_UPGRADE, first_line
from .types import Architecture

__all__ = ["Reference", "by_route", "differences", "implementations", "observe"]


@final
class Reference:
    """Observations of eager attention, and of what its differences are held against."""

    def __init__(self, architecture: Architecture, eager: PreTrainedModel, inputs: Inputs, implementation: str) -> None:
        self.architecture, self.eager, self.inputs = architecture, eager, inputs
        self.implementation = implementation
        self._seen: dict[str, Observation | Exception] = {}

    def eager_observation(self, name: str) -> Observation:
        if name not in self._seen:
            try:
                self._seen[name] = observe(name, self.eager, self.inputs)
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
            if "sdpa" in implementations(model):
                return model
        return None

    @cached_property
    def double(self) -> PreTrainedModel:
        return copy.deepcopy(self.eager).double()

    def errors(self, name: str, actual: Observation) -> tuple[dict[str, float], dict[str, float]]:
        """How far an observation, and eager attention's or SDPA's, are from eager attention's in float64.

        From its float32 where the model cannot compute in float64.
        """
        eager = self.eager_observation(name)
        try:
            exact = observe(name, self.double, cast(self.inputs, torch.float64))
            others = [differences(eager, exact)]
        except Exception:  # some models have float32 numbers in their code
            exact, others = eager, []
        if self._sdpa is not None:
            others.append(differences(observe(name, self._sdpa, self.inputs), exact))
        theirs = {where: max((found.get(where, 0.0) for found in others), default=0.0) for where in exact}
        return differences(actual, exact), theirs

    def sdpa_differences(self, name: str) -> dict[str, float]:
        """How far SDPA is from eager attention; empty where the model has no SDPA."""
        return {} if self._sdpa is None else self._differences(name, self._sdpa, self.inputs)

    def double_differences(self, name: str) -> dict[str, float]:
        """How far float64 is from float32, both with eager attention."""
        return self._differences(name, self.double, cast(self.inputs, torch.float64))

    def gradient_errors(self, actual: Observation) -> dict[str, float]:
        """How far gradients, and SDPA's, are from eager attention's in float64; empty where one is missing."""
        if self._sdpa is None:
            return {}
        try:
            exact = observe(GRADIENTS, self.double, cast(self.inputs, torch.float64))
            sdpa = observe(GRADIENTS, self._sdpa, self.inputs)
        except Exception:  # some models have float32 numbers in their code
            return {}
        found = {"clearhead": differences(actual, exact), "sdpa": differences(sdpa, exact)}
        return {name: errors[GRADIENTS] for name, errors in found.items()}

    def _differences(self, name: str, model: PreTrainedModel, inputs: Inputs) -> dict[str, float]:
        try:
            return differences(observe(name, model, inputs), self.eager_observation(name))
        except Exception:  # what it cannot compute, it cannot explain
            return {}


def observe(name: str, model: PreTrainedModel, inputs: Inputs) -> Observation:
    function, side = OBSERVATIONS[name]
    return function(model, inputs, side)


def by_route(route: str, reference: Reference) -> tuple[PreTrainedModel, dict[str, str]]:
    """The model with the implementation, and what `upgrade` left alone."""
    if route == "from_config":
        return twin(reference.architecture, reference.eager, reference.implementation), {}
    model = copy.deepcopy(reference.eager)
    if route == BY_UPGRADE:
        return model, clearhead.upgrade(model, linears=False).left
    model.set_attn_implementation(reference.implementation)
    return model, {}


def implementations(model: PreTrainedModel) -> set[str]:
    return {part.config._attn_implementation for part in model.modules() if isinstance(part, PreTrainedModel)}


def differences(actual: Observation, expected: Observation) -> dict[str, float]:
    """The largest difference of each tensor that both have, relative to its largest number."""
    return {name: _relative(actual[name], expected[name]) for name in expected if name in actual}


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
