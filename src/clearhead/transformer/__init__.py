"""Transformer layers that attention is put into, and stacks of them."""

from .decoder_layer import DecoderCache, DecoderLayer, DecoderWeights
from .encoder_layer import EncoderLayer
from .feed_forward import FeedForward, SwiGLU
from .from_torch import load_transformer
from .stacks import Decoder, Encoder

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
