"""Bad input: Clearhead's error with its words, and an instance of what PyTorch raises for the very same call."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
from clearhead.errors import ArgumentError, ClearheadError, DTypeError, ShapeError

E, H, N, L, S = 12, 3, 2, 5, 7


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def mask(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def raised(call: Callable[[], Any]) -> Exception:
    """What a call raises; prototype warnings on the way there are PyTorch's own affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception) as caught:  # noqa: PT011
            call()
    return caught.value


def assert_useful(ours: Exception, theirs: Exception, kind: type[ClearheadError], *words: str) -> None:
    assert isinstance(ours, kind), f"{type(ours).__mro__}: {ours}"
    assert isinstance(ours, type(theirs)), f"PyTorch raises {type(theirs).__name__}, ours is {type(ours).__mro__}"
    for word in words:
        assert word in str(ours), f"{word!r} is not in: {ours}"


CONSTRUCTIONS = {
    "embed_dim of zero": ((0, 2), {}, ArgumentError, ("embed_dim", "≥ 1", "got 0")),
    "negative embed_dim": ((-4, 2), {}, ArgumentError, ("embed_dim", "≥ 1", "got -4")),
    "no heads": ((12, 0), {}, ArgumentError, ("num_heads", "≥ 1", "got 0")),
    "heads that do not divide": ((12, 5), {}, ArgumentError, ("embed_dim", "a multiple of num_heads = 5", "got 12")),
}


@pytest.mark.parametrize("name", CONSTRUCTIONS)
def test_construction(name: str) -> None:
    args, options, kind, words = CONSTRUCTIONS[name]
    ours = raised(lambda: clearhead.nn.MultiheadAttention(*args, **options))
    theirs = raised(lambda: nn.MultiheadAttention(*args, **options))
    assert_useful(ours, theirs, kind, *words)


def test_a_dropout_that_is_no_probability_is_refused_at_once() -> None:
    """PyTorch waits until the first call in training for the one, and takes the other for no dropout."""
    ours = raised(lambda: clearhead.nn.MultiheadAttention(12, 3, dropout=1.5))
    theirs = raised(lambda: nn.MultiheadAttention(12, 3, dropout=1.5)(x(L, E), x(S, E), x(S, E)))
    assert_useful(ours, theirs, ArgumentError, "dropout", "a probability in [0, 1]", "got 1.5")
    with pytest.raises(ArgumentError, match=r"dropout: expected a probability in \[0, 1\], got -0.1"):
        clearhead.nn.MultiheadAttention(12, 3, dropout=-0.1)


Given = tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]


def given(query: Any = (L, N, E), key: Any = (S, N, E), value: Any = None, of: Any = None, **masks: Any) -> Given:
    """Options of a module, and arguments of its call: ones of these sizes, or what is no size as it is."""
    inputs = (query, key, key if value is None else value)
    return of or {}, tuple(x(*item) if isinstance(item, tuple) else item for item in inputs), masks


BATCH_FIRST = {"batch_first": True}
UNBATCHED = {"query": (L, E), "key": (S, E)}
INTEGERS = x(L, N, E, dtype=torch.int64)
PADDING = ("key_padding_mask", "(N, S) = (2, 7)")
ATTN_MASK = "(L, S) = (5, 7), (N·H, L, S) = (6, 5, 7), (N, L, S) = (2, 5, 7) or (N, H, L, S) = (2, 3, 5, 7)"
HIDES = "bool (True = hidden) or float"
SEVERAL = "query, key, value"

