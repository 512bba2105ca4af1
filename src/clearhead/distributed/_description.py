"""The parts of a module that is split over processes, and its facts, which are equal in every process."""

from __future__ import annotations

import re
from typing import TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from .._latent import MultiHeadLatentAttention
from .._multihead import MultiHeadAttention
from ..errors import DTypeError
from ..masks._base import Mask
from ..transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward
from ._agreement import fingerprint

#: The modules that can be split.
Split = TypeVar("Split", MultiHeadAttention, EncoderLayer, DecoderLayer, Encoder, Decoder)
Attentions = list[tuple[str, MultiHeadAttention]]
Named = list[tuple[str, nn.Module]]

_OF_PYTORCH = nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer

# The default repr of an object contains its address. A device contains the number of the process.
_OF_THIS_PROCESS = re.compile(r" at 0x[0-9a-fA-F]+|(?<=[a-z]):\d+")


def attention_parts(where: str, module: object) -> tuple[Attentions, Named]:
    """The attention modules of a module, and the parts beside them, by name.

    Raises:
        DTypeError: for another module than a `MultiHeadAttention`, or a layer or stack made of them.
    """
    attentions: Attentions = []
    other_parts: Named = []
    layers: list[tuple[str, object]] = [("module", module)]
    if isinstance(module, Encoder | Decoder):
        layers = [(f"module.layers.{index}", layer) for index, layer in enumerate(module.layers)]
    for name, layer in layers:
        if isinstance(layer, MultiHeadAttention):
            attentions.append((name, layer))
            continue
        if not isinstance(layer, EncoderLayer | DecoderLayer):
            raise _unfit(where, name, layer)
        for key, part in layer.named_children():
            if key not in ("self_attention", "cross_attention"):
                other_parts.append((f"{name}.{key}", part))
            elif isinstance(part, MultiHeadAttention):
                attentions.append((f"{name}.{key}", part))
            else:
                raise _unfit(where, f"{name}.{key}", part)
    if isinstance(module, Encoder | Decoder):
        other_parts.append(("module.norm", module.norm))
    return attentions, other_parts


def _unfit(where: str, name: str, module: object) -> DTypeError:
    fix = "Split the parts that are such modules one by one."
    if isinstance(module, MultiHeadLatentAttention):
        fix = "Its latents belong to no head: every process would project and hold all of them."
    elif isinstance(module, _OF_PYTORCH):
        fix = "clearhead.transformer.load_transformer(module) builds one with its parameters. Split that one."
    elif any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__):
        fix = (
            "clearhead.checkpoints.layers_from_transformers(model) builds the attention of its layers, and "
            "clearhead.transformer.load_transformer whole layers of nn.TransformerEncoder and its kin. Split these."
        )
    expected = "a MultiHeadAttention, or a layer or stack of clearhead.transformer made of them"
    return DTypeError(f"{where}: {name}", expected=expected, got=type(module).__name__, fix=fix)


def facts_of_module(module: nn.Module, attentions: Attentions, other_parts: Named) -> dict[str, int]:
    """Facts by the names that messages use. They are equal for equal modules, for any values of parameters."""
    settings = "softcap", "scale", "dropout", "mask", "position", "q_norm", "k_norm"
    aspects: dict[str, object] = {
        f"{name} of the module": [_described(getattr(attention, name)) for _, attention in attentions]
        for name in settings
    }
    aspects["parts beside attention"] = [
        # A function is no submodule, so the repr of a feed-forward part does not contain it.
        (name, _described(part), _described(part.activation) if isinstance(part, FeedForward) else "")
        for name, part in other_parts
    ]
    aspects["module"] = (  # all else
        [(name, part.num_heads, part.num_kv_heads, part.head_dim, part.sinks is None) for name, part in attentions],
        [(name, getattr(part, "norm_first", None)) for name, part in module.named_modules()],
        [
            (name, "lazy" if is_lazy(parameter) else tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            for name, parameter in module.named_parameters()
        ],
    )
    # The number of attention modules is sent as it is, so that messages show it.
    return {"attention modules": len(attentions)} | {name: fingerprint(aspect) for name, aspect in aspects.items()}


def _described(part: object) -> str:
    """The part as text, without what differs between processes."""
    text = part.describe() if isinstance(part, Mask) else repr(part)
    # The repr of a tensor contains its values, which may differ in their last digits.
    return type(part).__qualname__ if "tensor(" in text else _OF_THIS_PROCESS.sub("", text)
