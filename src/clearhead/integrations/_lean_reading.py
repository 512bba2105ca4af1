"""The layers of an encoder, read from its modules, if these are what the loop takes them for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import nn

from .. import masks
from .._encoder.layers import LeanLayer, LeanLayers
from .._encoder.products import Activation, Affine, Product
from .._encoder.steps import Norm
from .._encoder.unchanged import code_of
from .._layer.unmodified import parameters_of
from ..masks._base import Mask
from ._lean_families import CALLED, FAMILIES, Family
from ._unpad_checks import is_of_single_tokens, windows_fit, works_token_by_token

_ACTIVATIONS = ("torch.nn.modules.activation", "transformers.activations")
_CODE = (FunctionType, MethodType)
#: What does nothing in evaluation; an attention without masks that are modules has an empty list of them.
_IDLE = (nn.Dropout, nn.Identity, nn.ModuleList)


@dataclass
class Parts:
    """What was read of modules, for products of a dtype, so that `require_known` knows what else they hold.

    All methods raise a ValueError with the reason why the modules' own code must run.
    """

    dtype: torch.dtype | None
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
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        epsilon = torch.finfo(weight.dtype).eps if epsilon is None else epsilon
        weight, bias = (None if each is None else each.detach().float() for each in (weight, None if is_rms else bias))
        return Norm(weight, bias, epsilon, centers=not is_rms)

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


def read_encoder(encoder: nn.Module, dtype: torch.dtype | None) -> tuple[LeanLayers, list[nn.Module]]:
    """The layers of an encoder of transformers, and the modules whose code they replace.

    Raises:
        AttributeError: if the encoder is built in another way than its family.
        ValueError: with the reason why its modules' own code must run.
    """
    family, home = FAMILIES.get(type(encoder).__name__), type(encoder).__module__
    if family is None or not works_token_by_token(encoder):
        raise ValueError("they are of no known family, or have other code than transformers'")
    parts, stack = Parts(dtype), cast(nn.ModuleList, encoder.get_submodule(family.layers))
    modules = list(stack)[: cast(Any, encoder.config).num_hidden_layers if family.counted else None]
    layers = [read_layer(parts, layer, family, home) for layer in modules]
    if not windows_fit(encoder):
        raise ValueError("its windows are not those of its configuration")
    last = None if family.last_norm is None else parts.norm(encoder.get_submodule(family.last_norm), home)
    called = [part for name, part in encoder.named_modules() if name in {*CALLED, family.project}]
    idle = [module for layer in list(stack)[len(modules) :] for module in layer.modules()]
    running = {id(module) for layer in modules for module in layer.modules()}
    kept = {id(module) for part in called for module in part.modules()} | {id(encoder)}
    replaced = [module for module in encoder.modules() if id(module) not in kept]
    idle = {id(module) for module in idle} - running
    parts.require_known([module for module in replaced if id(module) not in idle], home)
    return joined(layers, family.norm_first, last), replaced


def read_layer(parts: Parts, layer: nn.Module, family: Family, home: str) -> LeanLayer:
    """One layer, of the family's parts."""
    attention: Any = layer.get_submodule(family.attention)
    *inputs, output = [parts.affine(attention, entry.key.removesuffix(".weight")) for entry in family.naming.weights]
    up = [parts.affine(layer, name) for name in family.up]
    if family.holds_gate:
        up = _halves(*up)
    owner, _, name = family.activation.rpartition(".")
    activation = parts.activation(getattr(layer.get_submodule(owner), name) if name else nn.functional.silu)
    first, second = (parts.norm(layer.get_submodule(name), home) for name in family.norms)
    core: Any = getattr(attention, "self", attention)
    window, scale = getattr(core, "sliding_window", None), getattr(core, "scaling", None)
    return LeanLayer(
        Product(inputs, parts.dtype),
        Product([output], parts.dtype),
        (Product(up[:1], parts.dtype, activation), *(Product([each], parts.dtype) for each in up[1:])),
        Product([parts.affine(layer, family.down)], parts.dtype),
        (first, second),
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


def joined(layers: list[LeanLayer], norm_first: bool, last: Norm | None) -> LeanLayers:
    """Layers whose parts fit together, so that the loop reads nothing beyond a tensor."""
    if not layers:
        raise ValueError("there is no layer")
    features = layers[0].output.weights[0].shape[0]
    for layer in layers:
        hidden = layer.down.weights[0].shape[1]
        sizes = [(weight.shape[1], features) for each in (layer.inputs, *layer.up) for weight in each.weights]
        sizes += [(each.weights[0].shape[0], features) for each in (layer.output, layer.down)]
        sizes += [(each.weights[0].shape[0], hidden) for each in layer.up]
        if any(actual != expected for actual, expected in sizes):
            raise ValueError("the sizes of its linear layers do not fit together")
    norms = [norm for norm in (last, *(norm for layer in layers for norm in layer.norms)) if norm is not None]
    if any(each is not None and each.shape != (features,) for norm in norms for each in (norm.weight, norm.bias)):
        raise ValueError("the sizes of its norms do not fit its linear layers")
    return LeanLayers(layers, norm_first, last)


@cache
def _window(keys: int) -> Mask:
    return masks.sliding_window(keys, keys)


def _halves(both: Affine) -> list[Affine]:
    biases = (None, None) if both.bias is None else both.bias.chunk(2)
    return [Affine(*half) for half in zip(both.weight.chunk(2), biases, strict=True)]
