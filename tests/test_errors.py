"""Every bad input is refused with the argument, what was expected, what came, and what to do about it.

The masks' own refusals are in `tests/masks/test_refusals.py`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import MultiHeadAttention, attention, attention_weights, errors, masks
from clearhead.errors import (
    ArgumentError,
    ClearheadError,
    DeviceError,
    DTypeError,
    ShapeError,
    explain_problem,
)
from clearhead.transformer import Encoder, EncoderLayer, FeedForward
from tests.support.refusals import Call, Refusal, require_fix, require_words

Q, K, X = torch.zeros(2, 6, 5, 8), torch.zeros(2, 3, 7, 8), torch.zeros(2, 5, 12)


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def of(*inputs: Any, **options: Any) -> Call:
    return lambda: attention(*inputs, **options)


def called(**options: Any) -> Call:
    return of(Q, K, K, **options)


def weights(key: Tensor = K, **options: Any) -> Call:
    return lambda: attention_weights(Q, key, **options)


def built(*sizes: Any, **options: Any) -> Call:
    return lambda: MultiHeadAttention(*sizes, **options)


def module(*inputs: Any, **options: Any) -> Call:
    return lambda: MultiHeadAttention(12, 3)(*inputs, **options)


ALL, PER_HEAD = "query, key, value", "(7,) or (2, 7) or (2, 6, 7)"
QUERIES, KEYS = "query_positions", "key_positions"
NAN, GIVEN = float("nan"), "query (2, 5, 12), key"

REFUSED = [
    ("integer query", of(Q.long(), K, K), DTypeError, "query", "float32", "torch.int64. Convert it"),
    ("no tensor", of([1.0], K, K), DTypeError, "query", "a torch.Tensor", "list."),
    ("five sizes", of(Q[None], K, K), ShapeError, "query", "(B, H, L, D)", "(1, 2, 6, 5, 8). clearhead"),
    ("unbatched", of(Q[0], K[0, ..., :4], K[0]), ShapeError, "key", "query (6, 5, 8)", "(3, 7, 4). Project"),
    ("one batch", of(Q, K[0], K[0]), ShapeError, ALL, "all (H, L, D)", "query (2, 6, 5, 8), key (3, 7, 8)"),
    ("key dtype", of(Q, K.double(), K), DTypeError, "key", "torch.float32", "torch.float64. Convert it"),
    ("value dtype", of(Q, K, K.half()), DTypeError, "value", "torch.float32", "torch.float16. Convert"),
    ("key device", of(Q, K.to("meta"), K), DeviceError, "key", "query's device cpu", "meta."),
    ("value device", of(Q, K, K.to("meta")), DeviceError, "value", "query's device cpu", "meta."),
    ("batch", of(Q, K[:1], K[:1]), ShapeError, ALL, "sizes (B)", "query (2, 6, 5, 8), key (1, 3, 7, 8), "),
    ("value batch", of(Q, K, K[:1]), ShapeError, ALL, "(B)", "query (2, 6, 5, 8), key (2, 3, 7, 8), "),
    ("value heads", of(Q, K, K[:, :2]), ShapeError, ALL, "(Hkv)", "query (2, 6, 5, 8), key (2, 3, 7, 8), "),
    (
        "sparse key",
        of(Q, K.to_sparse(), K),
        DTypeError,
        "key",
        "a torch.Tensor",
        "a tensor of layout torch.sparse_coo.",
    ),
    ("no value", of(Q, K, None), DTypeError, "value", "a torch.Tensor", "NoneType."),
    ("query device", of(Q.to("meta"), K, K), DeviceError, "key", "query's device meta", "cpu."),
    ("value length", of(Q, K, K[:, :, :4]), ShapeError, ALL, "(S)", "query (2, 6, 5, 8), key (2, 3, 7, "),
    ("head_dim", of(Q, K[..., :4], K), ShapeError, "key", "D = 8 as in query (2, 6, 5, 8)", "(2, 3, 7, 4)."),
    ("heads", of(Q, Q[:, :4], Q[:, :4]), ShapeError, "key", "H = 6", "Hkv = 4 in (2, 4, 5, 8). Heads are"),
    ("query heads", of(Q[:, :5], K, K), ShapeError, "key", "H = 5", "Hkv = 3 in (2, 3, 7, 8). Heads are"),
    ("dropout 1.5", called(dropout_p=1.5), ArgumentError, "dropout_p", "a probability in [0, 1]", "1.5."),
    ("dropout nan", called(dropout_p=NAN), ArgumentError, "dropout_p", "a probability in [0, 1]", "nan."),
    ("dropout in words", called(dropout_p="0.1"), DTypeError, "dropout_p", "a probability in [0, 1]", "str."),
    ("dropout as a bool", called(dropout_p=True), DTypeError, "dropout_p", "a probability in [0, 1]", "bool."),
    ("infinite scale", called(scale=float("inf")), ArgumentError, "scale", "a finite number, or None for 1/√D", "inf."),
    ("scale nan", called(scale=NAN), ArgumentError, "scale", "a finite number, or None for 1/√D", "nan."),
    ("scale as a tensor", called(scale=torch.ones(())), DTypeError, "scale", "a finite number", "Tensor."),
    ("scale as a bool", called(scale=True), DTypeError, "scale", "a finite number", "bool."),
    ("softcap of zero", called(softcap=0.0), ArgumentError, "softcap", "a number > 0, or None", "0.0."),
    ("softcap as a bool", called(softcap=True), DTypeError, "softcap", "a number > 0, or None", "bool."),
    ("lse in words", called(return_lse="yes"), DTypeError, "return_lse", "True or False", "'yes'."),
    ("list of sinks", called(sinks=[0.0] * 6), DTypeError, "sinks", "a float tensor (6,)", "list."),
    ("sinks per key head", called(sinks=torch.ones(3)), ShapeError, "sinks", "one logit per query head, (6,)", "(3,)."),
    ("integer sinks", called(sinks=ints(6)), DTypeError, "sinks", "a float tensor (6,)", "torch.int64."),
    ("sinks elsewhere", called(sinks=torch.ones(6).to("meta")), DeviceError, "sinks", "device cpu", "meta."),
    ("positions", called(query_positions=ints(7)), ShapeError, QUERIES, "shape (5,) or (2, 5)", "(7,)."),
    ("positions, batch", called(key_positions=ints(3, 7)), ShapeError, KEYS, "(7,) or (2, 7)", "(3, 7)."),
    ("positions, heads", called(key_positions=ints(2, 1, 7)), ShapeError, KEYS, PER_HEAD, "(2, 1, 7)."),
    ("float positions", called(query_positions=torch.ones(5)), DTypeError, QUERIES, "integer", "torch.float32."),
    ("complex positions", called(key_positions=ints(7).cfloat()), DTypeError, KEYS, "an integer tensor", "torch.compl"),
    ("first position -1", called(query_positions=-1), ArgumentError, "query_positions", "first position ≥ 0", "-1."),
    ("bool position", called(key_positions=True), DTypeError, "key_positions", "an int, or an integer tensor", "bool."),
    ("queries per head", called(query_positions=ints(2, 6, 5)), ShapeError, QUERIES, "(n,) or (B, n)", "(2, 6"),
    ("list of positions", called(query_positions=[0] * 5), DTypeError, "query_positions", "integer tensor", "list."),
    ("positions elsewhere", called(key_positions=ints(7).to("meta")), DeviceError, "key_positions", "cpu", "meta."),
    ("row beyond L", weights(queries=[5]), ArgumentError, "queries", "row numbers below L = 5", "[5]."),
    ("half a row", weights(queries=[0.5]), DTypeError, "queries", "an int, a slice or a list of row numbers", "[0.5]."),
    ("marks of rows", weights(queries=torch.ones(4).bool()), ArgumentError, "queries", "a bool tensor (5,)", "(4,)."),
    ("weights, batch", weights(K[:1]), ShapeError, "query, key", "(B)", "query (2, 6, 5, 8), key (1, 3, 7, 8)"),
    ("weights, dims", weights(K[0]), ShapeError, "query, key", "all (H, L, D)", "query (2, 6, 5, 8), key (3, 7, 8)"),
    ("weights, dtype", weights(K.half()), DTypeError, "key", "dtype torch.float32", "torch.float16. Convert it"),
    ("embed_dim", built(13, 4), ArgumentError, "embed_dim", "a multiple of num_heads = 4", "13. Choose other sizes"),
    ("num_kv_heads", built(12, 3, num_kv_heads=2), ArgumentError, "num_kv_heads", "a divisor of num_heads = 3", "2."),
    ("no heads", built(12, 0), ArgumentError, "num_heads", "an int ≥ 1", "0."),
    ("float size", built(12.0, 3), DTypeError, "embed_dim", "an int ≥ 1", "12.0."),
    ("negative head_dim", built(12, 3, head_dim=-1), ArgumentError, "head_dim", "an int ≥ 1", "-1."),
    ("no features", built(12, 3, vdim=0), ArgumentError, "vdim", "an int ≥ 1", "0."),
    ("scale, built", built(12, 3, scale=NAN), ArgumentError, "scale", "a finite number, or None for 1/√D", "nan."),
    ("module dropout", built(12, 3, dropout=1.5), ArgumentError, "dropout", "a probability in [0, 1]", "1.5."),
    ("features", module(X[..., :11]), ShapeError, "query", "(B, length, 12)", "(2, 5, 11). The module is batch first"),
    ("key features", module(X, X[..., :11]), ShapeError, "key", "(B, length, 12)", "(2, 5, 11). The module is batch"),
    ("four sizes", module(X[None]), ShapeError, "query", "(length, 12) without a batch", "(1, 2, 5, 12). "),
    ("token ids", module(ints(2, 5, 12)), DTypeError, "query", "floating point", "torch.int64. Embed token ids first."),
    ("list of features", module([1.0]), DTypeError, "query", "a torch.Tensor", "list."),
    ("features' dtype", module(X.double()), DTypeError, "query", "dtype torch.float32", "torch.float64. Convert"),
    ("key features' dtype", module(X, X.half()), DTypeError, "key", "dtype torch.float32", "torch.float16. Convert"),
    ("features' device", module(X.to("meta")), DeviceError, "query", "device cpu", "meta. Move"),
    ("inputs' batches", module(X, X[:1]), ShapeError, ALL, "batch sizes B", f"{GIVEN} (1, 5, 12), value (1"),
    ("inputs' lengths", module(X, X, X[:, :4]), ShapeError, ALL, "lengths S", f"{GIVEN} (2, 5, 12), value (2, 4"),
    ("value without key", module(X, value=X), ArgumentError, "key", "because value was given", "None. Leave both out"),
]


ADVISED = ["key device", "sinks elsewhere", "positions elsewhere", "batch", "value length", "value heads", "head_dim"]
ADVISED += ["sinks per key head", "positions", "num_kv_heads", "scale as a tensor"]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_it_is_refused_in_words(case: Refusal) -> None:
    require_words(case)
    if case[0] in ADVISED:
        require_fix(case)


@pytest.mark.parametrize("made_before", [False, True])
def test_lengths_are_not_looked_at_while_tracing(made_before: bool) -> None:
    x, beyond = torch.randn(2, 3, 5, 4), torch.tensor([9, 3])
    mask = masks.lengths(beyond)
    compiled = torch.compile(
        lambda x, lengths: attention(x, x, x, mask if made_before else masks.lengths(lengths)),
        backend="eager",
        fullgraph=True,
    )
    torch.testing.assert_close(compiled(x, beyond), attention(x, x, x, masks.lengths(torch.tensor([5, 3]))))


def test_every_error_is_also_one_of_pythons() -> None:
    bases = {
        "ArgumentError": ValueError,
        "CacheError": RuntimeError,
        "CheckpointError": ValueError,
        "DTypeError": TypeError,
        "DeviceError": ValueError,
        "FileError": OSError,
        "DistributedError": RuntimeError,
        "KernelError": RuntimeError,
        "MaskTypeError": TypeError,
        "OutOfRangeError": IndexError,
        "RecordError": RuntimeError,
        "ShapeError": ValueError,
        "UnknownNameError": KeyError,
    }
    assert set(errors.__all__) == {"ClearheadError", "AttentionHealthWarning", "UnseenAttentionWarning", *bases}
    for name, base in bases.items():
        assert issubclass(getattr(errors, name), ClearheadError)
        assert issubclass(getattr(errors, name), base)


def test_a_message_is_put_together_the_same_way_everywhere() -> None:
    assert explain_problem("n", expected="a number", got="none") == "n: expected a number, got none."
    assert explain_problem("n", expected="a", got="b", fix="Do c.") == "n: expected a, got b. Do c."
    for name in filter(lambda name: name.endswith("Error"), errors.__all__):
        error = getattr(errors, name)("n", expected="a", got="b", fix="Do c.")
        assert str(error) == str(pickle.loads(pickle.dumps(error))) == "n: expected a, got b. Do c."


# An error that is raised in a module names the module.


E, H = 12, 3


def _note(call: Callable[[], object]) -> str:
    with pytest.raises(clearhead.errors.ClearheadError) as caught:
        call()
    (note,) = caught.value.__notes__
    return note


def _stack() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _fail(module: nn.Module) -> str:
    return _note(lambda: module(torch.randn(2, 5, E), mask=masks.lengths(torch.tensor([1, 2, 3]))))


def test_without_a_name_it_is_the_class_and_the_sizes() -> None:
    assert _fail(clearhead.MultiHeadAttention(E, H)) == (
        "In MultiHeadAttention(embed_dim=12, num_heads=3, head_dim=4)."
    )
    x = torch.randn(2, 5, E + 1)
    note = _note(lambda: clearhead.nn.MultiheadAttention(E, H, batch_first=True)(x, x, x))
    assert note.startswith("In MultiheadAttention(")


def test_upgrade_gives_full_names() -> None:
    model = nn.ModuleDict({"text": _stack()})
    clearhead.upgrade(model, linears=False)
    attention = model["text"].layers[1].self_attn
    wrong = torch.randn(2, 5, E + 1)
    assert _note(lambda: attention(wrong, wrong, wrong)).startswith("In text.layers.1.self_attn: MultiheadAttention(")
    # A record of a part of the model keeps the full name.
    with clearhead.record(model["text"]) as _, torch.no_grad():
        model["text"](torch.randn(2, 5, E))
    assert _note(lambda: attention(wrong, wrong, wrong)).startswith("In text.layers.1.self_attn: ")


def test_a_record_gives_full_names_and_a_copy_has_none() -> None:
    layers = [EncoderLayer(E, clearhead.MultiHeadAttention(E, H), FeedForward(E, 16)) for _ in range(2)]
    model = nn.Sequential(Encoder(layers)).eval()
    with torch.no_grad(), clearhead.record(model):
        model(torch.randn(2, 5, E))
    mask = masks.lengths(torch.tensor([1, 2, 3]))
    assert _note(lambda: model[0](torch.randn(2, 5, E), mask=mask)).startswith("In 0.layers.0.self_attention: ")
    attention = layers[1].self_attention
    assert _fail(attention).startswith("In 0.layers.1.self_attention: MultiHeadAttention(")
    assert _fail(copy.deepcopy(attention)).startswith("In MultiHeadAttention(")


def test_a_shared_module_has_all_its_names() -> None:
    shared = clearhead.MultiHeadAttention(E, H)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = shared, shared

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    with torch.no_grad(), clearhead.record(model := Twice().eval()):
        model(torch.randn(2, 5, E))
    assert _fail(shared).startswith("In first or second: MultiHeadAttention(")


def test_a_loaded_module_has_its_name_in_the_checkpoint() -> None:
    loaded = clearhead.checkpoints.load(_stack().layers[0].state_dict(), num_heads=H)
    assert _fail(loaded).startswith("In self_attn: MultiHeadAttention(")
