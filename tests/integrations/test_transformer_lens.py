"""`fused` on a component that computes attention as those of a TransformerLens bridge do, and a census as its detector.

Where transformer_lens is installed, its own bridge and detector are compared too.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead
from clearhead.errors import ArgumentError
from clearhead.integrations.transformer_lens import fused
from tests.cli.conftest import save_tokenizer
from tests.inspection.small_models import small
from tests.support.allocations import Allocations

HEADS, WIDTH = 3, 12


class HookPoint(nn.Identity):
    """A hook point: `fwd_hooks` lists the hooks of users."""

    def __init__(self) -> None:
        super().__init__()
        self.fwd_hooks: list[Any] = []

    def add_hook(self, seen: list[Tensor]) -> None:
        self.fwd_hooks.append(self.register_forward_hook(lambda *given: seen.append(given[2])))


class Component(nn.Module):
    """Scores, mask, hook, softmax, dropout, hook, product: the steps of a bridge component.

    In `compatibility_mode` keys are hidden by −∞, and rows without keys are zero.
    """

    def __init__(self, *, causal: bool = True, compatible: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.hook_attn_scores, self.hook_pattern = HookPoint(), HookPoint()
        self.is_causal, self.is_cross_attention, self.compatibility_mode = causal, False, compatible
        self._pattern: object = None

    def _apply_reconstruct_attention_mask(
        self, attn_scores: Tensor, attention_mask: Tensor | None, seq_len: int, q_seq_len: int
    ) -> Tensor:
        hidden = float("-inf") if self.compatibility_mode else torch.finfo(attn_scores.dtype).min
        if self.is_causal:
            seen = torch.ones(q_seq_len, seq_len, dtype=torch.bool).tril(seq_len - q_seq_len)
            attn_scores = attn_scores.masked_fill(~seen, hidden)
        if attention_mask is not None:  # (B, 1, L, S)
            attn_scores = attn_scores.masked_fill(~attention_mask, hidden)
        return attn_scores

    def _masked_softmax(self, attn_scores: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if not self.compatibility_mode:
            return F.softmax(attn_scores, dim=-1, dtype=dtype)
        empty = torch.isneginf(attn_scores).all(-1, keepdim=True)
        return F.softmax(attn_scores.masked_fill(empty, 0), dim=-1, dtype=dtype).masked_fill(empty, 0)

    def _scrub_compatibility_pattern_nans(self, pattern: Tensor) -> Tensor:
        return pattern.nan_to_num() if self.compatibility_mode else pattern

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        length = x.shape[1]
        scores = self._apply_reconstruct_attention_mask(
            attn_scores=scores, attention_mask=mask, seq_len=length, q_seq_len=length
        )
        pattern = self._masked_softmax(self.hook_attn_scores(scores), dtype=torch.float32).to(q.dtype)
        pattern = self._scrub_compatibility_pattern_nans(pattern)
        self._pattern = pattern = self.hook_pattern(F.dropout(pattern, p=0.1, training=self.training))
        return torch.matmul(pattern, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("compatible", [False, True])
def test_no_pattern_is_built_or_kept(compatible: bool) -> None:
    bridge, x = Component(compatible=compatible).eval(), torch.randn(1, 300, WIDTH)
    with torch.no_grad():
        expected = bridge(x)
        with fused(bridge), Allocations() as used:
            found = bridge(x)
    torch.testing.assert_close(found, expected)
    assert used.largest < 300 * 300, used.operation  # bytes: less than one byte of each weight
    assert bridge._pattern is None


def test_rows_without_keys_are_zero_in_compatibility_mode() -> None:
    """As they are left of a text that is padded on the left; with dropout the pattern is built."""
    bridge, x = Component(compatible=True), torch.randn(2, 7, WIDTH, requires_grad=True)
    real = torch.arange(7) >= torch.tensor([[3], [0]])  # (B, S)
    mask = real[:, None, None] & torch.ones(7, 7, dtype=torch.bool).tril()  # (B, 1, L, S)
    for training in (False, True):
        results: list[Tensor] = []
        for around in (nullcontext(), fused(bridge)):
            torch.manual_seed(3)
            with around:
                output = bridge.train(training)(x, mask)
                results += [output, *torch.autograd.grad(output.square().sum(), x)]
        torch.testing.assert_close(results[2:], results[:2])
        assert not results[2][0, :3].any()


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


KINDS = {"previous": "previous_token", "duplicate": "duplicate_token", "induction": "induction"}
ours_only = pytest.mark.filterwarnings("ignore")  # nothing that other packages warn of is an error


def patterns(tokens: Tensor) -> dict[str, Tensor]:
    """The keys of each kind for a text (L,), (L, L), as transformer_lens/head_detector.py (4.3) defines them."""
    duplicate = (tokens[:, None] == tokens).float().tril(-1)
    previous = torch.ones(len(tokens) - 1).diag(-1)
    return {"previous": previous, "duplicate": duplicate, "induction": F.pad(duplicate, (1, -1)).tril()}


def score(weights: Tensor, pattern: Tensor) -> float:
    """Its ``error_measure="mul"``: the part of a head's weights (L, L) that lies on a pattern."""
    return float((weights * pattern).sum() / weights.sum())


