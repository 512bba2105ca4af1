"""Options of `attention`, each with the tensors it is differentiated in besides query, key and value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.positions import ALiBi, RelativeBias

__all__ = ["MASKS", "OPTIONS", "B", "D", "Dv", "H", "L", "S", "attend"]

B, H, L, S, D, Dv = 2, 3, 5, 7, 11, 13

#: A batch item without keys and, in the other, queries that see none.
BLIND = masks.keep(keys=torch.tensor([[0, 1, 1, 0, 1, 1, 1], [0] * S])) & masks.causal()
FIXED = masks.bias(torch.linspace(-1, 1, L * S, dtype=torch.float64).view(L, S))
DOCUMENTS = masks.documents(torch.tensor([0, 0, 1, 1, 2, 2, 2]))

#: Masks without parameters.
MASKS: dict[str, masks.Mask | Tensor | None] = {
    "no mask": None,
    "bool tensor": torch.arange(L * S).view(L, S) % 3 > 0,
    "causal": masks.causal(),
    "keep per head": masks.keep(torch.arange(H * L * S).view(1, H, L, S) % 5 > 1),
    "length of 0": masks.lengths(torch.tensor([4, 0])),
    "where": masks.mask_mod(lambda b, h, q, k: (q + k + h) % 2 == 0),
    "fixed bias": FIXED,
    "ALiBi": ALiBi(H),
    "combined": FIXED & masks.causal("bottom_right") & masks.lengths(torch.tensor([6, 3])) & ALiBi(H),
    "fully masked rows": BLIND,
}


@dataclass(frozen=True)
class Option:
    """Arguments of `attention` made from further tensors of these shapes."""

    arguments: Callable[..., dict[str, Any]]
    shapes: tuple[tuple[int, ...], ...] = ()


def _biased(*shape: int) -> Option:
    return Option(lambda bias: {"mask": masks.bias(bias)}, (shape,))


def _relative(weight: Tensor) -> dict[str, Any]:
    return {"mask": RelativeBias(H, 4, 5).with_bias_tensors(iter([weight]))}


def _everything(bias: Tensor, sinks: Tensor) -> dict[str, Any]:
    mask = masks.bias(bias) & BLIND
    return {"mask": mask, "sinks": sinks, "softcap": 1.5, "scale": 0.7, "dropout_p": 0.3, "return_lse": True}


OPTIONS: dict[str, Option] = {
    **{name: Option(lambda mask=mask: {"mask": mask}) for name, mask in MASKS.items()},
    "bias (L, S)": _biased(L, S),
    "bias (1, H, L, S)": _biased(1, H, L, S),
    "bias (B, H, L, S)": _biased(B, H, L, S),
    "bias (B, 1, 1, S)": _biased(B, 1, 1, S),
    "two biases": Option(lambda one, two: {"mask": masks.bias(one) & masks.bias(two)}, ((L, S), (1, H, 1, S))),
    "relative bias": Option(_relative, ((4, H),)),
    "positions": Option(
        lambda: {
            "mask": DOCUMENTS & masks.causal(),
            "query_positions": torch.tensor([2, 0, 6, 4, 3]),
            "key_positions": 0,
        }
    ),
    "scale": Option(lambda: {"scale": -0.4}),
    "soft-cap": Option(lambda: {"softcap": 1.3, "mask": masks.causal()}),
    "sinks": Option(lambda sinks: {"sinks": sinks}, ((H,),)),
    "sinks, fully masked rows": Option(lambda sinks: {"sinks": sinks, "mask": BLIND, "return_lse": True}, ((H,),)),
    "dropout": Option(lambda: {"dropout_p": 0.4}),
    "lse": Option(lambda: {"return_lse": True}),
    "lse, fully masked rows": Option(lambda: {"return_lse": True, "mask": BLIND}),
    "everything": Option(_everything, ((L, S), (H,))),
}


def attend(name: str, query: Tensor, key: Tensor, value: Tensor, *rest: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` with an option, dropping the same entries in every call."""
    torch.manual_seed(3)
    return clearhead.attention(query, key, value, **OPTIONS[name].arguments(*rest))
