"""Generated calls for tests of state: every setting of a call is a field that can be changed alone."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.errors import KernelError

from .around import Seeing, Subclass, through_module, tracing
from .exact import exact_attention
from .request_masks import MASKS, Frame, Shown

__all__ = ["LEAVES", "REFUSED", "Request", "exact", "fit", "run"]

LEAVES = ("query", "key", "value", "sinks", "bias")
REFUSED = "refused by the kernel"

Numbers = dict[str, Tensor]
_DROPOUT_SEED = 29


@dataclass(frozen=True)
class Request:
    """One call of attention, without tensors.

    Args:
        seed: of the inputs' values.
        layouts: of query, key and value; see `_LAYOUTS`.
        mask: one of `MASKS`, whose values are drawn from `mask_seed`.
        poison: store NaN in fully masked queries, and in keys and values that are masked for every query.
        query_positions, key_positions: an int, or "(L,)" or "(B, L)" for a tensor, (S,) for keys.
        learns: which leaves want a gradient.
        weights: "heads" or "average"; then a module with projections that change nothing computes the call.
        packed: lengths of documents end to end, queries and keys.
        around: what surrounds the call.
        loss: which results the gradients are of.
    """

    seed: int = 0
    batch: int = 2
    heads: int = 6
    kv_heads: int = 3
    length: int = 5
    keys: int = 7
    dim: int = 11
    value_dim: int = 11
    dtype: torch.dtype = torch.float32
    layouts: tuple[str, str, str] = ("contiguous",) * 3
    mask: str | None = None
    mask_seed: int = 1
    poison: bool = False
    query_positions: int | str | None = None
    key_positions: int | str | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout_p: float = 0.0
    learns: frozenset[str] = frozenset()
    lse: bool = False
    weights: str | None = None
    packed: tuple[tuple[int, int], ...] | None = None
    around: str = "nothing"
    loss: str = "all"

    @cached_property
    def frame(self) -> Frame:
        random = torch.Generator().manual_seed(self.mask_seed)
        if self.packed is not None:
            places = [torch.cat([torch.arange(n) for n in counts])[None] for counts in zip(*self.packed, strict=True)]
            return Frame(1, self.heads, self.length, self.keys, places[0], places[1], True, random)
        given = [self._places(self.query_positions, self.length), self._places(self.key_positions, self.keys)]
        queries, keys = (
            torch.arange(n)[None]
            if p is None
            else p + torch.arange(n)[None]
            if isinstance(p, int)
            else p.reshape(-1, n)
            for p, n in zip(given, (self.length, self.keys), strict=True)
        )
        positioned = given != [None, None] if not any(isinstance(p, Tensor) for p in given) else True
        return Frame(self.batch, self.heads, self.length, self.keys, queries, keys, positioned, random)

    @cached_property
    def shown(self) -> Shown:
        found = Shown(None) if self.mask is None else MASKS[self.mask](self.frame)
        bias = None if found.bias is None else found.bias.to(self.dtype).requires_grad_("bias" in self.learns)
        mask = found.mask
        if bias is not None:
            mask = masks.bias(bias) if mask is None else mask & masks.bias(bias)
        visible = found.visible
        if self.packed is not None:
            queries, keys = (torch.tensor(counts) for counts in zip(*self.packed, strict=True))
            of_queries, of_keys = (torch.arange(len(n)).repeat_interleave(n) for n in (queries, keys))
            same = (of_queries[:, None] == of_keys)[None, None]
            visible = same if visible is None else visible & same
        return Shown(mask, visible, bias)

    @cached_property
    def leaves(self) -> dict[str, Tensor]:
        """Query, key and value, sinks and bias, where the call has them."""
        random = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads)
        sizes = ((self.length, self.dim), (self.keys, self.dim), (self.keys, self.value_dim))
        found: dict[str, Tensor] = {}
        for name, h, size, layout in zip(LEAVES, heads, sizes, self.layouts, strict=False):
            drawn = torch.randn(self.batch, h, *size, generator=random, dtype=torch.float64)
            hidden = self._unseen[name != "query"] if self.poison else None
            drawn = drawn if hidden is None else drawn.masked_fill(hidden, torch.nan)
            found[name] = _laid_out(drawn.to(self.dtype), layout).detach().requires_grad_(name in self.learns)
        if self.sinks:
            sinks = torch.randn(self.heads, generator=random, dtype=torch.float64).to(self.dtype)
            found["sinks"] = sinks.requires_grad_("sinks" in self.learns)
        if self.shown.bias is not None:
            found["bias"] = self.shown.bias
        return found

    @property
    def options(self) -> dict[str, Any]:
        positions = {
            "query_positions": self._places(self.query_positions, self.length),
            "key_positions": self._places(self.key_positions, self.keys),
        }
        options = {"scale": self.scale, "softcap": self.softcap, "sinks": self.leaves.get("sinks")}
        return options | {"dropout_p": self.dropout_p} | ({} if self.packed is not None else positions)

    def _places(self, kind: int | str | None, size: int) -> Tensor | int | None:
        if not isinstance(kind, str):
            return kind
        random = torch.Generator().manual_seed(self.mask_seed + 5)
        rows = 1 if kind == "(L,)" else self.batch
        places = torch.stack([torch.randperm(size + 3, generator=random)[:size] for _ in range(rows)])
        return places[0] if kind == "(L,)" else places

    @property
    def _unseen(self) -> tuple[Tensor, Tensor]:
        """Queries (B, 1, L, 1) and keys (B, 1, S, 1) that no head of their item sees."""
        _, visible, bias = self.shown
        shape = (self.batch, self.heads, self.length, self.keys)
        seen = torch.ones(shape, dtype=torch.bool) if visible is None else visible.expand(shape)
        seen = seen if bias is None else seen & (bias.detach() > -torch.inf)
        return ~seen.any(-1).any(1)[:, None, :, None], ~seen.any(2).any(1)[:, None, :, None]


def _laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "heads inside":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "features first":
        return x.mT.contiguous().mT
    if layout == "every other row":
        return x.repeat_interleave(2, 2)[:, :, ::2]
    if layout == "expanded":
        return x[:1].expand(x.shape)
    if layout == "imaginary":
        return torch.complex(torch.zeros_like(x), x).imag
    return torch.complex(torch.zeros_like(x), -x).conj().imag if layout == "negated" else x  # strides of "imaginary"


def fit(request: Request) -> Request:
    """The request with settings that its other settings allow."""
    changes: dict[str, Any] = {}
    if request.packed is not None:
        queries, keys = (sum(n) for n in zip(*request.packed, strict=True))
        allowed = request.mask in (None, "causal", "window", "other window", "drop", "bias", "prefix")
        changes |= {"batch": 1, "length": queries, "keys": keys, "query_positions": None, "key_positions": None}
        changes |= {"weights": None, "mask": request.mask if allowed else "causal"}
    elif request.weights is not None:
        changes |= {"lse": False, "value_dim": request.dim, "query_positions": None, "key_positions": None}
        changes |= {"layouts": ("contiguous",) * 3, "dropout_p": 0.0}
        changes |= {} if request.around in ("nothing", "no_grad") else {"around": "nothing"}
    if request.dtype in (torch.bfloat16, torch.float16) and {"negated", "imaginary"} & {*request.layouts}:
        changes |= {"layouts": ("contiguous",) * 3}
    if request.poison and "expanded" in request.layouts:  # what one item hides another may show
        changes |= {"layouts": ("contiguous",) * 3}
    request = replace(request, **changes)
    if request.mask == "documents" and request.length != request.keys and not request.frame.positioned:
        return replace(request, mask="causal")
    return request


def run(request: Request, kernel: str | None = None) -> Numbers | str:
    """Results and the gradients of what wants one, or `REFUSED` where the forced kernel cannot run the call."""
    torch.default_generator.manual_seed(_DROPOUT_SEED)
    try:
        with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
            return _numbers(request, _results(request))
    except KernelError:
        return REFUSED


def exact(request: Request) -> Numbers:
    """The same from the formulas, in float64."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in request.leaves.items()}
    options = {"scale": request.scale, "softcap": request.softcap, "sinks": leaves.get("sinks")}
    operands = [leaves[name] for name in LEAVES[:3]]
    found = exact_attention(*operands, request.shown.visible, bias=leaves.get("bias"), **options)
    if request.dropout_p > 0:
        dropped = found.weights * _dropped(request, found.weights.detach())
        found = found._replace(output=dropped @ _of_query_heads(request, operands[2], found.weights))
    numbers = {"output": found.output}
    if request.lse:
        numbers["lse"] = found.lse
    if request.weights is not None:
        numbers["weights"] = found.weights if request.weights == "heads" else found.weights.mean(1)
    gradients = _gradients(request, numbers, {n: x for n, x in leaves.items() if request.leaves[n].requires_grad})
    return {name: x.detach() for name, x in numbers.items()} | gradients


