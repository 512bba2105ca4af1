"""Weights of the classes in lessons, loaded in one call, give the lessons' numbers under the lessons' masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.checkpoints import load

from .lessons import (
    AnnotatedLesson,
    DiveLesson,
    NanoLesson,
    SelfAttentionLesson,
    StepByStepLesson,
    TransformerLesson,
    VisionLesson,
)

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
    lesson = SelfAttentionLesson(E, H).double().eval()
    ours = load(lesson.state_dict(), num_heads=H) if as_state_dict else load(lesson)
    x, attention_mask = normal(B, L, E), padding_and_causal(L)
    assert_same(ours.eval()(x, mask=masks.keep(attention_mask)), lesson(x, attention_mask))
    assert_same(ours(x), lesson(x))


def test_self_attention_lesson_takes_one_mask_for_everything() -> None:
    lesson = SelfAttentionLesson(E, H).double().eval()
    x, attention_mask = normal(B, L, E), torch.ones(L, L).tril()
    assert_same(load(lesson)(x, mask=masks.keep(attention_mask)), lesson(x, attention_mask))


def test_self_attention_lesson_gives_nan_where_everything_is_hidden_and_ours_the_bias() -> None:
    lesson = SelfAttentionLesson(6, 2).double().eval()
    attention_mask = torch.tensor([[0, 1], [0, 0], [1, 0]])  # (B, S): the middle one hides every key
    x = normal(3, 2, 6)
    theirs = lesson(x, attention_mask[:, None, None, :])
    ours = load(lesson)(x, mask=masks.keep(keys=attention_mask))
    assert theirs[1].isnan().all()
    assert torch.equal(ours[1], lesson.o_proj.bias.expand(2, 6))
    assert_same(ours[[0, 2]], theirs[[0, 2]])


def test_dropout_and_training_mode_come_along_with_a_module() -> None:
    lesson = SelfAttentionLesson(E, H, dropout=0.3)
    assert load(lesson).dropout == 0.3
    assert load(lesson).training
    assert not load(lesson.eval()).training
    assert load(lesson, dropout=0.0).dropout == 0.0
    assert load(lesson.state_dict(), H).dropout == 0.0
    x = torch.randn(B, L, E)
    ours = load(lesson.train())
    assert not torch.equal(ours(x), ours(x))


@pytest.mark.parametrize("look_ahead", [False, True])
def test_transformer_lesson(look_ahead: bool) -> None:
    lesson = TransformerLesson(E, H).double()
    ours = load(lesson)
    if look_ahead:
        x, mask = normal(B, L, E), padding_and_causal(L)
        assert_same(ours(x, mask=masks.keep(mask)), lesson(x, x, x, mask))
    else:
        query, key, value = normal(B, L, E), normal(B, S, E), normal(B, S, E)
        visible = (torch.arange(S) < torch.tensor([S, 4, 1])[:, None]).long()  # (B, S)
        theirs = lesson(query, key, value, visible[:, None, None, :])
        assert_same(ours(query, key, value, mask=masks.keep(visible[:, None, None, :])), theirs)
        assert_same(ours(query, key, value, mask=masks.keep(keys=visible)), theirs)


def test_transformer_lesson_gives_the_mean_of_the_values_where_everything_is_hidden_and_ours_zero() -> None:
    lesson = TransformerLesson(E, H).double()
    ours, x = load(lesson), normal(B, L, E)
    mask = torch.ones(B, 1, 1, L)
    mask[1] = 0
    theirs, got = lesson(x, x, x, mask), ours(x, mask=masks.keep(mask))
    assert_same(theirs[1], lesson.w_o(lesson.w_v(x[1]).mean(0)).expand(L, E))
    assert torch.equal(got[1], lesson.w_o.bias.expand(L, E))
    assert_same(got[[0, 2]], theirs[[0, 2]])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("per_query", [False, True])
def test_dive_lesson(bias: bool, per_query: bool) -> None:
    key_size, query_size, value_size = 17, 19, 23
    lesson = DiveLesson(key_size, query_size, value_size, E, H, 0.5, bias=bias).double().eval()
    ours = load(lesson)
    assert ours.dropout == 0.5
    assert (ours.q_proj.bias is not None, ours.out_proj.bias is not None) == (bias, bias)
    queries, keys, values = normal(B, L, query_size), normal(B, S, key_size), normal(B, S, value_size)
    valid_lens = torch.randint(1, S + 1, (B, L) if per_query else (B,))
    assert_same(ours(queries, keys, values, mask=masks.lengths(valid_lens)), lesson(queries, keys, values, valid_lens))


def test_dive_lesson_with_a_length_of_zero_gives_the_mean_and_ours_zero() -> None:
    lesson = DiveLesson(E, E, E, E, H, 0.0).double()
    x, valid_lens = normal(B, L, E), torch.tensor([L, 0, 2])
    theirs, ours = lesson(x, x, x, valid_lens), load(lesson)(x, mask=masks.lengths(valid_lens))
    assert_same(theirs[1], lesson.W_o(lesson.W_v(x[1]).mean(0)).expand(L, E))
    assert torch.equal(ours[1], torch.zeros(L, E, dtype=torch.float64))
    assert_same(ours[[0, 2]], theirs[[0, 2]])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", [("q", "k", "v", "o"), ("query", "key", "value", "output")])
def test_step_by_step_lesson_with_linears_given_one_by_one(names: tuple[str, ...], bias: bool) -> None:
    lesson = StepByStepLesson(E, H, bias=bias).double()
    linears = (lesson.to_queries, lesson.to_keys, lesson.to_values, lesson.combine)
    x = normal(B, L, E)
    assert_same(load(dict(zip(names, linears, strict=True)), num_heads=H)(x), lesson(x))
    if not bias:
        weights = {name: linear.weight for name, linear in zip(names, linears, strict=True)}
        assert_same(load(weights, num_heads=H)(x), lesson(x))


def test_step_by_step_lesson_under_a_naming_of_its_own() -> None:
    lesson = StepByStepLesson(E, H).double()
    names = ("to_queries", "to_keys", "to_values", "combine")
    state = nn.ModuleDict({name: getattr(lesson, name) for name in names}).state_dict()
    naming = clearhead.checkpoints.Naming.of_linears("mine", *names)
    x = normal(B, L, E)
    ours = load(state, num_heads=H, naming=naming)
    assert_same(ours(x), lesson(x))
    saved = clearhead.checkpoints.save(ours, naming)
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], state[name]) for name in state)


@pytest.mark.parametrize("qkv_bias", [False, True])
def test_vision_lesson(qkv_bias: bool) -> None:
    lesson = VisionLesson(E, H, qkv_bias=qkv_bias).double()
    x = normal(B, L, E)
    ours = load({f"blocks.3.attn.{key}": value for key, value in lesson.state_dict().items()}, H)
    assert (ours.k_proj.bias is not None, ours.out_proj.bias is not None) == (qkv_bias, True)
    assert_same(ours(x), lesson(x))
    assert_same(load(lesson)(x), lesson(x))


def test_nano_lesson_is_told_from_gpt2_by_its_shapes() -> None:
    lesson = NanoLesson(E, H, block_size=S).double()
    x = normal(B, L, E)
    ours = load(lesson)
    assert "nanogpt" in str(ours.loaded_from)
    assert "ignored: bias" in str(ours.loaded_from)
    assert_same(ours(x, mask=masks.causal()), lesson(x))


def test_annotated_lesson() -> None:
    lesson = AnnotatedLesson(H, E).double().eval()
    x, mask = normal(B, L, E), padding_and_causal(L)[:, 0]  # (B, L, L)
    assert_same(load(lesson)(x, mask=masks.keep(mask)), lesson(x, x, x, mask))


def test_gradients_are_the_lessons() -> None:
    lesson = TransformerLesson(E, H).double()
    ours, mask = load(lesson), padding_and_causal(L)
    x = normal(B, L, E)
    lesson(x, x, x, mask).square().sum().backward()
    ours(x, mask=masks.keep(mask)).square().sum().backward()
    for mine, theirs in zip(
        (ours.q_proj, ours.v_proj, ours.out_proj), (lesson.w_q, lesson.w_v, lesson.w_o), strict=True
    ):
        torch.testing.assert_close(mine.weight.grad, theirs.weight.grad, atol=1e-8, rtol=1e-10)


def test_the_copy_is_independent_of_the_source_and_of_the_random_state() -> None:
    lesson = TransformerLesson(E, H)
    before = torch.get_rng_state()
    ours = load(lesson)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        lesson.w_q.weight.zero_()
    assert ours.q_proj.weight.abs().sum() > 0
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in ours.parameters())
