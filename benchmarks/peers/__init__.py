"""Other implementations of attention: one function per peer, from a piece of work and its operands to one timed call.

A peer that cannot do the work raises `Unsupported` with the reason; one that is not installed raises ImportError.
"""

from __future__ import annotations

from collections.abc import Callable

from .libraries import eager, x_transformers
from .onnx import onnx_runtime
from .openvino import openvino
from .pytorch import flex, sdpa
from .work import AttentionWork, Operands, Unsupported, Way

__all__ = [
    "EAGER",
    "FLEX",
    "ONNX_RUNTIME",
    "OPENVINO",
    "PEERS",
    "SDPA",
    "X_TRANSFORMERS",
    "AttentionWork",
    "Unsupported",
]

SDPA = "SDPA"
FLEX = "FlexAttention"
X_TRANSFORMERS = "x-transformers"
EAGER = "transformers eager"
ONNX_RUNTIME = "ONNX Runtime"
OPENVINO = "OpenVINO"

PEERS: dict[str, Callable[[AttentionWork, Operands], Way]] = {
    SDPA: sdpa,
    FLEX: flex,
    X_TRANSFORMERS: x_transformers,
    EAGER: eager,
    ONNX_RUNTIME: onnx_runtime,
    OPENVINO: openvino,
}
