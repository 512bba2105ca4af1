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


#: Clearhead's error and words of its text, options of a module, and arguments of its call.
Refused = tuple[type[ClearheadError], tuple[str, ...], dict[str, Any], tuple[Any, ...], dict[str, Any]]


def refused(
    kind: type[ClearheadError],
    *words: str,
    query: Any = (L, N, E),
    key: Any = (S, N, E),
    value: Any = None,
    **given: Any,
) -> Refused:
    """A call with inputs of ones of these sizes, or what is no size as it is."""
    inputs = (query, key, key if value is None else value)
    options = {name: given.pop(name) for name in ("batch_first",) if name in given}
    return kind, words, options, tuple(x(*item) if isinstance(item, tuple) else item for item in inputs), given


INTEGERS, DOUBLES = x(L, N, E, dtype=torch.int64), x(L, N, E, dtype=torch.float64)
PADDING = ("key_padding_mask", "(N, S) = (2, 7)")
ATTN_MASK = "(L, S) = (5, 7), (N·H, L, S) = (6, 5, 7), (N, L, S) = (2, 5, 7) or (N, H, L, S) = (2, 3, 5, 7)"
HIDES = "bool (True = hidden) or float"
SEVERAL = "query, key, value"
CAUSAL, WIDE = clearhead.masks.causal(), mask(N, S, dtype=torch.int64)
BATCHES = "equal batch sizes N in dimension"

CALLS: dict[str, Refused] = {
    "query features": refused(ShapeError, "query", "12 features", "11)", query=(L, N, 11)),
    "key features": refused(ShapeError, "key", "12 features", "11)", key=(S, N, 11)),
    "key and value lengths": refused(
        ShapeError, "key, value", "equal lengths", "key (7, 2, 12)", "value (6, 2, 12)", value=(6, N, E)
    ),
    "batch sizes": refused(ShapeError, "query, key", f"{BATCHES} 1", "(7, 4, 12)", "batch_first=False", key=(S, 4, E)),
    "batch sizes, batch first": refused(
        *(ShapeError, "query, key", f"{BATCHES} 0", "(4, 7, 12)", "batch_first=True"),
        **{"query": (N, L, E), "key": (4, S, E), "batch_first": True},
    ),
    "one dimension": refused(ShapeError, "three-dimensional", "two-dimensional", "(12,)", query=(E,), key=(E,)),
    "batched query only": refused(ShapeError, SEVERAL, "query (5, 2, 12)", "key (7, 12)", key=(S, E)),
    "float64 in a float32 module": refused(
        DTypeError, "query", "torch.float32", "got torch.float64", ".to(torch.float32)", query=DOUBLES
    ),
    "integer query": refused(DTypeError, "query", "torch.float32", "got torch.int64", query=INTEGERS, key=INTEGERS),
    "query is None": refused(DTypeError, "query", "torch.Tensor", "NoneType", query=None),
    "key is a list": refused(DTypeError, "key", "torch.Tensor", "list", key=[1.0], value=(S, N, E)),
    "padding mask transposed": refused(ShapeError, *PADDING, "got (7, 2)", "batch first", key_padding_mask=mask(S, N)),
    "padding mask without a batch": refused(ShapeError, *PADDING, "got (7,)", key_padding_mask=mask(S)),
    "integer padding mask": refused(
        DTypeError, "key_padding_mask", HIDES, "got torch.int64", ".bool()", key_padding_mask=WIDE
    ),
    "integer attn_mask": refused(
        DTypeError, "attn_mask", HIDES, "got torch.uint8", ".bool()", attn_mask=mask(L, S, dtype=torch.uint8)
    ),
    "attn_mask transposed": refused(ShapeError, "attn_mask", ATTN_MASK, "got (7, 5)", attn_mask=mask(S, L)),
    "attn_mask that is a padding mask": refused(
        ShapeError, "attn_mask", ATTN_MASK, "got (2, 7)", "key_padding_mask", attn_mask=mask(N, S)
    ),
    "attn_mask with four wrong sizes": refused(ShapeError, ATTN_MASK, "got (2, 2, 5, 7)", attn_mask=mask(N, 2, L, S)),
    "attn_mask transposed, unbatched": refused(
        ShapeError, "attn_mask", "got (7, 5)", query=(L, E), key=(S, E), attn_mask=mask(S, L)
    ),
    "attn_mask is a list": refused(DTypeError, "attn_mask", "torch.Tensor", "list", attn_mask=[[0.0] * S] * L),
    "attn_mask is one of Clearhead's masks": refused(
        DTypeError, "attn_mask", "torch.Tensor", "Causal", "clearhead.MultiHeadAttention", attn_mask=CAUSAL
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    kind, words, options, args, keywords = CALLS[name]
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
GROUPS, GQA = {"enable_gqa": True}, "enable_gqa=True"

FUNCTIONAL: dict[str, tuple[tuple[Any, ...], type[ClearheadError], tuple[str, ...]]] = {
    "heads": ((Q, K[:, :2], V[:, :2]), ShapeError, ("key", "equal numbers of heads", "(2, 2, 7, 4)", GQA)),
    "heads that do not divide": ((Q, K[:, :4], V[:, :4], GROUPS), ShapeError, ("key", "H = 6", "(2, 4, 7, 4)")),
    "features": ((Q, K[..., :3], V), ShapeError, ("key", "D = 4", "(2, 6, 7, 3)")),
    "batch sizes": ((Q, x(4, 6, 7, 4), x(4, 6, 7, 3)), ShapeError, (SEVERAL, "broadcast", "(4, 6, 7, 4)")),
    "one dimension": ((x(4), x(4), x(4)), ShapeError, ("query", "(length, features)", "(4,)")),
    "dtypes": ((Q, K.double(), V.double()), DTypeError, ("key", "torch.float32", "torch.float64")),
    "mask shape": ((Q, K, V, mask(7, 5)), ShapeError, ("attn_mask", "(7, 5)")),
    "mask with too many dimensions": ((Q, K, V, mask(1, 2, 6, 5, 7)), ShapeError, ("attn_mask", "(1, 2, 6, 5, 7)")),
    "mask with a batch": ((Q[0], K[0], V[0], mask(2, 6, 5, 7)), ShapeError, ("attn_mask", "(2, 6, 5, 7)")),
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
