"""How the tensors that the native kernel writes are laid out, and how its plans take strides."""

from __future__ import annotations

from .._call.spec import has_contiguous_rows

Strides = tuple[int, ...]


def contiguous_strides(shape: tuple[int, ...]) -> Strides:
    """Those of a new tensor, also where a size is 0."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides))


def strides_of_gradient(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Those of the input where its elements fill its memory and its rows are whole, else contiguous ones."""
    if not has_contiguous_rows(shape, strides) or 0 in shape:
        return contiguous_strides(shape)
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != step:
            return contiguous_strides(shape)
        step *= size
    return strides


def strides_of_output(shape: tuple[int, ...], query: Strides) -> Strides:
    """With heads beside each other where the query's are: merging them is then free."""
    batch, heads, rows, dim = shape
    if query[1] < query[2]:
        return (heads * rows * dim, dim, heads * dim, 1)
    return contiguous_strides((batch, heads, rows, dim))


def strides_of_bias_gradient(shape: tuple[int, ...]) -> Strides:
    """Strides of items, heads and rows. A bias of one item gets the sum over the batch: its stride is 0."""
    items, *matrix = contiguous_strides(shape)[:3]
    return 0 if shape[0] == 1 else items, *matrix


def broadcast_strides(shape: tuple[int, ...], strides: Strides) -> Strides:
    """Strides, zero where a size of 1 broadcasts."""
    return tuple(0 if size == 1 else stride for size, stride in zip(shape, strides, strict=True))
