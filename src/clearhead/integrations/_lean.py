"""Encoders of transformers whose layers run in Clearhead's own loop, where nothing else could see or change them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .._call.sequences import PackedSequences
from .._encoder.layers import Angles, LeanLayers
from .._encoder.steps import TYPES
from .._encoder.unchanged import Unchanged
from .._environment import Environment, forced_linears
from .._native import extension, why_missing
from ..masks._base import Mask
from ._lean_families import FAMILIES, Family, output_class, read_last_norm, read_layers
from ._unpad_checks import collects_outputs, is_of_single_tokens, is_of_the_library, works_token_by_token

#: Modules of an encoder that the loop calls.
_CALLED = ("embeddings", "embed_tokens", "embeddings_project", "pooler", "rotary_emb")


class Lean:
    """The layers of one encoder, and what they were read from.

    Raises:
        ValueError: with the reason why the modules' own code must run.
    """

    def __init__(self, encoder: nn.Module, dtype: torch.dtype) -> None:
        self.family = family = FAMILIES[type(encoder).__name__]
        modules = _replaced(encoder)
        self._unchanged = Unchanged(modules, is_of_the_library)
        foreign = [kind for kind in {type(module) for module in modules} if not is_of_single_tokens(kind.forward)]
        if foreign or not works_token_by_token(encoder) or not self._unchanged.holds():
            raise ValueError("one of its modules has hooks or other code, or is in training")
        parts, last = read_layers(encoder, family), read_last_norm(encoder, family)
        parameters = [each for module in modules for each in module.parameters(recurse=False)]
        self.layers = LeanLayers(parts, parameters, dtype, family.norm_first, last)

    @property
    def names(self) -> set[str]:
        """The children of the encoder whose code the loop replaces."""
        return {part.partition(".")[0] for part in (self.family.layers, self.family.last_norm or "")}

    def holds(self) -> bool:
        return self._unchanged.holds() and self.layers.are_current()


_known: WeakKeyDictionary[nn.Module, Lean] = WeakKeyDictionary()


def why_not_lean(encoder: nn.Module) -> str | None:
    """The reason why the layers of a supported encoder run by their own code, or ``None``."""
    if type(encoder).__name__ not in FAMILIES:
        return f"the layers of {type(encoder).__name__} are not known"
    if extension is None:
        return why_missing
    parameters = list(encoder.parameters())
    if any(type(each) is not nn.Parameter or not each.is_cpu for each in parameters):
        return "not all of its parameters are plain tensors on the CPU"
    kinds = {each.dtype for each in parameters}
    if len(kinds) > 1 or not kinds <= TYPES.keys():
        return "its parameters are neither float32 nor bfloat16"
    try:
        read_layers(encoder, FAMILIES[type(encoder).__name__])
    except (AttributeError, ValueError) as error:
        return str(error)
    return None


def describe_loop(encoder: nn.Module, dtype: torch.dtype | None) -> str:
    """How the layers of an encoder run, for a report."""
    why = why_not_lean(encoder)
    if why is not None:
        return f"its layers run by their own code: {why}"
    maps = [map for layer in read_layers(encoder, FAMILIES[type(encoder).__name__]) for map in layer.maps]
    used = dtype or maps[0].weight.dtype
    megabytes = sum(map.weight.numel() for map in maps) * used.itemsize / 1e6
    return f"its layers run in one loop in inference, in {used}, on {megabytes:.3g} MB of copies of their weights"


def lean_layers(encoder: nn.Module, dtype: torch.dtype | None, environment: Environment) -> Lean | None:
    """The layers of an encoder, ready to run; ``None`` where a call must run their modules' own code."""
    if encoder.training or type(encoder).__name__ not in FAMILIES or _is_seen(encoder, environment):
        return None
    known = _known.get(encoder)
    if known is None or not known.holds():
        forget(encoder)
        parameter = next(encoder.parameters(), None)
        if parameter is None or why_not_lean(encoder) is not None:
            return None
        try:
            known = _known[encoder] = Lean(encoder, dtype or parameter.dtype)
        except ValueError:
            return None
    return known


def forget(encoder: nn.Module) -> None:
    """Free the copies of an encoder."""
    _known.pop(encoder, None)


def run_lean(
    lean: Lean,
    encoder: Any,
    arguments: Mapping[str, Any],
    environment: Environment,
    *,
    mask: Mask | None = None,
    sequences: PackedSequences | None = None,
) -> Tensor:
    """The last hidden states of an encoder, (B, L, E), or (1, T, E) of packed tokens.

    Args:
        arguments: those of each token, with positions.
        mask: that hides padding.
        sequences: of packed tokens.
    """
    family = lean.family
    x = _embedded(encoder, family, arguments)
    angles = None if family.rotary is None else _angles(encoder, x, arguments["position_ids"], lean.layers)
    return lean.layers.run(x, environment, mask=mask, sequences=sequences, angles=angles).to(x.dtype)


def _embedded(encoder: Any, family: Family, arguments: Mapping[str, Any]) -> Tensor:
    embeddings = getattr(encoder, family.embeddings)
    if isinstance(embeddings, nn.Embedding):
        embedded = arguments.get("inputs_embeds")
        x = embeddings(arguments["input_ids"]) if embedded is None else embedded
    else:
        x = embeddings(**{name: arguments[name] for name in family.takes if name in arguments})
    project = getattr(encoder, "embeddings_project", None)
    return x if project is None else project(x)


def _angles(encoder: Any, x: Tensor, positions: Tensor, layers: LeanLayers) -> dict[str, Angles]:
    found: dict[str, Angles] = {}
    for name in layers.names_of_angles:
        tables = encoder.rotary_emb(x, positions, name) if name else encoder.rotary_emb(x, positions)
        found[name] = Angles(*(table.flatten(0, 1).float().contiguous() for table in tables))
    return found


def results_of(lean: Lean, encoder: Any, states: Tensor, as_tuple: bool) -> Any:
    """The results of an encoder from its last hidden states (B, L, E), as its own forward returns them."""
    output = output_class(lean.family.output)(last_hidden_state=states)
    pooler = getattr(encoder, "pooler", None)
    if pooler is not None:
        output["pooler_output"] = pooler(states)
    return output.to_tuple() if as_tuple else output


def _is_seen(encoder: nn.Module, environment: Environment) -> bool:
    """Whether something around the call would see, change or record what the layers' own code does."""
    if environment.observed or environment.transformed or environment.dispatching or environment.module_hooks:
        return True
    if environment.autocast or environment.tracing or forced_linears.value or not torch.backends.mkldnn.enabled:
        return True
    if torch.get_float32_matmul_precision() != "highest" or collects_outputs():
        return True
    return environment.gradients and any(parameter.requires_grad for parameter in encoder.parameters())


def _replaced(encoder: nn.Module) -> list[nn.Module]:
    """The modules whose code the loop replaces."""
    called = [part for name in _CALLED if (part := getattr(encoder, name, None)) is not None]
    kept = {id(module) for part in called for module in cast(nn.Module, part).modules()} | {id(encoder)}
    return [module for module in encoder.modules() if id(module) not in kept]
