"""Weights of the classes in lessons, loaded in one call, give the lessons' numbers under the lessons' masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead.checkpoints import Naming, load, save

from .lessons import (
    AnnotatedLesson,
    DiveLesson,
    NanoLesson,
    SelfAttentionLesson,
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
}


@pytest.mark.parametrize("name", LESSONS)
def test_outputs_are_those_of_the_lesson(name: str) -> None:
    lesson, inputs, marks, mask = LESSONS[name]
    expected = lesson.double().eval()(*inputs, *marks)
    state = {f"blocks.3.attn.{key}": value for key, value in lesson.state_dict().items()}
    naming = name.partition(",")[0]
    for ours in (load(lesson), load(state, num_heads=H).eval()):
        assert str(ours.loaded_from).startswith(f"{naming}: ")
        assert_same(ours(*inputs, mask=mask), expected)
    saved = save(ours, naming, prefix="blocks.3.attn")
    assert_same_bits(saved, {key: state[key] for key in state if key != "blocks.3.attn.bias"})  # nanoGPT's mask


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
