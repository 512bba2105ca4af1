"""Attention of transformers' decoders step by step: our caches next to theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clearhead import masks

from .architectures import CASES, PROMPT, TYPICAL, B, L, Seen, assert_close, marks, positions_of, token_ids

DECODERS = [name for name in TYPICAL if CASES[name].causal]


def decode(name: str, ids: Tensor, attention_mask: Tensor | None = None) -> tuple[nn.Module, Seen]:
    """Their model: a prompt, then one token after the other with its cache."""
    case = CASES[name]
    model, past = case.model(), None
    with case.watching(model) as seen:
        for start, stop in [(0, PROMPT), *((n, n + 1) for n in range(PROMPT, L))]:
            told = {}
            if attention_mask is not None:
                told["attention_mask"] = attention_mask[:, :stop]
                if case.takes_positions:
                    told["position_ids"] = positions_of(attention_mask)[:, start:stop].clamp(min=0)
            result = model(input_ids=ids[:, start:stop], past_key_values=past, use_cache=True, **told)
            past = result.past_key_values
    return model, seen


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", DECODERS)
@torch.no_grad()
def test_step_by_step(name: str, padded: bool) -> None:
    """A windowed layer works with every cache: what slides is the layer's mask, or the cache itself."""
    case, kept = CASES[name], marks("left")
    kept[:, PROMPT - 1 :] = 1  # padding ends within the prompt
    model, seen = decode(name, token_ids(), kept if padded else None)
    prompt = kept[:, :PROMPT] if padded else torch.ones(B, PROMPT).long()
    for layer in case.layers:
        ours = case.load(model, layer)
        cache = case.cache(ours, layer) if padded else ours.make_cache(B, L)
        first, *steps = zip(seen.x[layer], seen.output[layer], strict=True)
        x = first[0].masked_fill(prompt[..., None] == 0, torch.nan)
        output = ours(x, mask=masks.causal(), cache=cache, positions=positions_of(prompt) if padded else None)
        assert_close(output[prompt.bool()], first[1][prompt.bool()])
        for x, expected in steps:
            assert_close(ours(x, mask=masks.causal(), cache=cache), expected)
