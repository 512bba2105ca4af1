"""`clearhead.nn.functional.scaled_dot_product_attention` against `torch.nn.functional`'s, in float64."""

from __future__ import annotations

import inspect
import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import clearhead
from clearhead.errors import ClearheadError, ShapeError
from tests.support.budgets import in_turn
from tests.support.torch_oracle import assert_equal, gradients

ours = clearhead.nn.functional.scaled_dot_product_attention
theirs = F.scaled_dot_product_attention

B, H, L, S, D, DV = 2, 6, 5, 7, 3, 4


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def visible(*shape: int) -> Tensor:
    """A bool mask under which every query sees the first key."""
    marks = torch.rand(shape) < 0.6
    return marks | (torch.arange(shape[-1]) == 0)


def assert_same(*tensors: Tensor | None, **options: object) -> None:
    """Outputs, and gradients for everything that can have one."""
    answers = []
    for function in (ours, theirs):
        leaves = [x.clone().requires_grad_(x.is_floating_point()) if x is not None else None for x in tensors]
        output = function(*leaves, **options)
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        answers.append((output, gradients((output, None), wanted)))
    (mine, my_gradients), (reference, reference_gradients) = answers
    assert_equal(mine, reference, "output")
    for index, (left, right) in enumerate(zip(my_gradients, reference_gradients, strict=True)):
        assert_equal(left, right, f"gradient {index}")


def test_the_signature_is_pytorchs() -> None:
    """PyTorch's is written in C++, so it is read from the first line of its documentation."""
    documented = re.search(r"scaled_dot_product_attention\(([^)]*)\)", theirs.__doc__ or "")
    assert documented is not None
    names = [part.split("=")[0].strip() for part in documented.group(1).replace("*,", "").split(",")]
    parameters = inspect.signature(ours).parameters
    assert [name for name in names if name] == list(parameters)
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    assert defaults == {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}


#: Leading sizes of query, key and value, and whether heads are grouped.
LEADING: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]] = {
    "no heads": ((), (), (), False),
    "four sizes before": ((1, 3, B, H), (1, 3, B, H), (1, 3, B, H), False),
    "one key head, all value heads": ((B, H), (B, 1), (B, H), False),
    "value heads alone": ((B, 1), (B, 1), (B, H), False),
    "keys without a batch": ((B, H), (H,), (H,), False),
    "query without heads": ((), (B, H), (B, H), False),
    "sizes crossing over": ((3, 1, H), (1, B, H), (B, H), False),
    "groups, no batch": ((H,), (2,), (2,), True),
    "groups, more sizes": ((3, B, H), (3, B, 2), (3, B, 2), True),
    "groups, one key batch for all": ((B, H), (1, 2), (1, 2), True),
    "other groups for values": ((B, H), (B, 2), (B, 3), True),
}


@in_turn({"name": LEADING}, {"masked": ["no", "causal", "bool", "float"]})
def test_leading_sizes(name: str, masked: str) -> None:
    *leading, grouped = LEADING[name]
    query, key, value = (normal(*sizes, *last) for sizes, last in zip(leading, ((L, D), (S, D), (S, DV)), strict=True))
    shape = leading[0][-1:] if grouped else ()
    mask = {"bool": visible(*shape, L, S), "float": normal(*shape, L, S)}.get(masked)
    assert_same(query, key, value, mask, is_causal=masked == "causal", enable_gqa=grouped)


ZEROS = {
    "no queries": ((B, H, 0, D), (B, H, S, D), (B, H, S, DV)),
    "no batch items": ((0, H, L, D), (0, H, S, D), (0, H, S, DV)),
    "no value features": ((B, H, L, D), (B, H, S, D), (B, H, S, 0)),
    "no keys, no batch": ((H, L, D), (H, 0, D), (H, 0, DV)),
    "no keys, no queries": ((B, H, 0, D), (B, H, 0, D), (B, H, 0, DV)),
    "no heads": ((B, 0, L, D), (B, 0, S, D), (B, 0, S, DV)),
    "no heads, no batch": ((0, L, D), (0, S, D), (0, S, DV)),
    "no heads, more sizes": ((3, B, 0, L, D), (3, 1, 0, S, D), (B, 0, S, DV)),
    "no heads and no keys": ((B, 0, L, D), (B, 0, 0, D), (B, 0, 0, DV)),
    "no heads and no features": ((B, 0, L, 0), (B, 0, S, 0), (B, 0, S, 0)),
    "nothing": ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
}


