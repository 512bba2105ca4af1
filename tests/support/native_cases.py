"""Calls of several tiles of queries and several blocks of keys, and what the native kernel has to give for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

import clearhead
from clearhead import masks

from .closeness import require_near

LENGTH, COUNT = 211, 307  # more than four tiles of 48, more than two blocks of 128

Make = Callable[[int, int, int, int], masks.Mask | None]


@dataclass(frozen=True, eq=False)
class Case:
    """Sizes and options of one call; `mask` makes a mask of (B, H, L, S), `learnt` shapes a bias that learns."""

    batch: int = 2
    kv_heads: int = 1
    group: int = 2
    length: int = LENGTH
    count: int = COUNT
    dim: int = 13
    value_dim: int = 7
    mask: Make = lambda b, h, length, count: None
    options: dict[str, object] = field(default_factory=dict)
    sinks: bool | str = False  # "rows" for one of each query
    learnt: tuple[int, ...] = ()

    def inputs(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Query, key, value, and sinks and a bias (if any), which want gradients."""
        random = torch.Generator().manual_seed(7)
        heads = self.kv_heads * self.group
        shapes = {
            "query": (self.batch, heads, self.length, self.dim),
            "key": (self.batch, self.kv_heads, self.count, self.dim),
            "value": (self.batch, self.kv_heads, self.count, self.value_dim),
        }
        if self.sinks:
            shapes["sinks"] = (self.batch, heads, self.length) if self.sinks == "rows" else (heads,)
        if self.learnt:
            shapes["bias"] = self.learnt
        made = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}
        return {name: tensor.requires_grad_() for name, tensor in made.items()}


def numbers(case: Case, kernel: str, inputs: dict[str, Tensor], seed: int = 3) -> dict[str, Tensor]:
    """Output, lse and gradients of all inputs from one forced kernel."""
    torch.manual_seed(seed)
    mask = case.mask(case.batch, case.kv_heads * case.group, case.length, case.count)
    if case.learnt:
        mask = masks.bias(inputs["bias"]) if mask is None else masks.bias(inputs["bias"]) & mask
    qkv = (inputs[name] for name in ("query", "key", "value"))
    with clearhead.use_kernel(kernel):
        output, lse = clearhead.attention(*qkv, mask, sinks=inputs.get("sinks"), return_lse=True, **case.options)
    random = torch.Generator().manual_seed(11)
    seen = lse.isfinite()
    upstream = torch.randn(output.shape, generator=random, dtype=torch.float64).to(output.dtype)
    loss = (output * upstream).sum() + lse[seen].sum() / 3
    result = torch.autograd.grad(loss, tuple(inputs.values()))
    return {"output": output.detach(), "lse": lse.detach(), **dict(zip(inputs, result, strict=True))}


