"""One mask in call after call: at other sizes and positions, for other heads, and for parts of a larger attention.

Each call gives what it gives with a mask of its own, which is compared with the formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead.errors import ClearheadError, KernelError
from clearhead.masks import Mask
from clearhead.positions import ALiBi, RelativeBias
from tests.plans import test_prepared_masks as prepared_masks
from tests.support.budgets import in_turn
from tests.support.closeness import require_near
from tests.support.exact import exact_attention
from tests.support.forgetting import forget
from tests.support.randomised import randomised
from tests.support.requests import Grid, Offset, bind, part_of, requested, shared

B, H, KV, L, S, D = 2, 6, 3, 11, 13, 5
KERNELS = (None, "native", "sdpa", "chunked", "reference")
REFUSED = prepared_masks.REFUSED


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def marks(*shape: int, seed: int = 0) -> Tensor:
    return numbers(*shape, seed=seed) > -0.4


def relative_bias() -> RelativeBias:
    bias = RelativeBias(H, 8, 7, dtype=torch.float64).requires_grad_(False)
    bias.weight.copy_(numbers(8, H))
    return bias


#: Masks of (B, H, L, S) that are different in every item, head, row and column where they can be.
MASKS: dict[str, Callable[[], Mask]] = {
    "causal": masks.causal,
    "window": lambda: masks.sliding_window(4, 1),
    "prefix": lambda: masks.causal() | masks.prefix(torch.tensor([5, 2])),
    "lengths": lambda: masks.lengths(torch.tensor([7, 11])),
    "lengths per query": lambda: masks.lengths((numbers(B, L, seed=1).abs() * 5).long()),
    "query lengths": lambda: masks.lengths(torch.tensor([12, 9]), torch.tensor([10, 5])),
    "documents": lambda: masks.documents(torch.tensor([[0] * 5 + [1] * 6 + [2] * 5, [0] * 7 + [4] * 2 + [1] * 7])),
    "scattered documents": lambda: masks.documents(torch.arange(16) % 3),
    "keys": lambda: masks.keep(keys=marks(B, S)),
    "hidden keys": lambda: masks.drop(keys=marks(1, S)) | masks.prefix(2),
    "rows and columns": lambda: masks.keep(marks(L, S)),
    "per item": lambda: masks.drop(marks(B, L, S)),
    "per head": lambda: masks.keep(marks(1, H, 1, S)),
    "per item and head": lambda: masks.keep(marks(B * H, L, S)),
    "rows alone": lambda: masks.keep(marks(B, 1, L, 1)),
    "bias": lambda: masks.bias(numbers(L, S)),
    "bias per head": lambda: masks.bias(numbers(1, H, L, S).masked_fill(~marks(L, S), -torch.inf)),
    "padding as a bias": lambda: masks.bias(numbers(B, 1, 1, S).masked_fill(~marks(B, 1, 1, S), -torch.inf)),
    "ALiBi": lambda: ALiBi(H) & masks.sliding_window(5, 3),
    "relative bias": lambda: relative_bias() & masks.causal(),
    "computed": lambda: masks.mask_mod(lambda b, h, q, k: (q * 2 + k + h + b) % 3 > 0),
    "not": lambda: ~(masks.sliding_window(1, 0) & masks.keep(marks(1, H, L, S))),
    "several": lambda: masks.causal() & masks.keep(keys=marks(B, S)) & masks.bias(numbers(1, H, 1, S)),
}
#: Positions of the first query and key, or of all of them.
POSITIONS: dict[str, tuple[Any, Any]] = {
    "at two": (2, None),
    "both shifted": (4, 3),
    "keys shifted": (None, 3),
    "as tensors": (torch.arange(L) + 1, torch.arange(S) + 2),
    "in any order": (torch.arange(L).flip(0)[None].repeat(B, 1) + torch.tensor([[3], [1]]), torch.arange(S) * 5 % 13),
}
#: Heads, rows and columns of calls in a larger attention, one after the other; the last is the first again.
PARTS: tuple[tuple[range, range, range | Tensor], ...] = (
    (range(H), range(L), range(S)),
    (range(2, 6), range(3, 10), range(S)),
    (range(4), range(7), range(S)),
    (range(2, 4), range(4, 11), range(2, 9)),
    (range(2, 4), range(3, 10), range(1, 8)),
    (range(4, 6), range(5, 6), range(5, 13)),
    (range(2, 6), range(1, 11), range(1, 13, 3)),
    (range(2, 6), range(1, 11), range(2, 13, 3)),
    (range(2), range(2, 9), torch.tensor([0, 3, 4, 9])),
    (range(2, 6), range(3, 10), range(S)),
)
WRAPPED: dict[str, Callable[[Mask, dict[str, Any]], Mask | None]] = {
    "as it is": lambda mask, positions: mask,
    "prepared": lambda mask, positions: mask.prepare(L, S, batch_size=B, num_heads=H, **positions),
    "shared": lambda mask, positions: shared(mask),
}


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    return numbers(B, H, L, D, seed=5), numbers(B, KV, S, D, seed=6), numbers(B, KV, S, D, seed=7)


def split(shown: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is visible, and the bias."""
    return (shown, None) if shown.dtype == torch.bool else (None, shown.double())