@pytest.mark.parametrize("masked", ["no", "causal", "bool", "float"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("name", ZEROS)
def test_sizes_of_zero(name: str, grouped: bool, masked: str) -> None:
    tensors = [normal(*shape) for shape in ZEROS[name]]
    if grouped and name == "no heads, more sizes":
        tensors = [tensor.expand(3, B, *tensor.shape[-3:]) for tensor in tensors]
    sizes = tensors[0].shape[-2], tensors[1].shape[-2]
    mask = {"bool": torch.ones(sizes, dtype=torch.bool), "float": normal(*sizes)}.get(masked)
    assert_same(*tensors, mask, is_causal=masked == "causal", enable_gqa=grouped)


def test_masks_of_a_call_without_heads_are_checked() -> None:
    tensors = [normal(*shape) for shape in ZEROS["no heads"]]
    expected = r"attn_mask: expected a shape that broadcasts to \(2, 0, 5, 7\), got \(3, 7\)"
    with pytest.raises(ShapeError, match=expected):
        ours(*tensors, torch.ones(3, S, dtype=torch.bool))


LENGTHS, OF_KEYS = (3, 0, 7, 1), (2, 5, 1, 6)


def jagged(lengths: tuple[int, ...], *features: int) -> Tensor:
    """(B, H, lengths, D)."""
    sequences = [normal(length, *features) for length in lengths]
    return torch.nested.as_nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_jagged_sequences_attend_one_by_one(cross: bool, causal: bool, grouped: bool) -> None:
    of_keys, kv_heads = OF_KEYS if cross else LENGTHS, 2 if grouped else H
    inputs = jagged(LENGTHS, H, D), jagged(of_keys, kv_heads, D), jagged(of_keys, kv_heads, DV)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = ours(*leaves, is_causal=causal, scale=0.7, enable_gqa=grouped)
    assert output.shape == (len(LENGTHS), H, inputs[0].shape[2], DV)
    assert output.requires_grad
    upstream = [normal(H, length, DV) for length in LENGTHS]
    sum((part * up).sum() for part, up in zip(output.unbind(), upstream, strict=True)).backward()
    for i, length in enumerate(LENGTHS):
        alone = [tensor.unbind()[i].detach().requires_grad_() for tensor in inputs]
        expected = ours(*alone, is_causal=causal, scale=0.7, enable_gqa=grouped)
        torch.testing.assert_close(output.unbind()[i].detach(), expected.detach(), rtol=1e-10, atol=1e-10)
        if not length:
            continue
        expected_gradients = torch.autograd.grad(expected, alone, upstream[i])
        for leaf, expected_gradient in zip(leaves, expected_gradients, strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(leaf.grad.unbind()[i], expected_gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_jagged_outputs_are_pytorchs_and_combine_with_the_query() -> None:
    query, key, value = jagged((3, 2, 7), H, D), jagged((3, 2, 7), H, D), jagged((3, 2, 7), H, D)
    key, value = (
        torch.nested.nested_tensor_from_jagged(x.transpose(1, 2).values(), query.offsets()) for x in (key, value)
    )
    key, value = key.transpose(1, 2), value.transpose(1, 2)
    output, expected = ours(query, key, value), theirs(query, key, value)
    torch.testing.assert_close(
        output.transpose(1, 2).values(), expected.transpose(1, 2).values(), rtol=1e-10, atol=1e-10
    )
    assert (query + output).shape == query.shape


def test_jagged_refusals() -> None:
    query, dense = jagged(LENGTHS, H, D), normal(len(LENGTHS), H, L, D)
    flat = torch.nested.as_nested_tensor([normal(length, D) for length in LENGTHS], layout=torch.jagged)
    holes = torch.nested.narrow(normal(3, L, H, D), 1, torch.tensor([1, 0, 2]), torch.tensor([2, 5, 3]), torch.jagged)
    place = "expected a jagged tensor (B, H, lengths, D) without holes, like query, key and value all"
    refused: list[tuple[tuple[Tensor, ...], dict[str, object], str]] = [
        ((query, dense, dense), {}, f"key: {place}, got a tensor of layout torch.strided"),
        ((dense, query, query), {}, "key: expected a torch.Tensor, got a nested tensor. Pad it"),
        ((flat, flat, flat), {}, f"query: {place}, got a jagged tensor of another shape. Split the features"),
        ((query.transpose(1, 2),) * 3, {}, f"query: {place}, got a jagged tensor of another shape"),
        ((holes.transpose(1, 2),) * 3, {}, f"query: {place}, got a jagged tensor of another shape"),
        ((query, query, query), {"attn_mask": dense[0, 0] > 0}, "attn_mask: expected None with jagged tensors"),
        ((query, jagged(LENGTHS, 2, D), jagged(LENGTHS, 2, D)), {}, "Pass enable_gqa=True if query heads share keys."),
        ((query, query, jagged(OF_KEYS, H, D)), {}, "value: expected the key's lengths, got others"),
        ((query, *(jagged((3, 4), H, D),) * 2), {}, "equal numbers of sequences, got 4, 2, 2"),
    ]
    for inputs, options, text in refused:
        with pytest.raises(ClearheadError, match=re.escape(text)) as error:
            ours(*inputs, **options)
        assert isinstance(error.value, RuntimeError)


def test_without_features_every_key_has_the_same_weight() -> None:
    """By the formula; PyTorch's gives zeros up to 2.12."""
    value = normal(B, H, S, DV)
    assert_equal(
        ours(normal(B, H, L, 0), normal(B, H, S, 0), value), value.mean(2, True).expand(-1, -1, L, -1), "output"
    )


@settings(max_examples=settings.default.max_examples * 2)
@given(st.data())
def test_generated(data: st.DataObject) -> None:
    """Any number of leading sizes, each dropped or set to 1 for some of the tensors, with any mask that broadcasts."""
    draw = data.draw
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    leading = draw(st.lists(st.sampled_from((1, 2, 3)), max_size=3))
    length, keys = draw(st.sampled_from((1, 2, 5))), draw(st.sampled_from((1, 3, 7)))
    enable_gqa = len(leading) > 0 and draw(st.booleans())
    group = draw(st.sampled_from((1, 2, 3))) if enable_gqa else 1

    def thinned(sizes: list[int]) -> tuple[int, ...]:
        kept = [draw(st.sampled_from((1, size))) for size in sizes]
        return tuple(kept)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query_sizes = tuple(leading)
    key_sizes = tuple(leading) if enable_gqa else thinned(leading)
    if enable_gqa:
        query_sizes = (*leading[:-1], leading[-1] * group)
    shape = (*query_sizes, length, keys)
    kind = draw(st.sampled_from(("none", "causal", "bool", "float")))
    mask = None
    if kind in ("bool", "float"):
        # At least (1 or L, 1 or S): PyTorch itself takes no mask of fewer dimensions.
        mask_shape = thinned(list(shape))[draw(st.integers(0, len(query_sizes))) :]
        mask = tensor(*mask_shape)
        mask = mask.abs() > 0.3 if kind == "bool" else mask
        if kind == "bool" and not bool(mask.any(-1).all()):
            mask = mask | (torch.arange(mask.shape[-1]) == 0)
    assert_same(
        tensor(*query_sizes, length, 2),
        tensor(*key_sizes, keys, 2),
        tensor(*key_sizes, keys, 3),
        mask,
        is_causal=kind == "causal",
        scale=draw(st.sampled_from((None, 0.3, -0.3, 0.0))),
        enable_gqa=enable_gqa,
    )


def test_is_causal_with_a_mask_means_both() -> None:
    """PyTorch refuses the two together."""
    query, key, value, mask = normal(B, H, L, D), normal(B, H, S, D), normal(B, H, S, DV), visible(L, S)
    with pytest.raises(RuntimeError, match="attn_mask should not be set when is_causal"):
        theirs(query, key, value, mask, is_causal=True)
    both = mask & torch.ones(L, S, dtype=torch.bool).tril()
    assert_equal(ours(query, key, value, mask, is_causal=True), theirs(query, key, value, both), "output")


@pytest.mark.parametrize("floats", [False, True])
def test_a_hidden_row_is_zero_with_zero_gradients(floats: bool) -> None:
    query, key, value = (normal(B, H, n, D).requires_grad_() for n in (L, S, S))
    mask = visible(L, S)
    mask[2] = False
    given_mask = torch.zeros(L, S, dtype=torch.float64).masked_fill(~mask, float("-inf")) if floats else mask
    output = ours(query, key, value, given_mask)
    assert bool((output[:, :, 2] == 0).all())
    for gradient in torch.autograd.grad(output.sum(), (query, key, value)):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_keep_theirs(dtype: torch.dtype) -> None:
    tensors = [normal(B, H, n, D).to(dtype) for n in (L, S, S)]
    output = ours(*tensors, is_causal=True)
    exact = theirs(*(x.double() for x in tensors), is_causal=True)
    assert output.dtype == dtype
    allowed = 1e-5 if dtype == torch.float32 else 2 * (theirs(*tensors, is_causal=True) - exact).abs().max().item()
    assert (output - exact).abs().max().item() <= allowed


def test_dropout_acts_whatever_the_mode() -> None:
    query, key, value = normal(B, H, L, D), normal(B, H, S, D), normal(B, H, S, DV)
    assert not torch.equal(ours(query, key, value, None, 0.5), ours(query, key, value, None, 0.5))
    assert not ours(query, key, value, None, 1.0).any()


@pytest.mark.parametrize(("leading", "hinted"), [((2,), True), ((1,), True), ((), True), ((3,), False)], ids=str)
def test_grouped_heads_are_the_advice_where_only_heads_differ(leading: tuple[int, ...], hinted: bool) -> None:
    query, key = normal(2, H, L, D), normal(*leading, 3, S, D)
    with pytest.raises(ShapeError) as caught:
        ours(query, key, key)
    assert ("Pass enable_gqa=True" in str(caught.value)) == hinted
    with nullcontext() if hinted else pytest.raises(ShapeError):
        ours(query, key, key, enable_gqa=True)
