"""Weights of the classes in lessons and of PyTorch's module, loaded in one call, give their numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import MultiHeadAttention, masks
from clearhead.checkpoints import Naming, identify, load, save
from clearhead.errors import ArgumentError, CheckpointError
from tests.support.randomised import randomised

from .lessons import (
    AnnotatedLesson,
    ConcatLesson,
    CrossLesson,
    DiveLesson,
    FusedLesson,
    HeadsLesson,
    NanoLesson,
    NormedLesson,
    PatchLesson,
    SelfAttentionLesson,
    TensorFlowLesson,
    TransformerLesson,
    VisionLesson,
    assert_same_bits,
)

B, H, D, L, S = 3, 5, 7, 11, 13
E = H * D
assert_same = partial(torch.testing.assert_close, rtol=0, atol=1e-10)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


X, CROSS = (normal(B, L, E),), (normal(B, L, E), normal(B, S, E), normal(B, S, E))
#: Causal, and the last keys of the later items are padding: (B, 1, L, L).
MARKS = torch.ones(L, L).tril().long() * (torch.arange(L) < torch.tensor([[L], [L - 2], [3]]))[:, None, None]
SEEN = (torch.arange(S) < torch.tensor([[S], [4], [1]])).long()
CONTEXT = (normal(B, L, E), normal(B, S, 17))
DIVE = (normal(B, L, 19), normal(B, S, 17), normal(B, S, 23))
LENGTHS, ROW_LENGTHS = torch.randint(1, S + 1, (B,)), torch.randint(1, S + 1, (B, L))
Lesson = tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], masks.Mask | None]
#: A lesson, its inputs, its mask, and the same mask of ours.
LESSONS: dict[str, Lesson] = {
    "o_proj": (SelfAttentionLesson(E, H, dropout=0.0), X, (MARKS,), masks.keep(MARKS)),
    "o_proj, no mask": (SelfAttentionLesson(E, H, dropout=0.0), X, (), None),
    "w_q": (TransformerLesson(E, H), CROSS, (SEEN[:, None, None],), masks.keep(keys=SEEN)),
    "d2l": (DiveLesson(17, 19, 23, E, H), DIVE, (LENGTHS,), masks.lengths(LENGTHS)),
    "d2l, biases": (DiveLesson(17, 19, 23, E, H, bias=True), DIVE, (ROW_LENGTHS,), masks.lengths(ROW_LENGTHS)),
    "timm": (VisionLesson(E, H), X, (), None),
    "timm, no biases": (VisionLesson(E, H, qkv_bias=False), X, (), None),
    "nanogpt": (NanoLesson(E, H, block_size=S), X, (), masks.causal()),  # its shapes tell it from GPT-2
    "linears": (AnnotatedLesson(E, H), X * 3, (MARKS,), masks.keep(MARKS)),
    "w_concat": (ConcatLesson(E, H), CROSS, (SEEN[:, None, None],), masks.keep(keys=SEEN)),
    "dense": (TensorFlowLesson(E, H), X * 3, (MARKS,), masks.keep(MARKS)),
    "to_q": (CrossLesson(E, 17, H, 3, fused=False, last=True), CONTEXT, (), None),
    "to_q, no dropout": (CrossLesson(E, 17, H, 3, fused=False, last=False), CONTEXT, (), None),
    "to_kv": (CrossLesson(E, 17, H, 3, fused=True, last=True), CONTEXT, (), None),
    "to_kv, no dropout": (CrossLesson(E, 17, H, 3, fused=True, last=False), CONTEXT, (), None),
    "to_qkv": (PatchLesson(E, H, D, last=True), X, (), None),
    "to_qkv, no dropout": (PatchLesson(E, H, D, last=False), X, (), None),
    "heads": (HeadsLesson("query key value", "proj", H, E, D, bias=False), X, (), masks.causal()),
    "heads, other names": (HeadsLesson("q k v", "output_linear", H, E, 3, bias=True), X, (), masks.causal()),
    "heads, more than ten": (HeadsLesson("query key value", "proj", 11, E, 2, bias=True), X, (), masks.causal()),
}


@pytest.mark.parametrize("name", LESSONS)
def test_outputs_are_those_of_the_lesson(name: str) -> None:
    lesson, inputs, marks, mask = LESSONS[name]
    expected = lesson.double().eval()(*inputs, *marks)
    state = {f"blocks.3.attn.{key}": value for key, value in lesson.state_dict().items()}
    naming = name.partition(",")[0]
    for ours in (load(lesson), load(state, num_heads=11 if "ten" in name else H).eval()):
        assert str(ours.loaded_from).startswith(f"{naming}: ")
        assert_same(ours(*inputs, mask=mask), expected)
    saved = save(ours, identify(state).naming, prefix="blocks.3.attn")
    masks_of = (".attn.bias", ".tril")  # buffers of nanoGPT and of heads
    assert_same_bits(saved, {key: state[key] for key in state if not key.endswith(masks_of)})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("by_head", [True, False])
def test_the_layout_of_a_fused_weight_has_to_be_chosen(by_head: bool, bias: bool) -> None:
    lesson = FusedLesson(E, H, by_head=by_head, bias=bias).double()
    text = (
        "source: expected one naming, got keys under '' that fit gpt_neox, query_key_value. Choose one with naming=. "
        "gpt_neox: GPT-NeoX and BLOOM, with query, key and value of each head side by side, whose rotary positions or "
        "ALiBi are not applied; query_key_value: all queries, then all keys, then all values."
    )
    with pytest.raises(CheckpointError) as raised:
        load(lesson)
    assert str(raised.value) == text
    naming = "gpt_neox" if by_head else "query_key_value"
    ours = load(lesson, naming=naming)
    assert_same(ours(*X), lesson(*X))
    assert_same_bits(save(ours, naming), {**lesson.state_dict()})


def test_the_norm_after_a_block_is_not_loaded() -> None:
    lesson = NormedLesson(H, E, 3).double().eval()
    ours = load(lesson)
    query, key, value = CROSS
    assert_same(lesson.layer_norm(ours(query, key, value) + query), lesson(*CROSS))
    assert "ignored: layer_norm.weight, layer_norm.bias" in str(ours.loaded_from)


def test_names_with_numbers_of_heads_tell_how_many_there_are() -> None:
    state = HeadsLesson("query key value", "proj", H, E, D, bias=False).state_dict()
    assert load(state).num_heads == identify(state).num_heads == H
    assert "  heads: 5" in str(identify(state)).splitlines()
    with pytest.raises(ArgumentError, match="num_heads: expected 5, which is what the names say, got 7"):
        load(state, 7)
    del state["heads.2.key.weight"]
    with pytest.raises(CheckpointError, match="The nearest known naming is heads"):
        load(state)
    with pytest.raises(CheckpointError, match="grouped heads, 35 features of queries and 7 of keys"):
        save(MultiHeadAttention(E, H, num_kv_heads=1), "heads")


def test_dropout_and_training_mode_come_along_with_a_module() -> None:
    lesson = SelfAttentionLesson(E, H, dropout=0.3)
    assert (load(lesson).dropout, load(lesson).training, load(lesson.eval()).training) == (0.3, True, False)
    assert load(lesson, dropout=0.0).dropout == load(lesson.state_dict(), H).dropout == 0.0
    assert load(DiveLesson(E, E, E, E, H)).dropout == 0.5


@pytest.mark.parametrize("as_weights", [False, True])
@pytest.mark.parametrize("names", [("q", "k", "v", "o"), ("query", "key", "value", "output")])
def test_projections_given_one_by_one(names: tuple[str, ...], as_weights: bool) -> None:
    lesson = DiveLesson(E, E, E, E, H, bias=not as_weights).double()
    linears = (lesson.W_q, lesson.W_k, lesson.W_v, lesson.W_o)
    given: Any = dict(zip(names, [each.weight for each in linears] if as_weights else linears, strict=True))
    x = normal(B, L, E)
    assert_same(load(given, num_heads=H)(x), lesson(x, x, x, torch.tensor([L] * B)))


def test_a_naming_of_ones_own() -> None:
    names = ("to_queries", "to_keys", "to_values", "combine")
    state = nn.ModuleDict({name: nn.Linear(E, E) for name in names}).state_dict()
    naming = Naming.of_linears("mine", *names)
    assert_same_bits(save(load(state, num_heads=H, naming=naming), naming), state)


def test_the_copy_is_independent_of_the_source_and_of_the_random_state() -> None:
    lesson = TransformerLesson(E, H)
    before = torch.get_rng_state()
    ours = load(lesson)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        lesson.w_q.weight.zero_()
    assert ours.q_proj.weight.abs().sum() > 0
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in ours.parameters())


# PyTorch's own module: packed or separate weights, every combination of biases, and what has no place here.


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("kdim", "vdim"), [(None, None), (17, None), (17, 19)])
def test_same_outputs_and_weights(bias: bool, kdim: int | None, vdim: int | None) -> None:
    theirs = randomised(nn.MultiheadAttention(E, H, bias=bias, kdim=kdim, vdim=vdim, dtype=torch.float64), 0.1)
    ours = load(theirs)
    assert identify(theirs).naming.fused == (kdim is None and vdim is None)
    query, key, value = (torch.randn(B, n, size or E).double() for n, size in ((L, E), (S, kdim), (S, vdim)))
    padding = torch.arange(S) >= torch.tensor([S, 4, 1])[:, None]
    attn_mask = torch.rand(L, S) < 0.3
    attn_mask[:, 0] = False
    inputs = (x.transpose(0, 1) for x in (query, key, value))
    expected, expected_weights = theirs(*inputs, key_padding_mask=padding, attn_mask=attn_mask)
    output, weights = ours(query, key, value, mask=masks.drop(attn_mask) & masks.drop(keys=padding), need_weights=True)
    torch.testing.assert_close(output, expected.transpose(0, 1), atol=1e-10, rtol=0)
    torch.testing.assert_close(weights, expected_weights, atol=1e-10, rtol=0)


@pytest.mark.parametrize("biases", [{}, {"in_proj_bias": 3 * E}, {"out_proj.bias": E}], ids=str)
def test_input_and_output_biases_are_kept_apart(biases: dict[str, int]) -> None:
    state = {"in_proj_weight": torch.randn(3 * E, E), "out_proj.weight": torch.randn(E, E)}
    state |= {name: torch.randn(size) for name, size in biases.items()}
    assert_same_bits(save(load(state, H), "torch"), state)


@pytest.mark.parametrize("biased", ["q", "qv", "ko"])
def test_a_missing_bias_among_query_key_and_value_becomes_zeros(biased: str) -> None:
    state = {f"w_{part}.weight": torch.randn(E, E) for part in "qkvo"}
    state |= {f"w_{part}.bias": torch.randn(E) for part in biased}
    ours = load(state, H)
    roles = {"q": "query", "k": "key", "v": "value"}
    missing = [part for part in roles if part not in biased]
    assert f"biases of zeros added: {', '.join(roles[part] for part in missing)}" in str(ours.loaded_from)
    saved = save(ours, "w_q")
    assert saved.keys() == state.keys() | {f"w_{part}.bias" for part in missing}
    assert all(torch.equal(tensor, state.get(key, torch.zeros(E))) for key, tensor in saved.items())


def test_extra_keys_are_refused_with_the_name_of_the_class_that_has_them() -> None:
    theirs = nn.MultiheadAttention(E, H, add_bias_kv=True)
    with pytest.raises(CheckpointError, match=r"got bias_k \(.*clearhead\.nn\.MultiheadAttention has them\); bias_v"):
        load(theirs)
    with pytest.raises(CheckpointError, match=r"add_zero_attn\. clearhead\.nn\.MultiheadAttention has it"):
        load(nn.ModuleDict({"self_attn": nn.MultiheadAttention(E, H, add_zero_attn=True)}))


def grouped(query: int, key: int) -> dict[str, Tensor]:
    sizes = {"q": (query, E), "k": (key, E), "v": (key, E), "o": (E, query)}
    return {f"{part}_proj.weight": torch.randn(*size) for part, size in sizes.items()}


@pytest.mark.parametrize(
    ("state", "heads", "expected"),
    [
        (grouped(E, E), {}, "num_heads: expected an int ≥ 1, got None. Shapes of weights do not say it"),
        (grouped(E, E), {"num_heads": 4}, "num_heads: expected a divisor of 35, the features of the queries, got 4"),
        (grouped(E, E), {"num_heads": 0}, "num_heads: expected a divisor of 35"),
        (grouped(E, E), {"num_heads": 5.0}, "num_heads: expected a divisor of 35"),
        (grouped(24, 6), {"num_heads": 3}, "24 features of queries and 6 of keys into heads of one size"),
        (grouped(24, 18), {"num_heads": 4}, "24 features of queries and 18 of keys"),
        (grouped(24, 6), {"num_heads": 8, "num_kv_heads": 4}, "num_kv_heads: expected 2, as the shapes say"),
        (nn.MultiheadAttention(E, H), {"num_heads": 7}, "num_heads: expected 5, which is what the module says, got 7"),
    ],
)
def test_heads_that_do_not_fit(state: Any, heads: dict[str, int], expected: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        load(state, **heads)
    assert expected in str(raised.value)
