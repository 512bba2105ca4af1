"""The request: how a call attends. Public functions and layers make it; kernels read it from the call."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._checks import flag
from ..masks._base import Mask
from ..masks._grid import Offset
from .sequences import PackedSequences


def weights_wanted(need_weights: bool, average_attn_weights: bool) -> str | None:
    """`Request.weights` from the two arguments of a module's call, which are checked."""
    need_weights = flag("need_weights", need_weights)
    average_attn_weights = flag("average_attn_weights", average_attn_weights)
    return ("average" if average_attn_weights else "heads") if need_weights else None


# A tuple and no dataclass: it is made in every call, and made in a quarter of the time.
class Request(NamedTuple):
    """How to attend: every argument of a call but query, key and value.

    Args:
        mask: which keys each query may attend to. It stays a description, and kernels lower it.
        scale, softcap, sinks, dropout_p, query_positions, key_positions: as for `attention`. In an `AttentionCall`
            tensors of sinks and positions have the dtype that kernels read.
        lse: whether the log-sum-exp is returned.
        weights: which weights are returned: ``"heads"`` for (B, H, L, S), ``"average"`` for their average over the
            heads (B, L, S), ``None`` for none. ``"mixed"`` and ``"mixed once"`` are (B, H, L, S) in the query's dtype,
            and the graph of the output contains them (`_layer/mixing.py`).
        sequences: packed sequences. Query, key and value are then (1, H, T, D), (1, Hkv, Tk, D) and
            (1, Hkv, Tk, Dv), and each sequence attends to itself.
        seed: int64 scalar that dropout is drawn from. Default: the kernel draws a seed.
        offset: where the call lies in a larger call, for dropout. Default: it is a call of its own.
    """

    mask: Mask | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout_p: float = 0.0
    query_positions: Tensor | int | None = None
    key_positions: Tensor | int | None = None
    lse: bool = False
    weights: str | None = None
    sequences: PackedSequences | None = None
    seed: Tensor | None = None
    offset: Offset | None = None