@functools.lru_cache(maxsize=256)
def exact_numbers(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The same from `reference` in float64, once for all instruction sets, from inputs rounded to the dtype."""
    inputs = {name: x.detach().double().requires_grad_() for name, x in case.inputs(dtype).items()}
    return numbers(case, "reference", inputs)


def close_to_exact(case: Case, kernel: str) -> None:
    """1e-5 of the largest number of each kind, against `reference` in float64."""
    exact = exact_numbers(case)
    for name, result in numbers(case, kernel, case.inputs()).items():
        require_near({name: result}, {name: exact[name]})


def _tensor(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(5))


def _documents(b: int, h: int, length: int, count: int) -> masks.Mask:
    return masks.documents((_tensor(b, length) * 7).long().sort().values)


def _hiding(length: int, count: int) -> Tensor:
    """Hides single cells, whole blocks, and all keys from some rows."""
    added = _tensor(length, count)
    added[added < 0.2] = -torch.inf
    added[:100, :130] = -torch.inf
    added[31:90:7] = -torch.inf
    return added


CASES: dict[str, Case] = {
    "plain": Case(),
    "one query": Case(length=1),
    "one query of many heads": Case(length=1, group=29, count=1009, dim=64, value_dim=64),
    "three queries, causal": Case(length=3, count=521, mask=lambda *_: masks.causal("bottom_right")),
    "one key": Case(count=1),
    "wide heads": Case(dim=80, value_dim=128, length=53),
    "narrow heads": Case(dim=1, value_dim=1),
    "many rows": Case(batch=1, kv_heads=1, group=1, length=821, count=97),
    "many heads": Case(batch=1, kv_heads=3, group=5, length=37),
    "causal": Case(mask=lambda *_: masks.causal()),
    "causal, bottom right": Case(mask=lambda *_: masks.causal("bottom_right")),
    "window": Case(mask=lambda *_: masks.sliding_window(31, 5)),
    "narrow window": Case(mask=lambda *_: masks.sliding_window(0, 0)),
    "prefix": Case(mask=lambda *_: masks.prefix(150)),
    "lengths": Case(mask=lambda b, h, n, s: masks.lengths(torch.tensor([s, 3]))),
    "no length": Case(mask=lambda b, h, n, s: masks.lengths(torch.tensor([0, 131]))),
    "lengths per query": Case(mask=lambda b, h, n, s: masks.lengths((_tensor(b, n) * (s + 1)).long())),
    "documents": Case(count=LENGTH, mask=_documents),
    "documents, causal": Case(count=LENGTH, mask=lambda *sizes: _documents(*sizes) & masks.causal()),
    "scattered documents": Case(count=LENGTH, mask=lambda b, h, n, s: masks.documents((_tensor(b, n) * 7).long())),
    "padding": Case(mask=lambda b, h, n, s: masks.keep(keys=_tensor(b, s) > 0.3)),
    "left padding": Case(mask=lambda b, h, n, s: masks.keep(keys=torch.arange(s) >= torch.tensor([[0], [200]]))),
    "bool": Case(mask=lambda b, h, n, s: masks.keep(_tensor(n, s) > 0.5)),
    "bool of keys far apart": Case(
        group=1,
        length=13,
        count=1613,
        mask=lambda b, h, n, s: masks.keep((_tensor(n, s) > 0.2) & (torch.arange(s) % 576 < 61)),
    ),
    "bool of two ends": Case(
        length=61, count=1613, mask=lambda b, h, n, s: masks.keep((_tensor(n, s) > 0.2) & (torch.arange(s) % 1401 < 61))
    ),
    "bool per head": Case(mask=lambda b, h, n, s: masks.keep(_tensor(b, h, n, s) > 0.9)),
    "blocks of bool": Case(
        mask=lambda b, h, n, s: masks.keep((torch.arange(n)[:, None] // 64 + torch.arange(s) // 64) % 2 > 0)
    ),
    "bias": Case(mask=lambda b, h, n, s: masks.bias(_tensor(n, s))),
    "bias per head": Case(mask=lambda b, h, n, s: masks.bias(_tensor(h, 1, s).expand(b, h, n, s)[:1])),
    "bias and bool": Case(mask=lambda b, h, n, s: masks.bias(_tensor(1, 1, n, 1)) & masks.keep(_tensor(n, s) > 0.5)),
    "transposed bool": Case(mask=lambda b, h, n, s: masks.keep((_tensor(s, n) > 0.5).T)),
    "transposed bias": Case(mask=lambda b, h, n, s: masks.bias(_tensor(s, n).T)),
    "bool of every second column": Case(mask=lambda b, h, n, s: masks.keep((_tensor(n, 2 * s) > 0.5)[:, ::2])),
    "bool per query": Case(kv_heads=3, group=1, mask=lambda b, h, n, s: masks.keep(_tensor(n, 1) > 0.2)),
    "bool per item": Case(batch=3, kv_heads=2, mask=lambda b, h, n, s: masks.keep(_tensor(b, 1, n, s) > 0.5)),
    "bias per item": Case(batch=3, kv_heads=2, mask=lambda b, h, n, s: masks.bias(_tensor(b, 1, n, s))),
    "bias per key": Case(kv_heads=3, group=1, mask=lambda b, h, n, s: masks.bias(_tensor(b, 1, 1, s))),
    "bias of shared keys": Case(kv_heads=3, group=1, mask=lambda b, h, n, s: masks.bias(_tensor(1, h, n, s))),
    "bias that hides": Case(kv_heads=2, mask=lambda b, h, n, s: masks.bias(_hiding(n, s))),
    "bias, causal, padding": Case(
        batch=2,
        kv_heads=3,
        group=1,
        mask=lambda b, h, n, s: masks.bias(_tensor(n, s)) & masks.causal() & masks.keep(keys=_tensor(b, s) > 0.3),
    ),
    "bool of documents": Case(
        kv_heads=3,
        group=1,
        count=LENGTH,
        mask=lambda b, h, n, s: _documents(b, h, n, s) & masks.keep(_tensor(n, s) > 0.3),
    ),
    "bool, soft-cap": Case(options={"softcap": 1.5}, mask=lambda b, h, n, s: masks.keep(_tensor(n, s) > 0.5)),
    "where": Case(mask=lambda *_: masks.mask_mod(lambda b, h, q, k: (q + k) % 5 != 0)),
    "soft-cap": Case(options={"softcap": 1.5}),
    "soft-cap, window": Case(options={"softcap": 0.7}, mask=lambda *_: masks.sliding_window(50, 0)),
    "scale": Case(options={"scale": -1.5}),
    "sinks": Case(sinks=True),
    "sinks of rows": Case(sinks="rows", mask=lambda *_: masks.causal()),
    "sinks of rows, hidden rows": Case(
        sinks="rows", mask=lambda *_: masks.sliding_window(3, 0) & masks.prefix(100), options={"softcap": 1.5}
    ),
    "sinks of rows, one query": Case(sinks="rows", length=1),
    "sinks, hidden rows": Case(sinks=True, mask=lambda *_: masks.sliding_window(3, 0) & masks.prefix(100)),
    "dropout": Case(options={"dropout_p": 0.3}),
    "dropout, window": Case(options={"dropout_p": 0.1}, mask=lambda *_: masks.sliding_window(100, 0)),
    "dropout of everything": Case(options={"dropout_p": 1.0}),
    "everything": Case(
        options={"dropout_p": 0.2, "softcap": 3.0, "scale": 0.5},
        sinks=True,
        mask=lambda b, h, n, s: masks.causal() & masks.keep(keys=_tensor(b, s) > 0.1) & masks.bias(_tensor(n, s)),
    ),
}
