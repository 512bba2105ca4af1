"""A record made from weights that a model returned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from torch import Tensor

from .._call.call import Call, build_call
from .._checks import FLOATS, items, shown, strided, text, with_values
from .._checks import index as index_of
from .._statistics.arguments import make_options
from .._statistics.compute import compute_statistics
from .._statistics.definitions import OF_WEIGHTS
from .._statistics.patch_layout import PatchLayout
from .._statistics.recorded import Recorded
from .._statistics.result import AttentionStatistics
from ..errors import ArgumentError, DTypeError, ShapeError, UnknownNameError, shape_text
from ..masks._tensors import bias


def given(weights: Sequence[Tensor], names: Sequence[str] | None = None) -> Given:
    """Make a record of weights that a model returned, for all pictures.

    ``outputs.attentions`` of a transformers model is such a list. A weight of exactly 0 counts as a hidden key.

    Args:
        weights: one (B, H, L, S) or (H, L, S) tensor per layer; every row sums to 1, or is 0 throughout.
        names: one per layer. Default ``"0"``, ``"1"``, …

    Raises:
        ArgumentError: if there is no layer, or a row sums to something else.
        ShapeError: for other shapes.

    Example:
        >>> import torch
        >>> rec = given([torch.eye(3).expand(2, 3, 3)])
        >>> rec["0"][0].confidence.mean()
        tensor(1.)
    """
    weights = items("weights", weights, "one tensor per layer")
    if not weights:
        raise ArgumentError("weights", expected="one tensor per layer", got="none")
    names = None if names is None else [text("names", name) for name in items("names", names, "a list of strings")]
    if names is not None and (len(names) != len(weights) or len(set(names)) < len(names)):
        expected = f"{len(weights)} different names, one per layer of weights"
        raise ArgumentError("names", expected=expected, got=shown(names))
    calls: dict[str, Call] = {}
    for index, layer in enumerate(weights):
        with_values(f"weights[{index}]", strided(f"weights[{index}]", layer))
        if layer.dtype not in FLOATS:
            raise DTypeError(f"weights[{index}]", expected="a float tensor", got=str(layer.dtype))
        if layer.dim() not in (3, 4) or layer.numel() == 0:
            raise ShapeError(f"weights[{index}]", expected="(B, H, L, S) or (H, L, S)", got=shape_text(layer.shape))
        name = str(index) if names is None else names[index]
        calls[name] = _as_call(layer.detach(), f"weights[{index}]")
    return Given(calls)


@final
class Given(Recorded):
    """Statistics of weights that were given; see `given`."""

    from ._comparison import compare
    from ._html import page
    from ._image_plots import plot_image
    from ._record_plots import plot_heads, plot_map, plot_received
    from ._rollout_plot import plot_rollout

    def __init__(self, calls: dict[str, Call]) -> None:
        self._calls = calls
        options = make_options(8, 128, "mass", 1, (-1,))
        self._statistics = {name: [compute_statistics(call, OF_WEIGHTS, options, None)] for name, call in calls.items()}

    def __getitem__(self, name: str, /) -> Sequence[AttentionStatistics]:
        if not isinstance(name, str) or name not in self._statistics:
            known = ", ".join(map(repr, self._statistics))
            raise UnknownNameError("name", expected=f"one of {known}", got=shown(name))
        return self._statistics[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def name_of(self, layer: int | str) -> str:
        """The name of a layer: its number, or its name.

        Raises:
            ArgumentError: for a layer that was not given.
        """
        names = list(self._calls)
        if isinstance(layer, str) and layer in names:
            return layer
        if isinstance(layer, str):
            raise ArgumentError("layer", expected=f"0 … {len(names) - 1}", got=shown(layer))
        return names[index_of("layer", layer, len(names))]

    def kept_call(self, layer: int | str, call: int = 0) -> Call:
        """The call whose weights were given. Every layer has one."""
        index_of("call", call, 1)
        return self._calls[self.name_of(layer)]

    def patches(self, layer: int | str) -> PatchLayout:
        """Refused, because weights have no places of patches."""
        raise ArgumentError(
            "image",
            expected="a record of a vision model",
            got="weights that were given",
            fix="Record the model with clearhead.record, whose configuration places the patches.",
        )


def _as_call(weights: Tensor, what: str) -> Call:
    """Attention whose scores are ln p: zero queries and keys, and p in the bias."""
    weights = (weights if weights.dim() == 4 else weights[None]).float()
    sums = weights.sum(-1)
    close = ((sums - 1).abs() < 1e-2) | (sums == 0)
    if not bool(close.all()) or bool((weights < 0).any()):
        raise ArgumentError(
            what,
            expected="weights ≥ 0 whose rows sum to 1",
            got=f"a row that sums to {sums[~close][0].item():.3f}" if not bool(close.all()) else "negative ones",
            fix="With attention sinks or dropout use clearhead.record on the model instead.",
        )
    batch, heads, length, keys = weights.shape
    query, key = weights.new_zeros(batch, heads, length, 1), weights.new_zeros(batch, heads, keys, 1)
    return build_call(Call(query, key, key, bias(weights.log()), scale=1.0))
