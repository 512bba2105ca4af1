"""Values of every type, shape, dtype, layout and device, which replace arguments."""

from __future__ import annotations

import decimal
import fractions
import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import clearhead
from clearhead import caches, masks, positions

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
OTHERS = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
)
#: Sizes that memory can hold, and sizes that no address space holds; nothing in between.
INTEGERS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 64, -1, -2, -7)
HUGE = (2**48, 2**62, 2**63 - 1, 2**63, 2**64, 2**70, 10**30, -(2**63), -(2**63) - 1, -(10**30))


class OwnError(Exception):
    """What a user's own callable raises."""


class Sub(Tensor):
    """A subclass of tensors without behaviour of its own."""


def _raising(*_args: Any, **_options: Any) -> Any:
    raise OwnError


def users_own(fn: Any) -> Any:
    """A function whose errors are the user's own, unless it cannot be called with these arguments."""

    def called(*indices: Any) -> Any:
        try:
            return fn(*indices)
        except TypeError:
            raise
        except Exception as error:
            raise OwnError from error

    return called


def any_value(rng: random.Random) -> Any:
    """A value of any kind."""
    kind = rng.randrange(12)
    if kind < 5:
        return any_tensor(rng)
    if kind < 7:
        return rng.choice((rng.choice(INTEGERS), rng.choice(HUGE), rng.choice(_NUMBERS)))
    if kind < 8:
        return _containers(rng)
    if kind < 9:
        return _arrays(rng)
    return rng.choice(_MAKERS)()


def any_tensor(rng: random.Random) -> Tensor:
    """A tensor of 0 to 5 dimensions of 0 to 7, of any dtype, layout and device."""
    shape = [rng.choice((0, 1, 2, 3, 4, 5, 7)) for _ in range(rng.randrange(6))]
    return changed_tensor(rng, torch.randn(shape))


def changed_tensor(rng: random.Random, tensor: Tensor) -> Tensor:
    """The tensor with up to two things about it changed."""
    for _ in range(rng.choice((1, 1, 2))):
        try:
            with warnings.catch_warnings(action="ignore"):  # prototypes of nested, sparse and quantised tensors
                tensor = rng.choice(_CHANGES)(rng, tensor.detach())
        except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError, AttributeError, AssertionError):
            continue  # not every change fits every tensor
        if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
            break  # PyTorch itself crashes where some of these follow each other
    return tensor


def _other_size(rng: random.Random, x: Tensor) -> Tensor:
    shape = list(x.shape)
    shape[rng.randrange(len(shape))] = rng.choice((0, 1, 2, 3, 5, 7))
    return torch.zeros(shape).to(x.dtype)


def _sparse(rng: random.Random, x: Tensor) -> Tensor:
    return x.to_sparse() if rng.random() < 0.5 else x.flatten(0, -2).to_sparse_csr()


def _nested(rng: random.Random, x: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(x.unbind(0)), layout=rng.choice((torch.jagged, torch.strided)))


def _lazy_views(rng: random.Random, x: Tensor) -> Tensor:
    if x.dtype.is_floating_point and x.dtype not in (torch.float32, torch.float64):
        x = x.float()  # other floats have no complex dtype
    return rng.choice((lambda: x.to(torch.complex64).conj(), lambda: torch.complex(x, x).conj().imag))()


Change = Callable[[random.Random, Tensor], Tensor]
_CAST: Change = lambda rng, x: x.to(rng.choice(FLOATS + OTHERS))  # noqa: E731
_CHANGES: tuple[Change, ...] = (
    _CAST,
    _other_size,
    lambda rng, x: x.select(rng.randrange(x.dim()), 0),
    lambda rng, x: x.unsqueeze(rng.randrange(x.dim() + 1)),
    lambda rng, x: x.transpose(rng.randrange(x.dim()), rng.randrange(x.dim())),
    lambda rng, x: x.select(0, 0).unsqueeze(0).expand(x.shape),
    lambda rng, x: torch.full_like(x, rng.choice((math.nan, math.inf, -math.inf, -1, 2**62, 10**4))),
    lambda rng, x: x.to("meta"),
    _sparse,
    _nested,
    lambda rng, x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    lambda rng, x: rng.choice((lambda: x.requires_grad_(), lambda: nn.Parameter(x)))(),
    lambda rng, x: x.as_subclass(Sub),
    _lazy_views,
    _CAST,
    _other_size,
)

