"""Generated calls of `attention`: the hypothesis strategy that every kernel is tried with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from .mask_cases import Frame, Part, draw_frame, draw_mask
from .oracle import Problem, Rule

_PRIMES = (5, 7, 11, 13)
_GROUPS = ((1, 1), (2, 1), (3, 1), (1, 3), (2, 2), (2, 3))  # (Hkv, query heads per key/value head)


@dataclass(frozen=True)
class Call:
    """Arguments of `clearhead.attention`, and the same request for the oracle."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    options: dict[str, Any]
    problem: Problem

    @property
    def attention_arguments(self) -> tuple[Any, ...]:
        return self.query, self.key, self.value, self.mask

    @property
    def named_inputs(self) -> dict[str, Tensor]:
        """Everything gradients are compared for."""
        names = ["query", "key", "value", *([] if self.problem.sinks is None else ["sinks"])]
        names += [f"bias {number}" for number in range(len(self.problem.biases))]
        return dict(zip(names, self.problem.tensors, strict=True))

    @property
    def weights_arguments(self) -> tuple[Any, ...]:
        return self.query, self.key, self.mask

    @property
    def weights_options(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if name != "return_lse"}

    def __repr__(self) -> str:
        sizes = f"query {tuple(self.query.shape)}, key {tuple(self.key.shape)}, value {tuple(self.value.shape)}"
        strides = f"strides {self.query.stride()}, {self.key.stride()}, {self.value.stride()}"
        return f"Call({sizes}, {strides}, {self.query.dtype}, mask={self.mask!r}, {self.options})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # hypothesis would print every number of every tensor


@st.composite
def calls(draw, dtype: torch.dtype, *, fusable: bool = False) -> Call:
    """Draw a call; `fusable` leaves out what PyTorch's fused kernels refuse, so that these get their share."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    batch = draw(st.sampled_from([1, 2, 3]))
    kv_heads, group = draw(st.sampled_from(_GROUPS))
    length, count = _lengths(draw, fusable=fusable)
    head_dim = draw(st.sampled_from([1, 3, 8, 17]))
    value_dim = head_dim if fusable else draw(st.sampled_from([head_dim, 2, 19]))
    frame, positions = draw_frame(draw, batch, kv_heads * group, length, count, generator)
    part = draw_mask(draw, frame, dtype, learnt_bias=not fusable)
    rule: Rule = _always if part is None else part.rule
    hidden = _hidden_keys(part, frame)
    query = _laid_out(draw, _random(dtype, generator, batch, frame.heads, length, head_dim), None)
    key = _laid_out(draw, _random(dtype, generator, batch, kv_heads, count, head_dim), hidden)
    value = _laid_out(draw, _random(dtype, generator, batch, kv_heads, count, value_dim), hidden)
    options = _options(draw, frame, dtype, fusable=fusable)
    how = {name: options[name] for name in ("scale", "softcap", "sinks")}
    problem = Problem(query, key, value, rule, () if part is None else part.biases, **how)
    return Call(query, key, value, None if part is None else part.mask, {**options, **positions}, problem)


def _always(b: int, h: int, i: int, j: int) -> bool:
    return True


def _lengths(draw, *, fusable: bool) -> tuple[int, int]:
    """L and S: two primes, now and then equal, one or none."""
    length, count = draw(st.permutations(_PRIMES))[:2]
    small = [1, length] if fusable else [0, 1, length]
    kind = draw(st.sampled_from(["primes"] * 4 + ["equal", "few queries", "few keys"]))
    if kind == "equal":
        return length, length
    if kind == "few queries":
        return draw(st.sampled_from(small)), count
    if kind == "few keys":
        return count, draw(st.sampled_from(small))
    return length, count


def _options(draw, frame: Frame, dtype: torch.dtype, *, fusable: bool) -> dict[str, Any]:
    scale, sinks = draw(st.sampled_from([None, 0.3, -0.5, 0])), None
    if draw(st.integers(0, 2)) == 0:
        kind = draw(st.sampled_from([dtype, torch.float32]))
        shape = draw(st.sampled_from([(frame.heads,), (frame.batch, frame.heads, frame.length)]))
        sinks = _random(kind, frame.generator, *shape).requires_grad_(draw(st.booleans()))
    if fusable:
        return {"scale": scale, "softcap": None, "sinks": sinks, "return_lse": False}
    return {
        "scale": scale,
        "softcap": draw(st.sampled_from([None, None, 0.7, 20])),
        "sinks": sinks,
        "return_lse": draw(st.booleans()),
    }


def _hidden_keys(part: Part | None, frame: Frame) -> Tensor:
    """Keys that no query of their batch item sees, (B, S): what a padded batch stores there is anything."""
    if part is None:
        return torch.zeros(frame.batch, frame.count, dtype=torch.bool)
    hidden = [
        not any(part.rule(b, h, i, j) for h in range(frame.heads) for i in range(frame.length))
        for b in range(frame.batch)
        for j in range(frame.count)
    ]
    return torch.tensor(hidden, dtype=torch.bool).reshape(frame.batch, frame.count)


def _random(dtype: torch.dtype, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _laid_out(draw, tensor: Tensor, hidden: Tensor | None) -> Tensor:
    """The tensor as callers hand it over: any strides, and rubbish where `hidden` (B, S) says that nobody looks."""
    layout = draw(st.sampled_from(["contiguous", "transposed", "sliced", "batch expanded", "heads expanded"]))
    shape = tensor.shape
    if layout == "batch expanded":
        tensor, hidden = tensor[:1], None if hidden is None else hidden.all(0, keepdim=True)
    if layout == "heads expanded":
        tensor = tensor[:, :1]
    if hidden is not None:
        rubbish = draw(st.sampled_from([0.0, torch.nan, torch.inf, -torch.inf]))
        tensor = tensor.masked_fill(hidden[:, None, :, None], rubbish)
    if layout == "transposed":
        tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "sliced":
        wide = tensor.new_full((shape[0], shape[1], 2 * shape[2], shape[3] + 2), torch.nan)
        wide[:, :, ::2, 1:-1] = tensor
        tensor = wide[:, :, ::2, 1:-1]
    return tensor.expand(shape).requires_grad_()
