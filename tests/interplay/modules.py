"""The public modules and stacks, each in a small model that makes the mask of its call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks, positions
from clearhead.transformer import Encoder, EncoderLayer, FeedForward
from tests.support.randomised import randomised

from .subject import Subject

B, L, E, H = 3, 7, 24, 6
#: Sizes at which padding is removed.
LONG, WIDE = 149, 96
_STATISTICS = ("entropy", "received", "max_logit")


class Own(nn.Module):
    """A model of one attention module, whose mask comes from lengths."""

    def __init__(self, attend: nn.Module, *, causal: bool = True, **given: Any) -> None:
        super().__init__()
        self.attend, self.causal, self.given = attend, causal, given

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        mask = masks.lengths(lengths)
        return self.attend(x, mask=masks.causal() & mask if self.causal else mask, **self.given)


class DropIn(nn.Module):
    """A model of one `nn.MultiheadAttention`."""

    def __init__(self, attend: nn.Module, **given: Any) -> None:
        super().__init__()
        self.attend, self.given = attend, given

    def forward(self, x: Tensor, hidden: Tensor) -> Any:
        output, weights = self.attend(x, x, x, key_padding_mask=hidden, **self.given)
        return (output, weights) if self.given.get("need_weights", True) else output


class Stack(nn.Module):
    """A model of PyTorch's encoder stack."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        # Outputs at padding mean nothing: PyTorch's stack zeroes them in some modes.
        return self.encoder(x, src_key_padding_mask=hidden) * ~hidden[..., None]


class Recorded(nn.Module):
    """A model that records its own attention, and returns what was recorded."""

    def __init__(self, model: nn.Module, keep: Any = "statistics") -> None:
        super().__init__()
        self.model, self.keep = model, keep

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        with clearhead.record(self.model, statistics=_STATISTICS, keep=self.keep) as record:
            output = self.model(x, lengths)
        found = [getattr(calls[0], name) for calls in record.values() for name in _STATISTICS]
        weights = [record.weights(name) for name in record] if self.keep == "queries_keys" else []
        return output, *found, *weights


def _lengths(length: int) -> tuple[Tensor, Tensor]:
    return torch.tensor([length // 3, length, 1]), torch.full((B,), length)


def _subject(
    module: nn.Module, *, length: int = L, size: int = E, as_marks: bool = False, training: bool = True
) -> Subject:
    given, full = _lengths(length)
    if as_marks:
        given, full = (torch.arange(length) >= lengths[:, None] for lengths in (given, full))
    return Subject(randomised(module, size**-0.5).train(training), (torch.randn(B, length, size),), (given,), (full,))


def _own(size: int = E, length: int = L, *, causal: bool = True, parts: Any = None, **given: Any) -> Subject:
    made = {name: part() if callable(part) else part for name, part in (parts or {}).items()}
    attend = clearhead.MultiHeadAttention(size, H, **made)
    return _subject(Own(attend, causal=causal, **given), length=length, size=size)


def _latent(q_lora_rank: int | None = None, length: int = L, **given: Any) -> Subject:
    sizes: dict[str, Any] = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
    rotary = positions.Rotary(2)
    attend = clearhead.MultiHeadLatentAttention(E, H, q_lora_rank=q_lora_rank, position=rotary, **sizes)
    return _subject(Own(attend, **given), length=length)


def _drop_in(size: int = E, length: int = L, *, parts: Any = None, **given: Any) -> Subject:
    model = DropIn(nn.MultiheadAttention(size, H, batch_first=True, **(parts or {})), **given)
    assert clearhead.upgrade(model).changed
    return _subject(model, length=length, size=size, as_marks=True)


def _layer(index: int, size: int) -> EncoderLayer:
    attend = clearhead.MultiHeadAttention(size, H, num_kv_heads=2, position=positions.Rotary(size // H))
    return EncoderLayer(size, attend, FeedForward(size, 17), norm=nn.RMSNorm, norm_first=index == 0)


class OwnStack(Own):
    """A model of Clearhead's own encoder stack."""


def _own_stack(size: int = E, length: int = L) -> Subject:
    stack = OwnStack(Encoder([_layer(index, size) for index in range(2)]))
    return _subject(stack, length=length, size=size)


def _upgraded_stack(size: int = E, length: int = L, *, training: bool = True) -> Subject:
    layer = nn.TransformerEncoderLayer(size, H, 17, dropout=0.0, batch_first=True)
    model = Stack(nn.TransformerEncoder(layer, 2))
    assert clearhead.upgrade(model).changed
    return _subject(model, length=length, size=size, as_marks=True, training=training)


def _recorded(keep: str = "statistics", length: int = L) -> Subject:
    module = Recorded(OwnStack(Encoder([_layer(index, E) for index in range(2)])), keep)
    return _subject(module, length=length)


_GROUPED: dict[str, Any] = {
    "num_kv_heads": 2,
    "sinks": True,
    "q_norm": lambda: nn.RMSNorm(4),
    "k_norm": lambda: nn.RMSNorm(4),
    "position": lambda: positions.Rotary(4),
}
OWN: dict[str, Callable[[], Subject]] = {
    "causal and padded": _own,
    "padding removed": partial(_own, WIDE, LONG, causal=False),
    "grouped with sinks, norms and positions": partial(_own, parts=_GROUPED),
    "gated, with a scale that learns": partial(_own, parts={"gate": "head", "position": lambda: positions.LogScale(H)}),
    "positions of axes": partial(
        _own,
        parts={"position": lambda: positions.Rotary(4, axes=[1, 0])},
        positions=(torch.arange(2 * L) % 5).view(2, 1, L),
    ),
    "tempered": partial(_own, parts={"position": lambda: positions.Temperature(0.5, 2, rotary=positions.Rotary(4))}),
    "gated, padding removed": partial(_own, WIDE, LONG, causal=False, parts={"gate": "elementwise"}),
    "learned bias": partial(_own, parts={"mask": lambda: positions.RelativeBias(H, 4, 8)}),
    "with weights": partial(_own, need_weights=True, average_attn_weights=False),
    "dropout": partial(_own, parts={"dropout": 0.3}),
}
LATENT: dict[str, Callable[[], Subject]] = {
    "causal and padded": _latent,
    "queries of a latent": partial(_latent, 5),
    "with weights": partial(_latent, need_weights=True),
    "padding removed": partial(_latent, length=LONG * 2, causal=False),
}
DROP_IN: dict[str, Callable[[], Subject]] = {
    "padded, with weights": _drop_in,
    "padding removed": partial(_drop_in, WIDE, LONG, need_weights=False),
    "causal, with learned keys": partial(_drop_in, parts={"add_bias_kv": True, "add_zero_attn": True}, is_causal=True),
    "dropout": partial(_drop_in, parts={"dropout": 0.3}, need_weights=False),
}
STACK: dict[str, Callable[[], Subject]] = {
    "causal and padded": _own_stack,
    "padding removed": partial(_own_stack, WIDE, LONG),
}
UPGRADED_STACK: dict[str, Callable[[], Subject]] = {
    "padded": _upgraded_stack,
    "padding removed": partial(_upgraded_stack, WIDE, LONG),
    "in eval": partial(_upgraded_stack, training=False),
}
RECORD: dict[str, Callable[[], Subject]] = {
    "statistics": _recorded,
    "weights": partial(_recorded, "queries_keys"),
}
