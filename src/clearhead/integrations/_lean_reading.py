"""The layers of an encoder, read from its modules, if these are what the loop takes them for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from .. import masks
from .._encoder.layers import LayerParts
from .._encoder.products import Activation, Affine
from .._encoder.steps import Norm
from .._encoder.unchanged import code_of
from .._layer.unmodified import parameters_of
from ..masks._base import Mask
from ._lean import Reading
from ._lean_families import CALLED, FAMILIES, Family
from ._unpad_checks import is_of_single_tokens, windows_fit, works_token_by_token

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_CODE = (FunctionType, MethodType)
#: What does nothing in evaluation; an attention without masks that are modules has an empty list of them.
_IDLE = (nn.Dropout, nn.Identity, nn.ModuleList)


@dataclass
class Parts:
    """What was read of modules, so that `require_known` knows what else they hold.

    All methods raise a ValueError with the reason why the modules' own code must run.
    """

    used: set[int] = field(default_factory=set[int])

    def affine(self, parent: nn.Module, name: str) -> Affine:
        """The parameters of an unmodified linear layer."""
        module = parent.get_submodule(name)
        parameters = parameters_of(module)
        if parameters is None:
            raise ValueError(f"{name} has hooks, an adapter or other code than nn.Linear's")
        self.used.add(id(module))
        weight, bias = parameters["weight"], parameters["bias"]
        if not _is_plain(weight) or weight.dim() != 2 or not (bias is None or _is_plain(bias)):
            raise ValueError(f"{name} has a weight that is quantized, sparse or not contiguous")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"the bias of {name} is of another size than its weight")
        return Affine(weight.detach(), None if bias is None else bias.detach())

    def norm(self, module: Any, home: str) -> Norm | None:
        """A LayerNorm, or an RMSNorm of PyTorch or of the encoder's own file; ``None`` for an identity."""
        self.used.add(id(module))
        if type(module) is nn.Identity:
            return None
        kind, weight, bias = type(module), module.weight, getattr(module, "bias", None)
        is_rms = kind is nn.RMSNorm or (kind.__module__ == home and kind.__name__.endswith("RMSNorm"))
        if kind is not nn.LayerNorm and not is_rms:
            raise ValueError(f"{kind.__name__} is no norm that the loop knows")
        if len(getattr(module, "normalized_shape", (1,))) != 1:
            raise ValueError("a norm is over several dimensions")
        if not all(each is None or _is_plain(each) for each in (weight, bias)):
            raise ValueError("the parameters of a norm are not plain tensors")
        if kind is nn.LayerNorm:
            return Norm(weight, bias, module.eps, centers=True)
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        return Norm(weight, None, torch.finfo(weight.dtype).eps if epsilon is None else epsilon, centers=False)

    def activation(self, function: Any) -> Activation:
        """An activation of PyTorch or transformers, which computes each number by itself."""
        self.used.add(id(function))
        known = isinstance(function, BuiltinFunctionType) or _home(function).startswith("torch.nn.functional")
        if not known and type(function).__module__ not in _ACTIVATIONS:
            raise ValueError("its activation is not one of PyTorch's or transformers'")
        return function

    def require_known(self, modules: list[nn.Module], home: str) -> None:
        """Raise unless all that the modules hold was read, or does nothing in evaluation.

        Args:
            modules: whose code the loop replaces.
            home: the Python module of the encoder's class.
        """
        kinds = [type(module) for module in modules]
        if not all(is_of_single_tokens(code) for code in code_of(kinds) if isinstance(code, _CODE)):
            raise ValueError("a class of one of its modules has other code")
        for module in modules:
            package = type(module).__module__
            if package.startswith("transformers.") and package not in (home, "transformers.activations"):
                raise ValueError(f"{type(module).__name__} is of another model")
            is_leaf = next(module.children(), None) is None
            if is_leaf and id(module) not in self.used and not isinstance(module, _IDLE):
                raise ValueError(f"{type(module).__name__} stands where the loop expects dropout")
            others = [value for value in vars(module).values() if isinstance(value, _CODE)]
            if any(id(value) not in self.used for value in others):
                raise ValueError(f"a method of {type(module).__name__} was replaced")


def _home(code: Any) -> str:
    return getattr(code, "__module__", None) or ""


def _is_plain(parameter: Any) -> bool:
    return type(parameter) is nn.Parameter and parameter.layout is torch.strided and parameter.is_contiguous()


