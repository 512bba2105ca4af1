"""The rule for single cells that is compiled into FlexAttention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_, or_

import torch
from torch import Tensor

#: Queries and keys in a block; PyTorch's own default.
SIDE = 128
#: The names of ranges of keys begin with these: one range, and two of which either shows a key.
PREFIXES = ("", "one_", "other_")
#: The lowest and the highest visible j − i. ``None`` hides nothing.
Limits = tuple[int | None, int | None]


def is_visible(rule: Mapping[str, Tensor], limits: Limits, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Whether the mask lets query i attend to key j: whether all of its terms allow it.

    Args:
        rule: the terms.
            ``ends``, int32 (3,), are the low, high and stop of a band.
            ``first`` and ``last``, int32 ((B,) L), are the first key and one past the last key of each query. Either
            the keys of ``one_first`` and ``one_last`` or those of ``other_first`` and ``other_last`` are visible.
            ``keys``, bool ((B,) S), are the visible keys.
            ``query_documents`` ((B,) L) and ``key_documents`` ((B,) S) must be equal.
            ``slopes``, float32 (H,), and ``shift`` hide nothing: they are those of `Terms`.
            ``visible`` and ``visible_steps`` are a `table` of cells.
        limits: constants of the compiled code.
        b, h, i, j: batch item, head, row and column; integers that broadcast.
    """
    low, high = limits
    conditions: list[Tensor] = []
    if low is not None:
        conditions.append(j >= i + low)
    if high is not None:
        conditions.append(j <= i + high)
    if "ends" in rule:
        ends = rule["ends"]
        conditions += [j >= i + ends[0], j <= i + ends[1], j < ends[2]]
    of_all, *of_either = PREFIXES
    conditions += _in_range(rule, of_all, b, i, j)
    either = [reduce(and_, of_range) for prefix in of_either if (of_range := _in_range(rule, prefix, b, i, j))]
    if either:
        conditions.append(reduce(or_, either))
    if "keys" in rule:
        conditions.append(_pick_one(rule["keys"], b, j))
    if "query_documents" in rule:
        conditions.append(_pick_one(rule["query_documents"], b, i) == _pick_one(rule["key_documents"], b, j))
    if "visible" in rule:
        conditions.append(pick(rule["visible"], rule["visible_steps"], b, h, i, j))
    return reduce(and_, conditions) if conditions else j >= 0


def pick(flat: Tensor, steps: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A number of a `table`."""
    return flat[b * steps[0] + h * steps[1] + i * steps[2] + j * steps[3]]


def _in_range(rule: Mapping[str, Tensor], prefix: str, b: Tensor, i: Tensor, j: Tensor) -> list[Tensor]:
    """The conditions under which a key lies in a range of keys of each query."""
    conditions: list[Tensor] = []
    if prefix + "first" in rule:
        conditions.append(j >= _pick_one(rule[prefix + "first"], b, i))
    if prefix + "last" in rule:
        conditions.append(j < _pick_one(rule[prefix + "last"], b, i))
    return conditions


def _pick_one(numbers: Tensor, b: Tensor, place: Tensor) -> Tensor:
    return numbers[place] if numbers.dim() == 1 else numbers[b, place]


def table(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor that broadcasts to four dimensions, as its numbers (n,) and the distances between neighbours in each.

    These are int64 (4,), 0 along dimensions that broadcast.
    """
    tensor = tensor.contiguous()
    steps = [0 if size == 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.flatten(), numbers_on(tensor.device, steps, torch.long)


def numbers_on(device: torch.device, numbers: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers as (n,). They are written on the device, because a copy to it would wait."""
    return torch.cat([torch.full((1,), number, dtype=dtype, device=device) for number in numbers])