TEXTS = torch.tensor([[5, 3, 5, 3, 4, 5, 3, 4], [7, 7, 7, 6, 5, 6, 5, 6], [3, 4, 5, 6, 7, 8, 9, 2]])


def test_masses_are_the_scores_of_the_head_detector() -> None:
    torch.manual_seed(0)
    bridge, seen = nn.Sequential(nn.Embedding(10, WIDTH), Component()).eval(), []
    with fused(bridge):
        census = clearhead.census(bridge, [TEXTS[:2], TEXTS[2:]])
    bridge[1].hook_pattern.add_hook(seen)
    with torch.no_grad():
        bridge(TEXTS)
    for kind in KINDS:
        scores = [
            [score(seen[0][text, head], patterns(ids)[kind]) for text, ids in enumerate(TEXTS)] for head in range(3)
        ]
        assert census.share(kind)["1"].tolist() == pytest.approx(torch.tensor(scores).mean(1).tolist(), abs=1e-6)


@ours_only
def test_the_patterns_are_those_of_the_package() -> None:
    detector = pytest.importorskip("transformer_lens.head_detector")
    for ids in TEXTS:
        for kind, name in KINDS.items():
            theirs = getattr(detector, f"get_{name}_head_detection_pattern")(ids[None])
            assert torch.equal(theirs.float(), patterns(ids)[kind])


@ours_only
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_bridge_of_the_package(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformer_lens")
    from transformer_lens import head_detector
    from transformer_lens.model_bridge.sources.transformers.source import boot
    from transformers import AutoTokenizer

    save_tokenizer(tmp_path)
    model = small(kind)
    model.config.architectures = [type(model).__name__]
    names = {"gpt2": "openai-community/gpt2", "llama": "meta-llama/Llama-2-7b-hf"}
    bridge = boot(names[kind], hf_model=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path)).eval()
    with torch.no_grad():
        expected, cache = bridge.run_with_cache(TEXTS)
        with fused(bridge), clearhead.record(bridge, ("entropy",), keep="queries_keys") as rec:
            torch.testing.assert_close(bridge(TEXTS), expected, atol=1e-5, rtol=1e-5)
        with fused(bridge):
            census = clearhead.census(bridge, [TEXTS])
    theirs = [cache[f"blocks.{number}.attn.hook_pattern"] for number in range(2)]
    for weights, layer in zip(theirs, rec, strict=True):
        torch.testing.assert_close(rec.weights(layer), weights, atol=1e-5, rtol=0)
        for name in KINDS:
            options = {"exclude_bos": False, "exclude_current_token": False, "error_measure": "mul"}
            measure = head_detector.compute_head_attention_similarity_score
            scores = [
                [measure(weights[text, head], patterns(ids)[name], **options) for text, ids in enumerate(TEXTS)]
                for head in range(weights.shape[1])
            ]
            assert census.share(name)[layer].tolist() == pytest.approx(torch.tensor(scores).mean(1).tolist(), abs=1e-5)