#: name: (what is called how, Clearhead's error, words its text has)
CALLS: dict[str, tuple[Given, type[ClearheadError], tuple[str, ...]]] = {
    "query features": (given((L, N, 11)), ShapeError, ("query", "12 features", "11)")),
    "key features": (given(key=(S, N, 11)), ShapeError, ("key", "12 features", "11)")),
    "key and value lengths": (
        *(given(value=(6, N, E)), ShapeError),
        ("key, value", "equal lengths", "key (7, 2, 12)", "value (6, 2, 12)"),
    ),
    "batch sizes": (
        *(given(key=(S, 4, E)), ShapeError),
        ("query, key", "equal batch sizes N in dimension 1", "(7, 4, 12)", "batch_first=False"),
    ),
    "batch sizes, batch first": (
        *(given((N, L, E), (4, S, E), of=BATCH_FIRST), ShapeError),
        ("query, key", "equal batch sizes N in dimension 0", "(4, 7, 12)", "batch_first=True"),
    ),
    "one dimension": (given((E,), (E,)), ShapeError, ("three-dimensional", "two-dimensional", "(12,)")),
    "batched query only": (given(key=(S, E)), ShapeError, (SEVERAL, "query (5, 2, 12)", "key (7, 12)")),
    "float64 in a float32 module": (
        *(given(x(L, N, E, dtype=torch.float64)), DTypeError),
        ("query", "torch.float32", "got torch.float64", ".to(torch.float32)"),
    ),
    "integer query": (given(INTEGERS, INTEGERS), DTypeError, ("query", "torch.float32", "got torch.int64")),
    "query is None": (given(None), DTypeError, ("query", "torch.Tensor", "NoneType")),
    "key is a list": (given(key=[1.0], value=(S, N, E)), DTypeError, ("key", "torch.Tensor", "list")),
    "padding mask transposed": (
        *(given(key_padding_mask=mask(S, N)), ShapeError),
        (*PADDING, "got (7, 2)", "batch first"),
    ),
    "padding mask without a batch": (given(key_padding_mask=mask(S)), ShapeError, (*PADDING, "got (7,)")),
    "integer padding mask": (
        *(given(key_padding_mask=mask(N, S, dtype=torch.int64)), DTypeError),
        ("key_padding_mask", HIDES, "got torch.int64", ".bool()"),
    ),
    "integer attn_mask": (
        *(given(attn_mask=mask(L, S, dtype=torch.uint8)), DTypeError),
        ("attn_mask", HIDES, "got torch.uint8", ".bool()"),
    ),
    "attn_mask transposed": (given(attn_mask=mask(S, L)), ShapeError, ("attn_mask", ATTN_MASK, "got (7, 5)")),
    "attn_mask that is a padding mask": (
        *(given(attn_mask=mask(N, S)), ShapeError),
        ("attn_mask", ATTN_MASK, "got (2, 7)", "key_padding_mask"),
    ),
    "attn_mask with four wrong sizes": (given(attn_mask=mask(N, 2, L, S)), ShapeError, (ATTN_MASK, "got (2, 2, 5, 7)")),
    "attn_mask transposed, unbatched": (
        *(given(**UNBATCHED, attn_mask=mask(S, L)), ShapeError),
        ("attn_mask", "got (7, 5)"),
    ),
    "attn_mask is a list": (given(attn_mask=[[0.0] * S] * L), DTypeError, ("attn_mask", "torch.Tensor", "list")),
    "attn_mask is one of Clearhead's masks": (
        *(given(attn_mask=clearhead.masks.causal()), DTypeError),
        ("attn_mask", "torch.Tensor", "Causal", "clearhead.MultiHeadAttention"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    (options, args, keywords), kind, words = CALLS[name]
    ours = raised(lambda: clearhead.nn.MultiheadAttention(E, H, **options)(*args, **keywords))
    theirs = raised(lambda: nn.MultiheadAttention(E, H, **options)(*args, **keywords))
    assert_useful(ours, theirs, kind, *words)


def test_a_module_on_the_meta_device_gives_shapes() -> None:
    """Not an error: sizes are worked out there without memory, by PyTorch's module and by ours."""
    for module_class in (clearhead.nn.MultiheadAttention, nn.MultiheadAttention):
        module = module_class(E, H, device="meta")
        query, key = torch.empty(L, N, E, device="meta"), torch.empty(S, N, E, device="meta")
        output, weights = module(query, key, key)
        assert output.is_meta
        assert (output.shape, weights.shape) == ((L, N, E), (N, L, S))


def test_an_error_can_be_sent_to_another_process() -> None:
    """Worker processes hand their exceptions back pickled."""
    error = raised(lambda: clearhead.nn.MultiheadAttention(E, H)(x(L, 11), x(S, E), x(S, E)))
    received = pickle.loads(pickle.dumps(error))
    assert str(received) == str(error)
    assert isinstance(received, (ShapeError, AssertionError))


Q, K, V = x(2, 6, 5, 4), x(2, 6, 7, 4), x(2, 6, 7, 3)

FUNCTIONAL: dict[str, tuple[tuple[Any, ...], type[ClearheadError], tuple[str, ...]]] = {
    "heads": (
        *((Q, K[:, :2], V[:, :2]), ShapeError),
        ("key", "equal numbers of heads", "(2, 2, 7, 4)", "enable_gqa=True"),
    ),
    "heads that do not divide": (
        (Q, K[:, :4], V[:, :4], {"enable_gqa": True}),
        ShapeError,
        ("key", "H = 6", "(2, 4, 7, 4)"),
    ),
    "features": ((Q, K[..., :3], V), ShapeError, ("key", "D = 4", "(2, 6, 7, 3)")),
    "batch sizes": ((Q, x(4, 6, 7, 4), x(4, 6, 7, 3)), ShapeError, (SEVERAL, "broadcast", "(4, 6, 7, 4)")),
    "one dimension": ((x(4), x(4), x(4)), ShapeError, ("query", "(length, features)", "(4,)")),
    "dtypes": ((Q, K.double(), V.double()), DTypeError, ("key", "torch.float32", "torch.float64")),
    "mask shape": ((Q, K, V, mask(7, 5)), ShapeError, ("attn_mask", "(7, 5)")),
    "mask with too many dimensions": ((Q, K, V, mask(1, 2, 6, 5, 7)), ShapeError, ("attn_mask", "(1, 2, 6, 5, 7)")),
    "mask with a batch for inputs without": (
        *((Q[0], K[0], V[0], mask(2, 6, 5, 7)), ShapeError),
        ("attn_mask", "(2, 6, 5, 7)"),
    ),
    "integer mask": ((Q, K, V, mask(5, 7, dtype=torch.int64)), DTypeError, ("attn_mask", "bool", "torch.int64")),
    "mask is a list": ((Q, K, V, [[True] * 7] * 5), DTypeError, ("attn_mask", "torch.Tensor", "list")),
    "query is None": ((None, K, V), DTypeError, ("query", "torch.Tensor", "NoneType")),
    "scale": ((Q, K, V, {"scale": "small"}), DTypeError, ("scale", "a finite number", "str")),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional(name: str) -> None:
    args, kind, words = FUNCTIONAL[name]
    *args, keywords = args if isinstance(args[-1], dict) else (*args, {})
    ours = raised(lambda: clearhead.nn.functional.scaled_dot_product_attention(*args, **keywords))
    theirs = raised(lambda: F.scaled_dot_product_attention(*args, **keywords))
    assert_useful(ours, theirs, kind, *words)
