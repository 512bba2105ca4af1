"""Transformer layers that attention is put into, and stacks of them."""

from ._decoder_layer import DecoderCache, DecoderLayer, DecoderWeights
from ._encoder_layer import EncoderLayer
from ._feed_forward import FeedForward, SwiGLU
from ._from_torch import load_transformer
from ._stacks import Decoder, Encoder

__all__ = [
    "Decoder",
    "DecoderCache",
    "DecoderLayer",
    "DecoderWeights",
    "Encoder",
    "EncoderLayer",
    "FeedForward",
    "SwiGLU",
    "load_transformer",
]
