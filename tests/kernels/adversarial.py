"""Inputs that make rounding errors add up instead of cancelling, and how large they may be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import clearhead

Numbers = dict[str, Tensor]

#: What is granted where `reference` hits a number by luck, as a part of what one rounding of every term may change.
ROUNDING = 1e-6
SCALES = (1e-4, 1e-2, 1.0, 1e2, 1e4)


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rising(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Logits that rise from −10 to 10, as first column of queries of ones times √D."""
    query, key = 0.1 * query, 0.1 * key
    query[..., 0], key[..., 0] = query.shape[-1] ** 0.5, torch.linspace(-10, 10, key.shape[-2])
    return query, key


def _dominating(place: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def change(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        key = 0.1 * key
        key[..., place, :] = 4 * key[..., place, :].abs() * 10
        return query.abs(), key

    return change


#: Queries and keys from normal ones.
KEYS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "normal": lambda query, key: (query, key),
    "equal": lambda query, key: (query, key[..., :1, :].expand_as(key).contiguous()),
    "rising": _rising,
    "falling": lambda query, key: tuple(x.flip(-2) for x in _rising(query, key)),  # type: ignore[return-value]
    "dominated by an early one": _dominating(5),
    "dominated by a late one": _dominating(-5),
}

#: Values, and gradients of the output, from normal ones.
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "equal": lambda x: 0.1 * torch.linspace(1, 2, x.shape[-1]).expand_as(x).contiguous(),
    "of one sign": torch.abs,
    "far from zero": lambda x: x + 100,
}


@dataclass(frozen=True)
class Adversary:
    """One call; `keys`, `values` and `upstream` name what is done with normal numbers."""

    keys: str
    values: str
    length: int
    count: int
    scale: float = 1.0
    upstream: str = "normal"
    dim: int = 16
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    seed: int = 0

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Query, key, value and the gradient of the output, in float32."""
        shapes = (
            (self.heads, self.length),
            (self.kv_heads, self.count),
            (self.kv_heads, self.count),
            (self.heads, self.length),
        )
        query, key, value, gradient = (
            _random(self.batch, *shape, self.dim, seed=4 * self.seed + n) for n, shape in enumerate(shapes)
        )
        query, key = KEYS[self.keys](query, key)
        return query, key, VALUES[self.values](value), VALUES[self.upstream](gradient)


def numbers(case: Adversary, kernel: str, dtype: torch.dtype, exact: bool = False) -> Numbers:
    """Output, lse and gradients of one forced kernel, in the dtype, or in float64 from inputs rounded to it."""
    made = [x.to(dtype) for x in case.inputs()]
    query, key, value, gradient = [x.double() for x in made] if exact else made
    inputs = [x.requires_grad_() for x in (query, key, value)]
    with clearhead.use_kernel(kernel):
        output, lse = clearhead.attention(*inputs, scale=case.scale * case.dim**-0.5, return_lse=True)
    found = torch.autograd.grad(output, inputs, gradient)
    names = ("gradient of query", "gradient of key", "gradient of value")
    return {"output": output.detach(), "lse": lse.detach(), **dict(zip(names, found, strict=True))}


@functools.lru_cache(maxsize=256)
def exact_numbers(case: Adversary, dtype: torch.dtype = torch.float32) -> Numbers:
    """The same from `reference` in float64."""
    return numbers(case, "reference", dtype, exact=True)


@functools.lru_cache(maxsize=256)
def reference_numbers(case: Adversary, dtype: torch.dtype = torch.float32) -> Numbers:
    """The same from `reference` in the dtype."""
    return numbers(case, "reference", dtype)


@functools.lru_cache(maxsize=256)
def magnitudes(case: Adversary) -> tuple[dict[str, float], float]:
    """What one rounding of every term changes in each kind of number, in units of that rounding; the largest |logit|.

    With a_ij the sum of absolute values of a score, a weight changes by p_ij ((1 − p_ij) a_ij + Σ_l≠j p_il a_il).
    """
    query, key, value, gradient = (x.double() for x in case.inputs())
    key, value = (x.repeat_interleave(case.heads // case.kv_heads, 1) for x in (key, value))
    scale = case.scale * case.dim**-0.5
    logits = scale * query @ key.transpose(-2, -1)
    p = logits.softmax(-1)
    a = scale * query.abs() @ key.abs().transpose(-2, -1)
    of_rows = (p * a).sum(-1, keepdim=True)
    changed = p * ((1 - p) * a + of_rows - p * a)
    output, dp = p @ value, gradient @ value.transpose(-2, -1)
    delta = (gradient * output).sum(-1, keepdim=True)
    of_dp = gradient.abs() @ value.abs().transpose(-2, -1) + (gradient.abs() * output.abs()).sum(-1, keepdim=True)
    slopes = scale * (p * of_dp + changed * (dp - delta).abs())
    group = (case.batch, case.kv_heads, -1, case.count, case.dim)
    sums = {
        "output": p @ value.abs() + changed @ (value - value.mean(-2, keepdim=True)).abs(),
        "lse": logits.logsumexp(-1).abs() + of_rows.squeeze(-1),
        "gradient of query": slopes @ key.abs(),
        "gradient of key": (slopes.transpose(-2, -1) @ query.abs()).view(group).sum(2),
        "gradient of value": ((p + changed).transpose(-2, -1) @ gradient.abs()).view(group).sum(2),
    }
    return {name: float(x.max()) for name, x in sums.items()}, float(logits.abs().max())


def require_accurate(case: Adversary, found: Numbers) -> None:
    """At most four times `reference`'s error; and 1e-5 where |logits| ≤ 10, up to 32,768 terms."""
    reference, exact = reference_numbers(case), exact_numbers(case)
    sizes, largest_logit = magnitudes(case)
    for name, expected in exact.items():
        error, by_reference = (float((x[name].double() - expected).abs().max()) for x in (found, reference))
        limit = max(4 * by_reference, ROUNDING * sizes[name])
        assert error <= limit, f"{case}, {name}: off by {error:.3g}, reference by {by_reference:.3g}, {sizes[name]:.3g}"
        if largest_logit <= 10 and max(case.length, case.count) <= 32768:
            own = float(expected.abs().max()) if name in ("output", "lse", "gradient of value") else sizes[name]
            assert error <= 1e-5 * own, f"{case}, {name}: off by {error:.3g} of {own:.3g}"