_NUMBERS = (
    *(0.0, -0.0, 0.5, 1.0, 1.5, -1.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, 1j, True, False),
    *(fractions.Fraction(1, 3), decimal.Decimal("0.5")),
)


def _containers(rng: random.Random) -> Any:
    inner = [
        rng.choice((None, 0, 1, -1, 2**64, 0.5, "a", "self_attn", True, [1], (1, 2))) for _ in range(rng.randrange(4))
    ]
    if rng.random() < 0.3:
        inner = [any_tensor(rng) for _ in inner]
    if rng.random() < 0.3:
        inner = inner[:1] * rng.randrange(4)
    return rng.choice(
        (
            lambda: inner,
            lambda: tuple(inner),
            lambda: dict(enumerate(inner)),
            lambda: {str(n): value for n, value in enumerate(inner)},
            lambda: {("self_attn", n): value for n, value in enumerate(inner)},
            lambda: {repr(value) for value in inner},
            lambda: iter(inner),
            lambda: [inner, inner],
        )
    )()


def _arrays(rng: random.Random) -> Any:
    shape = [rng.randrange(4) for _ in range(rng.randrange(3))]
    return np.zeros(shape, rng.choice((np.float32, np.int64, np.bool_, np.object_, "U3", np.complex64, "M8[s]")))


_VALUES: tuple[Any, ...] = (
    *(None, None, "", "a", "cpu", "meta", "nowhere:9", b"a", "reference", "native", "entropy", "self_attn", "\x00"),
    *(torch.Size((2, 3)), torch.device("cpu"), torch.device("meta"), torch.device("cuda")),
    *(torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16, torch.strided),
    *(slice(None), slice(1, 2**70), slice("a", None), range(3), ..., object(), NotImplemented, int, Tensor),
    *(np.int64(3), np.float32(0.5), len, _raising, lambda *a, **k: None, torch),
)
_MAKERS: tuple[Callable[[], Any], ...] = (
    *(lambda value=value: value for value in _VALUES),
    *(lambda: (n for n in (1, 2)), lambda: nn.Linear(12, 12), nn.Identity, nn.Module),
    *(lambda: nn.LayerNorm(12), nn.ReLU),
    *(lambda: nn.LazyLinear(3), lambda: nn.MultiheadAttention(12, 3), lambda: nn.TransformerEncoderLayer(12, 3, 8)),
    *(lambda: nn.Linear(12, 12, device="meta"), lambda: nn.Linear(12, 12).half(), lambda: nn.Linear(5, 7)),
    *(lambda: clearhead.MultiHeadAttention(12, 3), lambda: clearhead.transformer.FeedForward(12, 24)),
    *(lambda: masks.causal(), lambda: masks.causal("bottom_right"), lambda: masks.sliding_window(1, 0)),
    *(lambda: masks.prefix(2), lambda: masks.lengths(torch.tensor([1, 9, 2]))),
    *(lambda: masks.documents(torch.tensor([0, 0, 1])), lambda: masks.keep(torch.ones(3, 3, dtype=torch.bool))),
    *(lambda: masks.bias(torch.zeros(2, 5)), lambda: masks.keep(keys=torch.ones(2, 7).bool().to("meta"))),
    *(lambda: ~masks.prefix(2**40), lambda: masks.mask_mod(_raising), lambda: masks.mask_mod(lambda b, h, q, k: None)),
    *(
        lambda: masks.mask_mod(lambda b, h, q, k: torch.ones(3, dtype=torch.bool)),
        lambda: masks.sliding_window(2**63, 2**64),
    ),
    *(lambda: masks.prefix(2**65), lambda: positions.ALiBi(5), lambda: positions.RelativeBias(3)),
    *(lambda: positions.Rotary(4), lambda: positions.Rotary(6), lambda: positions.LinearScaling(2.0)),
    *(lambda: caches.KVCache(2, 3, 8, 4), lambda: caches.KVCache(1, 1, 1, 1), lambda: caches.CrossKVCache()),
    *(lambda: caches.SlidingKVCache(2, 3, 3, 4), lambda: caches.EvictingKVCache(2, 3, 4, 4)),
    *(lambda: caches.SinksAndRecent(), lambda: caches.KVCache, lambda: torch.Generator()),
)