def _of_query_heads(request: Request, value: Tensor, weights: Tensor) -> Tensor:
    """Values of every query head, zeros where no query of the group sees them."""
    group = request.heads // request.kv_heads
    seen = (weights > 0).any(-2).unflatten(1, (request.kv_heads, group)).any(2)[..., None]
    return value.masked_fill(~seen, 0).repeat_interleave(group, 1)


def _dropped(request: Request, weights: Tensor) -> Tensor:
    """The factors of the weights, read off the outputs of `reference` for values that are unit vectors."""
    if request.dropout_p == 1:
        return torch.zeros_like(weights)
    changes: dict[str, Any] = {"dtype": torch.float64, "learns": frozenset(), "around": "nothing", "lse": False}
    changes |= {"poison": False, "layouts": ("contiguous",) * 3}
    plain = replace(request, **changes)
    units = torch.eye(request.keys, dtype=torch.float64).expand(request.batch, request.kv_heads, -1, -1)
    plain.leaves["value"] = units
    torch.default_generator.manual_seed(_DROPOUT_SEED)
    with clearhead.use_kernel("reference"):
        shares = _results(plain)["output"]
    whole = exact_attention(
        *(plain.leaves[n] for n in LEAVES[:3]), plain.shown.visible, bias=plain.leaves.get("bias"),
        scale=plain.scale, softcap=plain.softcap, sinks=plain.leaves.get("sinks"),
    ).weights  # fmt: skip
    return torch.where(whole > 0, shares / whole, 0.0)


