"""Parts that nothing was changed on: a layer may multiply with their parameters itself, or give them packed tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .._checks import PLAIN
from .._environment import Environment
from .._torch_private import COMPILED_CALL, any_global_hook, is_compiled
from ..positions._rotary import Rotary
from ..positions._temperature import LogScale, Temperature, Tempered
from .linear import Linear, linear, require_linear

#: Weight and bias, which may be ``None``, of one linear layer after the other.
Linears = list[Any]
#: PyTorch's module calls its output projection `NonDynamicallyQuantizableLinear`, which is a `Linear` by another name.
_FORWARDS: dict[type, Any] = {kind: kind.forward for kind in (Linear, nn.Linear, NonDynamicallyQuantizableLinear)}
_NORMS = nn.RMSNorm, nn.LayerNorm, nn.Identity
#: Other parts of an attention layer that compute every token by itself.
_OF_SINGLE_TOKENS: dict[type, Any] = {kind: kind.forward for kind in (*_NORMS, Rotary, Temperature, LogScale)}


def _hooks_of(fields: dict[str, Any]) -> tuple[dict[int, Any], ...]:
    """The hooks of a module, from its dictionary: attributes of modules are looked up in three of them first."""
    return (
        fields["_forward_pre_hooks"],
        fields["_forward_hooks"],
        fields["_backward_hooks"],
        fields["_backward_pre_hooks"],
    )


def is_unmodified(module: nn.Module) -> bool:
    """Whether calling a module computes x Wᵀ + b of its own parameters and does nothing else, but for global hooks.

    It does more with hooks, a replaced or compiled ``forward``, parametrizations or a subclass, such as LoRA's.
    """
    return parameters_of(module) is not None


def parameters_of(module: nn.Module) -> dict[str, Any] | None:
    """The parameters of an unmodified linear layer by name, or ``None``."""
    kind: Any = type(module)
    forward = _FORWARDS.get(kind)
    if forward is None or forward is not kind.forward:
        return None
    fields = module.__dict__
    parameters = fields["_parameters"]
    # Written out, because every call of a module checks four.
    if (
        fields["_forward_pre_hooks"]
        or fields["_forward_hooks"]
        or fields["_backward_hooks"]
        or fields["_backward_pre_hooks"]
        or "forward" in fields
        or fields.get(COMPILED_CALL) is not None
        or parameters.get("weight") is None
        or "bias" not in parameters
    ):
        return None
    return parameters


def parameters_of_all(
    modules: dict[str, nn.Module], names: tuple[str, ...], environment: Environment
) -> Linears | None:
    """The parameters of linear layers, if all of them are unmodified and may be multiplied with instead of called."""
    if environment.tracing or environment.module_hooks:
        return None
    found: list[Any] = []
    for name in names:
        parameters = parameters_of(modules[name])
        if parameters is None:
            return None
        found.append(parameters["weight"])
        found.append(parameters["bias"])
    return found


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks, or a ``forward`` that replaces its own, as libraries that load parameters set it."""
    fields = module.__dict__
    return "forward" in fields or any(_hooks_of(fields))


def takes_packed(part: object) -> bool:
    """Whether a part computes the same for packed tokens as for a padded batch, and shows its inputs to no other code.

    Hooks, adapters, subclasses and callables of a user expect the shapes that the documentation promises, and so does
    what `nn.Module.compile` has compiled. Hooks of Clearhead itself do not count.
    """
    kind: Any = type(part)
    forward = _FORWARDS.get(kind) or _OF_SINGLE_TOKENS.get(kind)
    if part is None or forward is None or forward is not kind.forward:
        return part is None
    fields = vars(part)
    if "forward" in fields or is_compiled(cast(nn.Module, part)):
        return False
    hooks = [hook for each in _hooks_of(fields) if each for hook in each.values()]
    if not all(getattr(hook, "__module__", "").startswith("clearhead.") for hook in hooks):
        return False
    if isinstance(part, Tempered) and not takes_packed(part.rotary):
        return False
    if isinstance(part, Rotary | Tempered):
        # The longest position of a padded batch may be that of padding.
        return part.scaling is None or not part.scaling.follows_length
    # A norm over several dimensions mixes tokens, and so may one scale for all activations of a quantised weight.
    weight = fields["_parameters"].get("weight")
    is_plain = weight is None or type(weight) in PLAIN or type(weight).__module__.startswith("torch.distributed.")
    return is_plain and len(fields.get("normalized_shape", (1,))) == 1


def require_input(name: str, x: object, layer: nn.Module) -> None:
    """Raise unless an unmodified linear layer accepts the input.

    Other modules check their inputs themselves. Hooks may load or convert their parameters first.
    """
    if is_unmodified(layer) and not any_global_hook():
        require_linear(name, x, cast(nn.Linear, layer))


def inputs_fit(query: Tensor, key: Tensor, value: Tensor, weights: tuple[Any, Any, Any], batch_dim: int = 0) -> bool:
    """Whether ordinary inputs can be multiplied with three weights as they are, and belong to one batch.

    Checks of arguments one by one, with an error for each, are made where it is not so, and where a GEMM fails.
    """
    itself = key is query and value is query
    # One pair of self-attention: if the other weights differ, their GEMMs fail.
    pairs = ((query, weights[0]),) if itself else zip((query, key, value), weights, strict=True)
    for x, weight in pairs:
        if type(x) is not Tensor or type(weight) not in PLAIN or x.layout is not torch.strided or x.is_nested:
            return False
        shape = x.shape
        if len(shape) != 3 and len(shape) != 2:
            return False
        # A dtype is one object, which `is` compares faster than `!=`.
        if x.dtype is not weight.dtype or x.device != weight.device or shape[-1] != weight.shape[1]:
            return False
    if itself:
        return True
    same = query.dim() == key.dim() == value.dim() and key.shape[:-1] == value.shape[:-1]
    return same and (query.dim() == 2 or query.shape[batch_dim] == key.shape[batch_dim])


def apply_linear(module: nn.Module, x: Tensor, environment: Environment) -> Tensor:
    """The output of ``module(x)``. An unmodified module is not called, which is faster."""
    parameters = None if environment.tracing or environment.module_hooks else parameters_of(module)
    if parameters is None:
        return module(x)
    return linear(x, parameters["weight"], parameters["bias"], environment)
