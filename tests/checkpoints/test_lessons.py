"""Weights of the classes in lessons, loaded in one call, give the lessons' numbers under the lessons' masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.checkpoints import load

from .lessons import DiveLesson, NanoLesson, SelfAttentionLesson, TransformerLesson, VisionLesson

B, H, D, L, S = 3, 5, 7, 11, 13
E = H * D


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def padding_and_causal(length: int) -> Tensor:
    """0/1 marks (B, 1, L, L): causal, and the last keys of the later items are padding."""
    lengths = torch.tensor([length, length - 2, 3])
    return (torch.ones(length, length).tril() * (torch.arange(length) < lengths[:, None])[:, None, None]).long()


@pytest.mark.parametrize("as_state_dict", [False, True], ids=["module", "state dict"])
def test_self_attention_lesson(as_state_dict: bool) -> None:
    lesson = SelfAttentionLesson(E, H, dropout=0.0).double()
    ours = load(lesson.state_dict(), num_heads=H) if as_state_dict else load(lesson)
    x, attention_mask = normal(B, L, E), padding_and_causal(L)
    assert_same(ours(x, mask=masks.keep(attention_mask)), lesson(x, attention_mask))
    assert_same(ours(x), lesson(x))


def test_dropout_and_training_mode_come_along_with_a_module() -> None:
    lesson = SelfAttentionLesson(E, H, dropout=0.3)
    assert (load(lesson).dropout, load(lesson).training, load(lesson.eval()).training) == (0.3, True, False)
    assert load(lesson, dropout=0.0).dropout == load(lesson.state_dict(), H).dropout == 0.0


def test_transformer_lesson() -> None:
    lesson = TransformerLesson(E, H).double()
    query, key, value = normal(B, L, E), normal(B, S, E), normal(B, S, E)
    visible = (torch.arange(S) < torch.tensor([S, 4, 1])[:, None]).long()  # (B, S)
    theirs = lesson(query, key, value, visible[:, None, None, :])
    assert_same(load(lesson)(query, key, value, mask=masks.keep(keys=visible)), theirs)


def test_a_row_that_hides_everything_is_a_mean_of_values_or_nan_in_lessons_and_zero_in_ours() -> None:
    uniform, undefined = TransformerLesson(E, H).double(), SelfAttentionLesson(E, H).double().eval()
    x, visible = normal(B, L, E), torch.ones(B, L)
    visible[1] = 0
    mean, nan = uniform(x, x, x, visible[:, None, None]), undefined(x, visible[:, None, None])
    assert_same(mean[1], uniform.w_o(uniform.w_v(x[1]).mean(0)).expand(L, E))
    assert nan[1].isnan().all()
    for lesson, theirs, output in ((uniform, mean, uniform.w_o), (undefined, nan, undefined.o_proj)):
        ours = load(lesson)(x, mask=masks.keep(keys=visible))
        assert torch.equal(ours[1], output.bias.expand(L, E))
        assert_same(ours[[0, 2]], theirs[[0, 2]])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("per_query", [False, True])
def test_dive_lesson(bias: bool, per_query: bool) -> None:
    key_size, query_size, value_size = 17, 19, 23
    lesson = DiveLesson(key_size, query_size, value_size, E, H, bias=bias).double().eval()
    ours = load(lesson)
    assert ours.dropout == 0.5
    assert (ours.q_proj.bias is not None, ours.out_proj.bias is not None) == (bias, bias)
    queries, keys, values = normal(B, L, query_size), normal(B, S, key_size), normal(B, S, value_size)
    valid_lens = torch.randint(1, S + 1, (B, L) if per_query else (B,))
    assert_same(ours(queries, keys, values, mask=masks.lengths(valid_lens)), lesson(queries, keys, values, valid_lens))


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
    naming = clearhead.checkpoints.Naming.of_linears("mine", *names)
    saved = clearhead.checkpoints.save(load(state, num_heads=H, naming=naming), naming)
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_vision_lesson(qkv_bias: bool) -> None:
    lesson = VisionLesson(E, H, qkv_bias=qkv_bias).double()
    x = normal(B, L, E)
    ours = load({f"blocks.3.attn.{key}": value for key, value in lesson.state_dict().items()}, H)
    assert (ours.k_proj.bias is not None, ours.out_proj.bias is not None) == (qkv_bias, True)
    assert_same(ours(x), lesson(x))


def test_nano_lesson_is_told_from_gpt2_by_its_shapes() -> None:
    lesson = NanoLesson(E, H, block_size=S).double()
    x = normal(B, L, E)
    ours = load(lesson)
    assert "nanogpt" in str(ours.loaded_from)
    assert "ignored: bias" in str(ours.loaded_from)
    assert_same(ours(x, mask=masks.causal()), lesson(x))


def test_annotated_lesson() -> None:
    """A ModuleList of four, and `h` for the number of heads."""
    lesson = TransformerLesson(E, H).double()
    annotated = nn.Module()
    annotated.h, annotated.linears = H, nn.ModuleList((lesson.w_q, lesson.w_k, lesson.w_v, lesson.w_o))
    x, mask = normal(B, L, E), padding_and_causal(L)
    assert_same(load(annotated)(x, mask=masks.keep(mask)), lesson(x, x, x, mask))


def test_the_copy_is_independent_of_the_source_and_of_the_random_state() -> None:
    lesson = TransformerLesson(E, H)
    before = torch.get_rng_state()
    ours = load(lesson)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        lesson.w_q.weight.zero_()
    assert ours.q_proj.weight.abs().sum() > 0
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in ours.parameters())
