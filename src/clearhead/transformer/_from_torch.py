"""PyTorch's Transformer layers as Clearhead's: the same weights, norms, activation and dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, cast

from torch import Tensor, nn

from .._call.naming import remember_names
from ..checkpoints import load
from ..errors import DTypeError
from ._decoder_layer import DecoderLayer
from ._encoder_layer import EncoderLayer
from ._feed_forward import FeedForward
from ._parts import ResidualLayer
from ._stacks import Decoder, Encoder

Ours = EncoderLayer | DecoderLayer | Encoder | Decoder

_COUNTERPARTS: Mapping[type[nn.Module], type[Ours]] = {
    nn.TransformerEncoderLayer: EncoderLayer,
    nn.TransformerDecoderLayer: DecoderLayer,
    nn.TransformerEncoder: Encoder,
    nn.TransformerDecoder: Decoder,
}


def load_transformer(module: nn.Module) -> Ours:
    """Build Clearhead's counterpart of a PyTorch Transformer layer or stack, with a copy of its weights.

    Args:
        module: an `nn.TransformerEncoderLayer`, `nn.TransformerDecoderLayer`, `nn.TransformerEncoder` or
            `nn.TransformerDecoder`, with pre- or post-norm and any activation. The result is always batch first.

    Returns:
        An `EncoderLayer`, `DecoderLayer`, `Encoder` or `Decoder`, in the training mode of `module`.

    Raises:
        DTypeError: for any other module.
        CheckpointError: if an attention has parts that `MultiHeadAttention` does not support.

    Example:
        >>> import torch, clearhead
        >>> theirs = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True).eval()
        >>> x = torch.randn(2, 5, 12)
        >>> ours = clearhead.transformer.load_transformer(theirs)
        >>> torch.allclose(ours(x), theirs(x), atol=1e-5)
        True
    """
    for theirs, kind in _COUNTERPARTS.items():
        if isinstance(module, theirs):
            build = _layer if issubclass(kind, ResidualLayer) else _stack
            loaded = build(kind, cast(Any, module)).train(module.training)
            remember_names(loaded)
            return loaded
    expected = "one of " + ", ".join(f"nn.{theirs.__name__}" for theirs in _COUNTERPARTS)
    fix = "For a single attention module use clearhead.checkpoints.load."
    raise DTypeError("module", expected=expected, got=type(module).__name__, fix=fix)


def _layer(kind: Any, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> Ours:
    parts: dict[str, Any] = dict(layer.named_children())
    attentions = [parts[name] for name in ("self_attn", "multihead_attn") if name in parts]
    norms = (deepcopy(parts[name]) for name in ("norm1", "norm2", "norm3"))
    return kind(
        layer.linear1.in_features,
        *(load(attention, num_heads=attention.num_heads) for attention in attentions),
        _feed_forward(layer),
        norm=lambda _: next(norms),
        norm_first=layer.norm_first,
        dropout=layer.dropout1.p,
    )


def _stack(kind: Any, stack: nn.TransformerEncoder | nn.TransformerDecoder) -> Ours:
    norm = None if stack.norm is None else deepcopy(stack.norm)
    return kind((load_transformer(layer) for layer in stack.layers), norm=norm)


def _feed_forward(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> FeedForward:
    linear1, activation = layer.linear1, cast("Callable[[Tensor], Tensor]", layer.activation)
    sizes, bias = (linear1.in_features, linear1.out_features), linear1.bias is not None
    built = FeedForward(*sizes, activation=activation, dropout=layer.dropout.p, bias=bias)
    # Copies, so that training does not change the module that was passed. They replace parameters of another dtype.
    parameters = {name: x.clone() for name, x in layer.state_dict().items() if name.startswith("linear")}
    built.load_state_dict(parameters, assign=True)
    return built
