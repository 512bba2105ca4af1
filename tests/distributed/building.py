"""Modules for the tests, with the same values in every process, and what one process computes with them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead
from clearhead import masks, positions
from clearhead.errors import ClearheadError
from clearhead.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward, SwiGLU
from tests.support.closeness import require_near

HEADS, DIM, EMBED = 8, 4, 32
METHODS = ("heads", "gather", "ring")
methods = pytest.mark.parametrize("method", METHODS)
layouts = pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
#: Makes a module that cannot be split.
LATENT = partial(
    clearhead.MultiHeadLatentAttention, EMBED, 4, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4
)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` for bfloat16. The gradients of its weight and bias are summed in float32.

    On the CPU PyTorch sums them row by row in bfloat16. That error grows with the rows of a process, and hides errors
    of splitting.
    """

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.layer_norm(input, self.normalized_shape, eps=self.eps) * self.weight + self.bias


class HeadNorm(nn.Module):
    """A norm with its own factor for every feature of every head."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(heads, 1, dim) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def attention(kv_heads: int = HEADS, *, dtype: torch.dtype = torch.float64, **parts: Any) -> Any:
    """A module of 8 heads of 4 numbers; parts are named, as modules that learn are made with the values of a seed."""
    torch.manual_seed(5)
    made: dict[str, Any] = {}
    for name, part in parts.items():
        made[name] = (
            {
                "rotary": lambda: positions.Rotary(DIM),
                "rotary of the length": lambda: positions.Rotary(DIM, scaling=positions.DynamicNTKScaling(4.0, 8)),
                "axes": lambda: positions.Rotary(DIM, axes=[1, 0]),
                "log scale": lambda: positions.LogScale(HEADS, start=0.5),
                "temperature": lambda: positions.Temperature(0.5, 8, rotary=positions.Rotary(DIM)),
                "norm": lambda: nn.RMSNorm(DIM),
                "layer norm": lambda: (LayerNorm if dtype == torch.bfloat16 else nn.LayerNorm)(DIM),
                "per head": lambda name=name: HeadNorm(HEADS if name == "q_norm" else kv_heads, DIM),
                "relative": lambda: positions.RelativeBias(HEADS, 8, 16),
                "relative window": lambda: positions.RelativeBias(HEADS, 8, 16) & masks.sliding_window(9, 3),
                "alibi": lambda: positions.ALiBi(HEADS),
            }[part]()
            if isinstance(part, str) and name != "gate"
            else part
        )
    module = clearhead.MultiHeadAttention(EMBED, HEADS, num_kv_heads=kv_heads, **made)
    return randomised(module).to(dtype)


def randomised(module: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() < 2 or parameter.shape[1] == HEADS:
                parameter.add_(torch.randn_like(parameter) / 3)
    return module


def encoder(layers: int = 2, kv_heads: int = 2, *, dtype: torch.dtype = torch.float64, gated: bool = False) -> Encoder:
    def layer(index: int) -> EncoderLayer:
        part: nn.Module = SwiGLU(EMBED, 24) if gated else FeedForward(EMBED, 24, activation=nn.GELU())
        return EncoderLayer(EMBED, attention(kv_heads, position="rotary"), part, norm_first=index % 2 == 1)

    torch.manual_seed(6)
    return randomised(Encoder([layer(index) for index in range(layers)], norm=nn.RMSNorm(EMBED))).to(dtype)


def decoder(*, dtype: torch.dtype = torch.float64) -> Decoder:
    torch.manual_seed(7)
    layers = [DecoderLayer(EMBED, attention(2), attention(4), FeedForward(EMBED, 24)) for _ in range(2)]
    return randomised(Decoder(layers)).to(dtype)


def _parents(nodes: int) -> Tensor:
    """Parents of a tree of nodes."""
    return (torch.rand(nodes) * torch.arange(1, nodes + 1)).long() - 1


#: Masks of one process, for B, L and S.
MASKS: dict[str, Callable[[int, int, int], Any]] = {
    "none": lambda b, n, s: None,
    "causal": lambda b, n, s: masks.causal(),
    "bottom right": lambda b, n, s: masks.causal("bottom_right"),
    "window": lambda b, n, s: masks.sliding_window(5, 2) & masks.causal(),
    "lengths": lambda b, n, s: masks.lengths(torch.tensor([max(0, s - 3 * i) for i in range(b)])),
    "both lengths": lambda b, n, s: masks.lengths(torch.arange(b) * s // max(1, b), torch.arange(b) * n // max(1, b)),
    "lengths of queries": lambda b, n, s: masks.lengths((torch.arange(b)[:, None] + torch.arange(n)) % (s + 1)),
    "prefix": lambda b, n, s: masks.causal() | masks.prefix(3),
    "documents": lambda b, n, s: masks.documents(torch.arange(s)[None].expand(b, s) // 6) & masks.causal(),
    "scattered documents": lambda b, n, s: masks.documents(torch.arange(s) % 3),
    "keys": lambda b, n, s: masks.keep(keys=torch.rand(b, s) < 0.7) & masks.tree(_parents(s // 2)),
    "drop": lambda b, n, s: masks.drop(torch.rand(n, s) < 0.3),
    "bool": lambda b, n, s: torch.rand(b, n, s) < 0.6,
    "heads": lambda b, n, s: masks.keep(torch.rand(b, HEADS, n, s) < 0.6),
    "items times heads": lambda b, n, s: masks.keep(torch.rand(b * HEADS, n, s) < 0.6),
    "bias": lambda b, n, s: masks.bias(torch.randn(HEADS * b, n, s, dtype=torch.float64).requires_grad_()),
    "function of heads": lambda b, n, s: masks.mask_mod(lambda b, h, q, k: (q + h) % 3 != k % 3),
    "not": lambda b, n, s: ~masks.sliding_window(1, 1) & masks.block_causal(7),
    "selected": lambda b, n, s: masks.causal() & masks.selected(torch.randint(-1, s, (b, n, 3))),
    "selected blocks": lambda b, n, s: masks.selected(torch.randint(-1, -(-s // 5), (1, HEADS, n, 2)), block=5),
    "alibi": lambda b, n, s: positions.ALiBi(HEADS) & masks.causal(),
    "nothing seen": lambda b, n, s: masks.lengths(torch.zeros(b, dtype=torch.int64)),
}


def mask(name: str, batch: int, length: int, keys: int | None = None) -> Any:
    torch.manual_seed(9)
    return MASKS[name](batch, length, length if keys is None else keys)


def full(tensor: Tensor) -> Tensor:
    """A tensor or `DTensor` as a whole."""
    whole = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Gradients of all parameters that learn as wholes, and none left."""
    found: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            found[name] = full(parameter.grad)
            parameter.grad = None
    return found


