"""Generated masks, each one twice: as Clearhead's own, and as a rule in plain numbers for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import torch
from hypothesis import strategies as st
from torch import Tensor

from clearhead import masks

from .oracle import Rule

Draw = Callable[..., object]


@dataclass(frozen=True)
class Frame:
    """Sizes of a call and where its queries and keys stand, as lists of numbers for each batch item."""

    batch: int
    heads: int
    length: int
    count: int
    query_positions: list[list[int]]
    key_positions: list[list[int]]
    positioned: bool
    generator: torch.Generator

    def random(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)


def draw_frame(
    draw: Draw, batch: int, heads: int, length: int, count: int, generator: torch.Generator
) -> tuple[Frame, dict[str, Tensor]]:
    """A frame, and its absolute positions as arguments: for queries, keys, both or (mostly) neither."""
    inputs = draw(
        st.sampled_from([()] * 4 + [("query_positions",), ("key_positions",), ("query_positions", "key_positions")])
    )
    positions = {}
    for name in inputs:
        size = length if name == "query_positions" else count
        rows = draw(st.sampled_from([None, 1, batch]))
        numbers = draw(st.sampled_from([[*range(20)], [*range(5)] * 4]))  # all different, or some several times
        places = [draw(st.permutations(numbers))[:size] for _ in range(rows or 1)]
        positions[name] = torch.tensor(places, dtype=torch.int64).reshape(rows or 1, size)
        if rows is None:
            positions[name] = positions[name][0]
    query_positions = _places(positions.get("query_positions"), batch, length)
    key_positions = _places(positions.get("key_positions"), batch, count)
    frame = Frame(batch, heads, length, count, query_positions, key_positions, bool(positions), generator)
    return frame, positions


def _places(positions: Tensor | None, batch: int, size: int) -> list[list[int]]:
    if positions is None:
        return [list(range(size))] * batch
    return positions.expand(batch, size).tolist()


@dataclass(frozen=True)
class Part:
    mask: masks.Mask | Tensor
    rule: Rule
    biases: tuple[Tensor, ...] = ()


def draw_mask(draw: Draw, frame: Frame, dtype: torch.dtype, *, learnt_bias: bool) -> Part | None:
    """No mask, a bool tensor, or up to three masks of any kind that all have to allow a key."""
    how = draw(st.sampled_from(["none", "bool tensor", *["masks"] * 6]))
    if how == "none":
        return None
    if how == "bool tensor":
        marks = _mark_shapes(draw, frame)
        return Part(marks > 0.3, marks_rule(marks > 0.3, frame.batch, frame.heads))
    kinds = draw(st.lists(st.sampled_from([*PREDICATES, "bias", "not", "or"]), min_size=1, max_size=3))
    several = kinds.count("bias") > 1
    return reduce(_both, [_part(draw, frame, kind, dtype, learnt_bias=learnt_bias, several=several) for kind in kinds])


def combined_masks(frame: Frame) -> st.SearchStrategy[Part]:
    """One mask, or up to four combined with `&`, `|` and `~`; biases, which have no `|` and no `~`, only with `&`."""

    @st.composite
    def one(draw: Draw) -> Part:
        kind = draw(st.sampled_from([*PREDICATES, "bias", "everything"]))
        if kind == "everything":
            return Part(masks.sliding_window(99, 99), lambda *cell: True)
        return _part(draw, frame, kind, torch.float32, learnt_bias=False, several=True)

    def more(parts: st.SearchStrategy[Part]) -> st.SearchStrategy[Part]:
        return st.one_of(st.builds(_both, parts, parts), st.builds(_either, parts, parts), parts.map(_opposite))

    return st.recursive(one(), more, max_leaves=4)


def _part(draw: Draw, frame: Frame, kind: str, dtype: torch.dtype, *, learnt_bias: bool, several: bool) -> Part:
    if kind == "bias":
        return _bias(draw, frame, dtype, learnt=learnt_bias, several=several)
    if kind == "not":
        return _opposite(PREDICATES[draw(st.sampled_from(list(PREDICATES)))](draw, frame))
    if kind == "or":
        return _either(*(PREDICATES[draw(st.sampled_from(list(PREDICATES)))](draw, frame) for _ in range(2)))
    return PREDICATES[kind](draw, frame)


def _both(left: Part, right: Part) -> Part:
    return Part(
        left.mask & right.mask, lambda *cell: left.rule(*cell) and right.rule(*cell), left.biases + right.biases
    )


def _either(left: Part, right: Part) -> Part:
    if left.biases or right.biases:
        return _both(left, right)
    return Part(left.mask | right.mask, lambda *cell: left.rule(*cell) or right.rule(*cell))


def _opposite(part: Part) -> Part:
    return part if part.biases else Part(~part.mask, lambda *cell: not part.rule(*cell))


def _causal(draw: Draw, frame: Frame) -> Part:
    align = draw(st.sampled_from(["top_left", "bottom_right"]))
    shift = 0 if align == "top_left" or frame.positioned else frame.count - frame.length
    queries, keys = frame.query_positions, frame.key_positions
    return Part(masks.causal(align), lambda b, h, i, j: keys[b][j] <= queries[b][i] + shift)


def _window(draw: Draw, frame: Frame) -> Part:
    left, right = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    queries, keys = frame.query_positions, frame.key_positions
    return Part(masks.sliding_window(left, right), lambda b, h, i, j: -left <= keys[b][j] - queries[b][i] <= right)


def _prefix(draw: Draw, frame: Frame) -> Part:
    keys = frame.key_positions
    if draw(st.booleans()):
        n = draw(st.integers(0, frame.count + 2))
        return Part(masks.prefix(n), lambda b, h, i, j: keys[b][j] < n)
    counts = (frame.random(frame.batch) * (frame.count + 2)).long()
    return Part(masks.prefix(counts), lambda b, h, i, j: keys[b][j] < int(counts[b]))


def _block_causal(draw: Draw, frame: Frame) -> Part:
    size = draw(st.integers(1, 5))
    queries, keys = frame.query_positions, frame.key_positions
    return Part(masks.block_causal(size), lambda b, h, i, j: keys[b][j] // size <= queries[b][i] // size)


def _tree(draw: Draw, frame: Frame) -> Part:
    count = draw(st.integers(0, frame.count))
    items = draw(st.sampled_from([1, frame.batch]))
    parents = (frame.random(items, count) * torch.arange(1, count + 1)).long() - 1
    first_row, first_key = frame.length - count, frame.count - count

    def rule(b: int, h: int, i: int, j: int) -> bool:
        node, key = i - first_row, j - first_key
        while node > max(key, -1):
            node = int(parents[b if items > 1 else 0, node])
        return key < 0 or node == key

    return Part(masks.tree(parents if items > 1 else parents[0]), rule)


def _lengths(draw: Draw, frame: Frame) -> Part:
    shape = draw(st.sampled_from([(1,), (frame.batch,), (frame.batch, frame.length)]))
    visible = (frame.random(*shape) * (frame.count + 1)).long()
    of_queries = None
    if draw(st.booleans()):
        of_queries = (frame.random(draw(st.sampled_from([1, frame.batch]))) * (frame.length + 1)).long()
    queries, keys = frame.query_positions, frame.key_positions

    def rule(b: int, h: int, i: int, j: int) -> bool:
        row = visible[b if shape[0] > 1 else 0]
        is_real = of_queries is None or queries[b][i] < int(of_queries[b if len(of_queries) > 1 else 0])
        return is_real and keys[b][j] < int(row[i] if row.dim() else row)

    return Part(masks.lengths(visible, of_queries), rule)


def _documents(draw: Draw, frame: Frame) -> Part:
    if not frame.positioned and frame.length != frame.count:
        return _causal(draw, frame)
    queries, keys = frame.query_positions, frame.key_positions
    total = frame.count
    if frame.positioned:
        total = 1 + max((place for row in [*queries, *keys] for place in row), default=0)
    shape = draw(st.sampled_from([(total,), (frame.batch, total)]))
    ids = (frame.random(*shape) * 3).long()
    table = ids.expand(frame.batch, total).tolist()
    return Part(masks.documents(ids), lambda b, h, i, j: table[b][queries[b][i]] == table[b][keys[b][j]])


def _selected(draw: Draw, frame: Frame) -> Part:
    block = draw(st.sampled_from([1, 1, 2, 3]))
    count = -(-frame.count // block)
    listed = draw(st.integers(0, 4))
    heads = draw(st.sampled_from([None, 1, frame.heads]))
    outer = (draw(st.sampled_from([1, frame.batch])), *(() if heads is None else (heads,)))
    numbers = (frame.random(*outer, frame.length, listed) * (count + 1)).long() - 1  # −1 is none; some come twice
    indices = numbers.to(draw(st.sampled_from([torch.int32, torch.int64])))
    lists = (numbers[:, None] if heads is None else numbers).expand(frame.batch, heads or 1, -1, -1).tolist()
    of_head = lambda h: h if heads == frame.heads else 0  # noqa: E731
    return Part(masks.selected(indices, block=block), lambda b, h, i, j: j // block in lists[b][of_head(h)][i])


def _where(draw: Draw, frame: Frame) -> Part:
    fn = draw(st.sampled_from([_stripes, _late_keys, _early_queries, _odd_heads]))
    queries, keys = frame.query_positions, frame.key_positions
    return Part(masks.mask_mod(fn), lambda b, h, i, j: bool(fn(b, h, queries[b][i], keys[b][j])))


def _stripes(b, h, q, k):
    return (q + k + b + h) % 3 != 0


def _late_keys(b, h, q, k):
    return k > 1


def _early_queries(b, h, q, k):
    return q < 4


def _odd_heads(b, h, q, k):
    return h % 2 == 1


def _marks(draw: Draw, frame: Frame, *, make: Callable[..., masks.Mask], opposite: bool) -> Part:
    per_key = draw(st.booleans())
    if per_key:
        scores = frame.random(draw(st.sampled_from([1, frame.batch])), frame.count)
    else:
        scores = _mark_shapes(draw, frame)
    visible = scores > draw(st.sampled_from([0.1, 0.5, 0.9]))
    inputs = (~visible if opposite else visible).to(
        draw(st.sampled_from([torch.bool, torch.int64, torch.uint8, torch.float32]))
    )
    if not per_key:
        return Part(make(inputs), marks_rule(visible, frame.batch, frame.heads))
    return Part(make(keys=inputs), marks_rule(visible[:, None, None], frame.batch, frame.heads))


def _mark_shapes(draw: Draw, frame: Frame) -> Tensor:
    """Random numbers in one of the shapes in which keep, drop and bias take tensors."""
    batch, heads, length, count = frame.batch, frame.heads, frame.length, frame.count
    shapes = [
        (length, count),
        (1, count),
        (batch, length, count),
        (batch * heads, length, count),
        (1, 1, length, count),
        (batch, 1, 1, count),
        (1, heads, length, 1),
        (batch, heads, length, count),
    ]
    return frame.random(*draw(st.sampled_from(shapes)))


def marks_rule(visible: Tensor, batch: int, heads: int) -> Rule:
    """The rule of a mask tensor in any of the shapes of the docs."""

    def rule(b: int, h: int, i: int, j: int) -> bool:
        outer = {2: (), 3: (b,) if len(visible) in (1, batch) else (b * heads + h,), 4: (b, h)}[visible.dim()]
        cell = (0 if size == 1 else n for size, n in zip(visible.shape, (*outer, i, j), strict=True))
        return bool(visible[tuple(cell)])

    return rule


def _bias(draw: Draw, frame: Frame, dtype: torch.dtype, *, learnt: bool, several: bool) -> Part:
    numbers = _mark_shapes(draw, frame)
    # The sum of two biases belongs to test_biases_add_in_the_compute_dtype.
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    kind = computed if several else draw(st.sampled_from([dtype, torch.float32]))
    added = (numbers * 4 - 2).to(kind)
    if draw(st.booleans()):
        added = added.masked_fill(numbers < draw(st.sampled_from([0.1, 0.6])), -torch.inf)
    layout = draw(st.sampled_from(["contiguous", "transposed", "expanded"]))
    if layout == "transposed":
        added = added.mT.contiguous().mT
    elif layout == "expanded":
        added = added[..., :1, :].expand(added.shape)
    if learnt and draw(st.booleans()):
        added.requires_grad_()
    return Part(masks.bias(added), marks_rule(added.detach() > -torch.inf, frame.batch, frame.heads), (added,))


PREDICATES: dict[str, Callable[[Draw, Frame], Part]] = {
    "selected": _selected,
    "causal": _causal,
    "window": _window,
    "prefix": _prefix,
    "block_causal": _block_causal,
    "tree": _tree,
    "lengths": _lengths,
    "documents": _documents,
    "where": _where,
    "keep": partial(_marks, make=masks.keep, opposite=False),
    "drop": partial(_marks, make=masks.drop, opposite=True),
}