@in_turn({"name": MASKS, "wrapped": WRAPPED}, {"positions": POSITIONS, "kernel": KERNELS})
def test_parts_of_a_larger_attention(name: str, wrapped: str, positions: str, kernel: str | None) -> None:
    at: dict[str, Any] = dict(zip(("query_positions", "key_positions"), POSITIONS[positions], strict=True))
    shown = MASKS[name]().dense(L, S, batch_size=B, num_heads=H, **at).expand(B, H, L, S)
    read: dict[str, Any] = {each: x[None] if isinstance(x, Tensor) and x.dim() == 1 else x for each, x in at.items()}
    full, whole = Grid(B, H, L, S, torch.device("cpu"), **read), WRAPPED[wrapped](MASKS[name](), at)
    query, key, value = drawn()
    group = H // KV
    for heads, rows, columns in PARTS:
        of_keys = slice(heads.start // group, heads.stop // group)
        chosen = torch.tensor(columns) if isinstance(columns, range) else columns
        operands = query[:, heads][:, :, rows], key[:, of_keys][:, :, chosen], value[:, of_keys][:, :, chosen]
        column = columns.start if isinstance(columns, range) else 0
        place = Offset(H, heads.start, rows.start, column)
        consecutive = isinstance(columns, range) and columns.step == 1
        mask = part_of(bind(whole, full), place, None if consecutive else columns)
        assert mask is not None
        with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
            try:
                found = requested(*operands, mask=mask, lse=kernel != "sdpa")
            except KernelError as error:
                pytest.skip(str(error))
        visible, bias = split(shown[:, heads][:, :, rows][..., chosen])
        expected = exact_attention(*operands, visible, bias=bias)
        require_near(found.output, expected.output)
        if found.lse is not None:
            torch.testing.assert_close(found.lse, expected.lse, rtol=0, atol=1e-10)


@in_turn({"name": MASKS, "wrapped": WRAPPED}, {"kernel": KERNELS})
def test_heads_of_a_module_that_is_split(name: str, wrapped: str, kernel: str | None) -> None:
    """Without a grid of the larger attention: all of its rows and columns, and the positions of each call."""
    query, key, value = drawn()
    places = [{"query_positions": of_queries, "key_positions": of_keys} for of_queries, of_keys in ((2, None), (4, 3))]
    wholes: list[Any] = [WRAPPED[wrapped](MASKS[name](), at) for at in places]  # one mask for all heads
    for heads, (at, whole) in itertools.product((range(2, 6), range(2), range(4, 6)), zip(places, wholes, strict=True)):
        shown = MASKS[name]().dense(L, S, batch_size=B, num_heads=H, **at).expand(B, H, L, S)
        kv = slice(heads.start // 2, heads.stop // 2)
        operands = query[:, heads], key[:, kv], value[:, kv]
        with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
            try:
                found = requested(*operands, mask=part_of(whole, Offset(H, heads.start)), **at).output
            except KernelError as error:
                pytest.skip(str(error))
        visible, bias = split(shown[:, heads])
        require_near(found, exact_attention(*operands, visible, bias=bias).output)


def test_gradients_of_biases_in_parts() -> None:
    """Each part adds its own: together they are those of the whole."""
    tables: dict[str, Callable[[], tuple[Mask, Tensor]]] = {
        "bias": lambda: (lambda x: (masks.bias(x), x))(numbers(1, H, L, S).requires_grad_()),
        "per key": lambda: (lambda x: (masks.bias(x) & masks.causal(), x))(numbers(B, 1, 1, S).requires_grad_()),
        "table": lambda: (lambda x: (x, x.weight))(randomised(RelativeBias(H, 8, 7, dtype=torch.float64))),
    }
    query, key, value = drawn()
    for make in tables.values():
        mask, leaf = make()
        output = clearhead.attention(query, key, value, mask)
        (expected,) = torch.autograd.grad(output.square().sum(), leaf)
        total = torch.zeros_like(leaf)
        full = Grid(B, H, L, S, torch.device("cpu"))
        for heads, rows in itertools.product((range(2), range(2, 6)), (range(4), range(4, L))):
            kv = slice(heads.start // 2, heads.stop // 2)
            part = part_of(bind(mask, full), Offset(H, heads.start, rows.start))
            found = requested(query[:, heads][:, :, rows], key[:, kv], value[:, kv], mask=part).output
            total += torch.autograd.grad(found.square().sum(), leaf)[0]
        require_near(total, expected)


# A mask that the layers of a stack share: each of its calls as with a mask of its own.


@in_turn(
    {"name": prepared_masks.MASKS, "field": [field for field in prepared_masks.FIELDS if field != "device"]},
    {"kernel": (None, "sdpa", "chunked")},
)
def test_a_shared_mask_in_calls_that_differ(name: str, field: str, kernel: str | None) -> None:
    base = {} if kernel is None else {"kernel": kernel}
    alternatives = [{**base, **item} for item in prepared_masks.FIELDS[field]]
    make = prepared_masks.MASKS[name]
    for first, second in itertools.pairwise(alternatives):
        forget()
        fixed = shared(make())
        assert fixed is not None
        alone = [prepared_masks.outcome(make(), setting) for setting in (first, second)]
        for number in (0, 1, 0):
            found = prepared_masks.outcome(fixed, (first, second)[number])
            assert (found is REFUSED) == (alone[number] is REFUSED), (first, second)[number]
            if found is not REFUSED:
                require_near(found, alone[number])


RULES: dict[str, Callable[[], Mask]] = {
    "window": lambda: masks.sliding_window(2, 0),
    "other window": lambda: masks.sliding_window(4, 1),
    "causal": masks.causal,
    "two": lambda: masks.sliding_window(4, 1) & masks.causal(),
    "other two": lambda: masks.sliding_window(4, 1) & masks.prefix(3),
    "marks": lambda: masks.keep(marks(L, S, seed=3)),
    "other marks": lambda: masks.keep(marks(L, S, seed=4)),
    "ALiBi": lambda: ALiBi(H),
}


@pytest.mark.parametrize("kernel", ["sdpa", "chunked", None])
@pytest.mark.parametrize("first", [True, False])
def test_a_shared_mask_with_the_rules_of_layers(first: bool, kernel: str | None) -> None:
    query, key, value = drawn()
    whole = masks.keep(keys=marks(B, S)) & masks.bias(numbers(B, 1, L, S))
    once = shared(whole)
    assert once is not None
    # PyTorch's kernel does not take a bias of each head.
    for name in [each for each in (*RULES, *reversed(RULES)) if kernel != "sdpa" or each != "ALiBi"]:
        mask, alone = (RULES[name]() & each if first else each & RULES[name]() for each in (once, whole))
        visible, bias = split(alone.dense(L, S, batch_size=B, num_heads=H))
        with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
            found = clearhead.attention(query, key, value, mask)
        require_near(found, exact_attention(query, key, value, visible, bias=bias).output)


# Texts that come piece by piece: a mask means the same at absolute positions, whatever part of a text a call has.

CUTS = ((0, 4, 5, 11), (0, 7, 11), (0, 1, 2, 9, 11))
PIECEWISE = [name for name in MASKS if name in {
    "causal", "window", "prefix", "lengths", "query lengths", "documents", "scattered documents", "ALiBi",
    "relative bias", "computed",
}]  # fmt: skip


@in_turn({"name": PIECEWISE, "cuts": CUTS}, {"kernel": KERNELS})
def test_a_text_in_pieces(name: str, cuts: tuple[int, ...], kernel: str | None) -> None:
    query, key, value = drawn()
    key, value = key[:, :, :L], value[:, :, :L]
    mask = MASKS[name]()
    at = {"query_positions": 0, "key_positions": 0}
    visible, bias = split(MASKS[name]().dense(L, L, batch_size=B, num_heads=H, **at))
    expected = exact_attention(query, key, value, visible, bias=bias)
    for start, stop in itertools.pairwise(cuts):
        pieces: list[tuple[Tensor, Tensor]] = []
        for first, last in itertools.pairwise(cuts):
            parts = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
            with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
                try:
                    places: dict[str, Any] = {"query_positions": start, "key_positions": first}
                    if kernel == "sdpa":
                        require_near(
                            clearhead.attention(*parts, mask, **places), _piece(parts, visible, bias, start, first)
                        )
                        continue
                    pieces.append(clearhead.attention(*parts, mask, **places, return_lse=True))
                except KernelError as error:
                    pytest.skip(str(error))
        if pieces:
            require_near(joined(pieces), expected.output[:, :, start:stop])


def _piece(
    parts: tuple[Tensor, Tensor, Tensor], visible: Tensor | None, bias: Tensor | None, row: int, column: int
) -> Tensor:
    rows, columns = slice(row, row + parts[0].shape[2]), slice(column, column + parts[1].shape[2])
    seen, added = (None if x is None else x.expand(B, H, L, L)[:, :, rows, columns] for x in (visible, bias))
    return exact_attention(*parts, seen, bias=added).output


def joined(pieces: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The output over all pieces of keys, by their log-sum-exps."""
    lses = torch.stack([lse for _, lse in pieces])
    total = lses.logsumexp(0)
    shares = (lses - total.masked_fill(total == -torch.inf, 0)).exp()
    return sum((share[..., None] * output for share, (output, _) in zip(shares, pieces, strict=True)), torch.zeros(()))


@pytest.mark.parametrize("name", ["documents", "scattered documents"])
@pytest.mark.parametrize("positions", [each for each in POSITIONS if each not in ("as tensors", "in any order")])
def test_the_documents_of_a_part(name: str, positions: str) -> None:
    """Kernels of GPUs read the ids of queries and keys instead of the mask."""
    at: dict[str, Any] = dict(zip(("query_positions", "key_positions"), POSITIONS[positions], strict=True))
    shown, full = MASKS[name]().dense(L, S, batch_size=B, **at), Grid(B, H, L, S, torch.device("cpu"), **at)
    for heads, rows, columns in PARTS[:-2]:
        assert isinstance(columns, range)
        chosen = None if columns.step == 1 else columns
        part = part_of(bind(MASKS[name](), full), Offset(H, heads.start, rows.start, columns.start), chosen)
        assert part is not None
        found = part.structure(Grid(B, len(heads), len(rows), len(columns), torch.device("cpu"))).documents
        assert found is not None
        of_queries, of_keys = found
        same = (of_queries[:, :, None] == of_keys[:, None]).expand(B, -1, -1)
        assert torch.equal(same, shown[:, 0][:, rows][..., torch.tensor(columns)].expand_as(same))


def test_a_refused_part_names_its_place() -> None:
    full = Grid(B, H, L, S, torch.device("cpu"))
    query, key, value = drawn()
    for place, size in ((Offset(H, 3), "H"), (Offset(H, row=4), "L"), (Offset(H, column=5), "S")):
        with pytest.raises(ClearheadError, match=f"^mask: expected a call within {size} ="):
            requested(query, key, value, mask=part_of(bind(masks.keep(marks(L, S)), full), place))
