"""Transformer layers that attention is put into, and stacks of them."""

from .feed_forward import FeedForward
from .from_torch import load_transformer
from .layers import DecoderLayer, DecoderWeights, EncoderLayer
from .stacks import Decoder, Encoder

__all__ = ["Decoder", "DecoderLayer", "DecoderWeights", "Encoder", "EncoderLayer", "FeedForward", "load_transformer"]
