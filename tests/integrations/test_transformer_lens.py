"""`fused` on a component that computes attention as those of a TransformerLens bridge do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
from clearhead.errors import ArgumentError
from clearhead.integrations.transformer_lens import fused

HEADS, WIDTH = 3, 12


class HookPoint(nn.Identity):
    """A hook point: `fwd_hooks` lists the hooks of users."""

    def __init__(self) -> None:
        super().__init__()
        self.fwd_hooks: list[Any] = []

    def add_hook(self, seen: list[Tensor]) -> None:
        self.fwd_hooks.append(self.register_forward_hook(lambda *given: seen.append(given[2])))


class Component(nn.Module):
    """Scores, mask, hook, softmax, dropout, hook, product: the steps of a bridge component."""

    def __init__(self, *, causal: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        self.is_causal, self.is_cross_attention = causal, False

    def _apply_reconstruct_attention_mask(
        self, attn_scores: Tensor, attention_mask: Tensor | None, seq_len: int, q_seq_len: int
    ) -> Tensor:
        if self.is_causal:
            seen = torch.ones(q_seq_len, seq_len, dtype=torch.bool).tril(seq_len - q_seq_len)
            attn_scores = attn_scores.masked_fill(~seen, torch.finfo(attn_scores.dtype).min)
        return attn_scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        length = x.shape[1]
        scores = self._apply_reconstruct_attention_mask(
            attn_scores=scores, attention_mask=None, seq_len=length, q_seq_len=length
        )
        pattern = F.softmax(self.hook_attn_scores(scores), dim=-1, dtype=torch.float32).to(q.dtype)
        pattern = self.hook_pattern(F.dropout(pattern, p=0.1, training=self.training))
        return torch.matmul(pattern, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("causal", [False, True])
def test_outputs_and_weights_are_those_of_the_pattern(causal: bool) -> None:
    torch.manual_seed(0)
    bridge, seen = nn.Sequential(Component(causal=causal)).eval(), []
    x = torch.randn(2, 7, WIDTH)
    with torch.no_grad():
        expected = bridge(x)
        with fused(bridge), clearhead.record(bridge, ("entropy",), keep="queries_keys") as rec:
            found = bridge(x)
        torch.testing.assert_close(found, expected)
        bridge[0].hook_pattern.add_hook(seen)
        with fused(bridge):
            torch.testing.assert_close(bridge(x), expected)
    torch.testing.assert_close(rec.weights("0"), seen[0])
    assert "_apply_reconstruct_attention_mask" not in vars(bridge[0])


def test_gradients_flow() -> None:
    torch.manual_seed(0)
    bridge, x = nn.Sequential(Component()).eval(), torch.randn(1, 5, WIDTH)
    expected = torch.autograd.grad(bridge(x).square().sum(), bridge[0].q.weight)[0]
    with fused(bridge):
        found = torch.autograd.grad(bridge(x).square().sum(), bridge[0].q.weight)[0]
    torch.testing.assert_close(found, expected)


def test_dropout_is_that_of_the_component() -> None:
    bridge, x = nn.Sequential(Component()).train(), torch.randn(1, 5, WIDTH)
    torch.manual_seed(3)
    expected = bridge(x)
    torch.manual_seed(3)
    with fused(bridge):
        torch.testing.assert_close(bridge(x), expected)


def test_other_models_are_refused() -> None:
    with pytest.raises(ArgumentError, match="a TransformerBridge"), fused(nn.Linear(2, 2)):
        pass