def read_encoder(encoder: nn.Module) -> Reading:
    """The layers of an encoder of transformers.

    Raises:
        AttributeError: if the encoder is built in another way than its family.
        ValueError: with the reason why its modules' own code must run.
    """
    family, home = FAMILIES.get(type(encoder).__name__), type(encoder).__module__
    if family is None or not works_token_by_token(encoder):
        raise ValueError("they are of no known family, or have other code than transformers'")
    parts, config = Parts(), cast(Any, encoder.config)
    of_config = config.num_hidden_layers if family.counted else None
    modules = list(cast(nn.ModuleList, encoder.get_submodule(family.layers)))[:of_config]
    if not modules:
        raise ValueError("there is no layer")
    layers = [_read_layer(parts, layer, family, home) for layer in modules]
    if not windows_fit(encoder):
        raise ValueError("its windows are not those of its configuration")
    last = None if family.last_norm is None else parts.norm(encoder.get_submodule(family.last_norm), home)
    names = {name for name in (*CALLED, family.project) if name is not None}
    called = [part for name, part in encoder.named_modules() if name in names]
    kept = {id(module) for part in called for module in part.modules()} | {id(encoder)}
    replaced = [module for module in encoder.modules() if id(module) not in kept]
    running = {id(module) for layer in modules for module in layer.modules()}
    stack = encoder.get_submodule(family.layers)
    idle = {id(module) for module in stack.modules()} - running - {id(stack)}
    parts.require_known([module for module in replaced if id(module) not in idle], home)
    require_shapes(layers, last)
    return Reading(replaced, layers, family.norm_first, last)


def _read_layer(parts: Parts, layer: nn.Module, family: Family, home: str) -> LayerParts:
    attention: Any = layer.get_submodule(family.attention)
    names = [entry.key.removesuffix(".weight") for entry in family.naming.weights]
    *inputs, output = (parts.affine(attention, name) for name in names)
    up = tuple(parts.affine(layer, name) for name in family.up)
    if family.holds_gate:
        up = _halves(up[0])
    owner, _, name = family.activation.rpartition(".")
    first, second = (parts.norm(layer.get_submodule(name), home) for name in family.norms)
    core: Any = getattr(attention, "self", attention)
    window, scale = getattr(core, "sliding_window", None), getattr(core, "scaling", None)
    return LayerParts(
        tuple(inputs),
        output,
        up,
        parts.activation(getattr(layer.get_submodule(owner), name)),
        parts.affine(layer, family.down),
        first,
        second,
        _read_heads(core, inputs, output),
        None if window is None else _window(window - 1),
        None if family.rotary is None else getattr(layer, "attention_type", ""),
        {} if scale is None else {"scale": scale},
    )


def _read_heads(attention: Any, inputs: list[Affine], output: Affine) -> tuple[int, int]:
    """H and Hkv, by the sizes of the projections."""
    head_dim = getattr(attention, "head_dim", None) or attention.attention_head_size
    inner, all_inputs = output.weight.shape[1], sum(map.weight.shape[0] for map in inputs)
    heads, kv_heads = inner // head_dim, (all_inputs - inner) // 2 // head_dim
    told = getattr(attention, "num_attention_heads", getattr(attention, "n_heads", heads))
    if told != heads or heads * head_dim != inner or (2 * kv_heads + heads) * head_dim != all_inputs:
        raise ValueError("its numbers of heads do not fit its projections")
    return heads, kv_heads


def require_shapes(layers: list[LayerParts], last: Norm | None) -> None:
    """Raise unless the parts of layers fit together, so that the loop reads nothing beyond a tensor."""
    features = layers[0].output.weight.shape[0]
    for parts in layers:
        hidden = parts.down.weight.shape[1]
        shapes = [(map.weight.shape[1], features) for map in (*parts.inputs, *parts.up)]
        shapes += [(map.weight.shape[0], features) for map in (parts.output, parts.down)]
        shapes += [(map.weight.shape[0], hidden) for map in parts.up]
        if any(actual != expected for actual, expected in shapes):
            raise ValueError("the sizes of its linear layers do not fit together")
    norms = [norm for parts in layers for norm in (parts.first_norm, parts.second_norm)] + [last]
    of_norms = [each for norm in norms if norm is not None for each in (norm.weight, norm.bias) if each is not None]
    if any(tuple(each.shape) != (features,) for each in of_norms):
        raise ValueError("the sizes of its norms do not fit its linear layers")


@cache
def _window(keys: int) -> Mask:
    return masks.sliding_window(keys, keys)


def _halves(both: Affine) -> tuple[Affine, Affine]:
    half = both.weight.shape[0] // 2
    return _rows(both, slice(0, half)), _rows(both, slice(half, None))


def _rows(of: Affine, rows: slice) -> Affine:
    return Affine(of.weight[rows], None if of.bias is None else of.bias[rows])