def largest(x: Tensor) -> float:
    """The largest magnitude."""
    return x.abs().max().item() if x.numel() else 0.0


def require_within(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Raise unless no error is larger than the tolerance."""
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    error = largest(found.double() - expected.double())
    assert error <= tolerance, f"{what}: {error:.2g} > {tolerance:.2g}"


def require_close(found: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    """Raise unless the largest error is within the tolerance of the largest number, or of 1 if that is more."""
    require_near({what: found}, {what: expected}, tolerance)


def sequences(*lengths: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random features (2, length, E)."""
    return [torch.randn(2, length, EMBED, dtype=dtype) for length in lengths]


def refuses(said: str, kind: type[Exception] | tuple[type[Exception], ...] = ClearheadError) -> Any:
    """A block that raises an error of a kind, with a text in it."""
    return pytest.raises(kind, match=re.escape(said))


class _Collectives(TorchDispatchMode):
    """Counts what `CommDebugMode` counts, whose table of modules breaks on modules with hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own collectives come by afterwards
        kind = func._overloadpacket.__name__.strip("_")
        if func.namespace in ("c10d", "_c10d_functional") and not kind.startswith(("wait", "wrap")):
            self.counts[kind] = self.counts.get(kind, 0) + 1
        return func(*args, **(kwargs or {}))


def collectives(call: Callable[[], Any]) -> dict[str, int]:
    """How often a function calls each kind of collective."""
    with _Collectives() as mode:
        call()
    return mode.counts


def passes(module: Any, *inputs: Tensor, **options: Any) -> list[dict[str, int]]:
    """The collectives of a forward and of a backward pass."""
    own = [x.clone().requires_grad_() for x in inputs]
    outputs: list[Tensor] = []
    forward = collectives(lambda: outputs.append(module(*own, **options)))
    return [forward, collectives(lambda: outputs[0].sum().backward())]
