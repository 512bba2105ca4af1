"""PyTorch's Transformer layers as Clearhead's: the same weights, norms, activation and dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, cast

from torch import Tensor, nn

from .._call.naming import remember_names
from .._multihead import MultiHeadAttention
from ..checkpoints import load
from ..errors import DTypeError
from ._decoder_layer import DecoderLayer
from ._encoder_layer import EncoderLayer
from ._feed_forward import FeedForward
from ._stacks import Decoder, Encoder

Ours = EncoderLayer | DecoderLayer | Encoder | Decoder


def load_transformer(module: nn.Module) -> Ours:
    """Build Clearhead's counterpart of a PyTorch Transformer layer or stack, with a copy of its weights.

    Args:
        module: an `nn.TransformerEncoderLayer`, `nn.TransformerDecoderLayer`, `nn.TransformerEncoder` or
            `nn.TransformerDecoder`; pre- or post-norm, any activation. Ours is batch first in any case.

    Returns:
        An `EncoderLayer`, `DecoderLayer`, `Encoder` or `Decoder`, in the training mode of `module`.

    Raises:
        DTypeError: for any other module.
        CheckpointError: if an attention inside has parts ours has no place for.

    Example:
        >>> import torch, clearhead
        >>> theirs = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True).eval()
        >>> x = torch.randn(2, 5, 12)
        >>> ours = clearhead.transformer.load_transformer(theirs)
        >>> torch.allclose(ours(x), theirs(x), atol=1e-5)
        True
    """
    for kind, build in _BUILDERS.items():
        if isinstance(module, kind):
            loaded = build(module).train(module.training)
            remember_names(loaded)
            return loaded
    raise DTypeError(
        "module",
        expected="one of " + ", ".join(f"nn.{kind.__name__}" for kind in _BUILDERS),
        got=type(module).__name__,
        fix="For a single attention module use clearhead.checkpoints.load.",
    )


def _encoder_layer(layer: nn.TransformerEncoderLayer) -> EncoderLayer:
    return EncoderLayer(
        layer.linear1.in_features,
        _attention(layer.self_attn),
        _feed_forward(layer),
        norm=_norms(layer.norm1, layer.norm2),
        norm_first=layer.norm_first,
        dropout=layer.dropout1.p,
    )


def _decoder_layer(layer: nn.TransformerDecoderLayer) -> DecoderLayer:
    return DecoderLayer(
        layer.linear1.in_features,
        _attention(layer.self_attn),
        _attention(layer.multihead_attn),
        _feed_forward(layer),
        norm=_norms(layer.norm1, layer.norm2, layer.norm3),
        norm_first=layer.norm_first,
        dropout=layer.dropout1.p,
    )


def _stack(kind: type[Encoder | Decoder], stack: nn.TransformerEncoder | nn.TransformerDecoder) -> Encoder | Decoder:
    norm = None if stack.norm is None else deepcopy(stack.norm)
    return kind((load_transformer(layer) for layer in stack.layers), norm=norm)


_BUILDERS: Mapping[type[nn.Module], Callable[[Any], Ours]] = {
    nn.TransformerEncoderLayer: _encoder_layer,
    nn.TransformerDecoderLayer: _decoder_layer,
    nn.TransformerEncoder: partial(_stack, Encoder),
    nn.TransformerDecoder: partial(_stack, Decoder),
}


def _attention(attention: nn.MultiheadAttention) -> MultiHeadAttention:
    return load(attention, num_heads=attention.num_heads)


def _feed_forward(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> FeedForward:
    weight = layer.linear1.weight
    built = FeedForward(
        layer.linear1.in_features,
        layer.linear1.out_features,
        activation=cast("Callable[[Tensor], Tensor]", layer.activation),
        dropout=layer.dropout.p,
        bias=layer.linear1.bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    # Copies: training ours must not change the module that was given.
    built.linear1.load_state_dict(layer.linear1.state_dict())
    built.linear2.load_state_dict(layer.linear2.state_dict())
    return built


def _norms(*norms: nn.Module) -> Callable[[int], nn.Module]:
    """Hand out copies of the layer's norms, one per call, in order."""
    remaining = iter(norms)
    return lambda _: deepcopy(next(remaining))