def _results(request: Request) -> Numbers:
    query, key, value = (request.leaves[name] for name in LEAVES[:3])
    if request.weights is not None:
        output, weights = through_module(request, query, key, value)
        return {"output": output, "weights": weights}
    if request.packed is not None:
        ends = [torch.tensor([0, *counts]).cumsum(0) for counts in zip(*request.packed, strict=True)]
        operands = [x[0].transpose(0, 1) for x in (query, key, value)]
        found = clearhead.attention_varlen(
            *operands, *ends, request.shown.mask, return_lse=request.lse, **request.options
        )
        found = [x.transpose(0, 1)[None] for x in (found if isinstance(found, tuple) else (found,))]
    else:
        found = _surrounded(request, query, key, value)
    return dict(zip(("output", "lse"), found, strict=False))


def _surrounded(request: Request, *given: Tensor) -> tuple[Tensor, ...]:
    """`attention` under what surrounds the call."""
    mask, options = request.shown.mask, request.options

    def attend(*operands: Tensor) -> tuple[Tensor, ...]:
        found = clearhead.attention(*operands, mask, return_lse=request.lse, **options)
        return found if isinstance(found, tuple) else (found,)

    if request.around == "vmap":
        return tuple(x[0] for x in torch.vmap(attend)(*(x[None] for x in given)))
    if request.around == "subclass":
        return tuple(x.as_subclass(Tensor) for x in attend(*(x.as_subclass(Subclass) for x in given)))
    if request.around == "dispatch mode":
        with Seeing() as mode:
            found = attend(*given)
        # Not the numbers alone: what a mode does not see it cannot record, replace or move.
        assert found[0].untyped_storage().data_ptr() in mode.made
        return found
    if request.around == "trace":
        with tracing():
            return attend(*given)
    with torch.no_grad() if request.around == "no_grad" else nullcontext():
        return attend(*given)


def _numbers(request: Request, results: Numbers) -> Numbers:
    leaves = {name: x for name, x in request.leaves.items() if x.requires_grad}
    return {name: x.detach() for name, x in results.items()} | _gradients(request, results, leaves)


def _gradients(request: Request, results: Numbers, leaves: Numbers) -> Numbers:
    if not leaves or request.around == "no_grad":
        return {}
    random = torch.Generator().manual_seed(7)
    loss = torch.zeros((), dtype=torch.float64)
    for name, found in results.items():
        upstream = torch.randn(found.shape, generator=random, dtype=torch.float64)
        if request.loss in ("all", name) or request.loss not in results:
            finite = found.isfinite()
            loss = loss + (found.double()[finite] * upstream[finite]).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return {f"gradient of {name}": x for name, x in zip(leaves, found, strict=True)}
