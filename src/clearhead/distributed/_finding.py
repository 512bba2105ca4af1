"""The attention modules, and the other parts, of a module that is split over processes."""

from __future__ import annotations

from torch import nn

from .._latent import MultiHeadLatentAttention
from .._multihead import MultiHeadAttention
from ..errors import DTypeError
from ..transformer import Decoder, DecoderLayer, Encoder, EncoderLayer

Named = list[tuple[str, nn.Module]]

_OF_PYTORCH = nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer


def attention_parts(where: str, module: object) -> tuple[list[tuple[str, MultiHeadAttention]], Named]:
    """The attention modules of a module, and the parts beside them, by name.

    Raises:
        DTypeError: for another module than a `MultiHeadAttention`, or a layer or stack made of them.
    """
    attentions: list[tuple[str, MultiHeadAttention]] = []
    others: Named = []
    if isinstance(module, Encoder | Decoder):
        for number, layer in enumerate(module.layers):
            _add_layer(where, f"module.layers.{number}", layer, attentions, others)
        others.append(("module.norm", module.norm))
    else:
        _add_layer(where, "module", module, attentions, others)
    return attentions, others


def _add_layer(
    where: str, name: str, module: object, attentions: list[tuple[str, MultiHeadAttention]], others: Named
) -> None:
    if isinstance(module, MultiHeadAttention):
        attentions.append((name, module))
        return
    if not isinstance(module, EncoderLayer | DecoderLayer):
        raise _unfit(where, name, module)
    for key, part in module.named_children():
        if key in ("self_attention", "cross_attention"):
            if not isinstance(part, MultiHeadAttention):
                raise _unfit(where, f"{name}.{key}", part)
            attentions.append((f"{name}.{key}", part))
        else:
            others.append((f"{name}.{key}", part))


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
