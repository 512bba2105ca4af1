"""Attention of transformers' decoders step by step: our caches next to theirs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead.caches import KVCache
from clearhead.checkpoints import from_transformers

from .architectures import (
    CASES,
    DECODERS,
    LENGTHS,
    PROMPT,
    B,
    L,
    Seen,
    assert_close,
    marks,
    positions_of,
    token_ids,
    watching,
)


def decode(name: str, ids: Tensor, attention_mask: Tensor | None = None) -> tuple[nn.Module, Seen]:
    """Their model: a prompt, then one token after the other with its cache."""
    case = CASES[name]
    model = case.model()
    past = None
    with watching(model, case.x, case.output, case.layers) as seen:
        for start, stop in [(0, PROMPT), *((n, n + 1) for n in range(PROMPT, L))]:
            told = {}
            if attention_mask is not None:
                told["attention_mask"] = attention_mask[:, :stop]
                if case.takes_positions:
                    told["position_ids"] = positions_of(attention_mask)[:, start:stop].clamp(min=0)
            result = model(input_ids=ids[:, start:stop], past_key_values=past, use_cache=True, **told)
            past = result.past_key_values
    return model, seen


@pytest.mark.parametrize("kind", ["its own", "KVCache"])
@pytest.mark.parametrize("name", DECODERS)
def test_step_by_step(name: str, kind: str) -> None:
    case = CASES[name]
    model, seen = decode(name, token_ids())
    for layer in case.layers:
        ours = from_transformers(model, layer)
        # A windowed layer works with every cache: what slides is the layer's mask, or the cache itself.
        cache = case.cache(ours, layer) if kind == "its own" else ours.make_cache(B, L)
        with torch.no_grad():
            for x, expected in zip(seen.x[layer], seen.output[layer], strict=True):
                assert_close(ours(x, mask=masks.causal(), cache=cache), expected)


@pytest.mark.parametrize("name", DECODERS)
def test_step_by_step_after_left_padding(name: str) -> None:
    case, kept = CASES[name], marks("left")
    kept[:, PROMPT - 1 :] = 1  # padding ends within the prompt
    model, seen = decode(name, token_ids(), kept)
    prompt = kept[:, :PROMPT]
    for layer in case.layers:
        ours = from_transformers(model, layer)
        cache = case.cache(ours, layer)
        first, *steps = zip(seen.x[layer], seen.output[layer], strict=True)
        with torch.no_grad():
            x = first[0].masked_fill(prompt[..., None] == 0, torch.nan)
            output = ours(x, mask=masks.causal(), cache=cache, positions=positions_of(prompt))
            assert_close(output[prompt.bool()], first[1][prompt.bool()])
            for x, expected in steps:
                assert_close(ours(x, mask=masks.causal(), cache=cache), expected)


@pytest.mark.parametrize("name", DECODERS)
def test_step_by_step_after_right_padding(name: str) -> None:
    """Their model has each row alone: it cannot go on after padding."""
    case, ids = CASES[name], token_ids()
    model = case.model()
    prompts = LENGTHS.clamp(max=PROMPT) - torch.arange(B)
    steps = L - PROMPT
    with watching(model, case.x, case.output, case.layers) as seen:
        for row in range(B):
            model(input_ids=ids[row : row + 1, : int(prompts[row]) + steps])
    for layer in case.layers:
        ours = from_transformers(model, layer)
        cache = case.cache(ours, layer)
        x = torch.full((B, PROMPT, ours.embed_dim), torch.nan)
        for row, length in enumerate(prompts):
            x[row, :length] = seen.x[layer][row][0, :length]
        real = torch.arange(PROMPT) < prompts[:, None]
        with torch.no_grad():
            output = ours(x, mask=masks.causal(), cache=cache, positions=positions_of(real.long()))
            if isinstance(cache, KVCache):  # in a SlidingKVCache padding takes no slot
                cache.crop(prompts)
            rows = [expected[0] for expected in seen.output[layer]]
            assert_close(output[real], torch.cat([row[:length] for row, length in zip(rows, prompts, strict=True)]))
            for step in range(steps):
                x = torch.stack([seen.x[layer][row][0, length + step] for row, length in enumerate(prompts)])[:, None]
                expected = torch.stack([row[length + step] for row, length in zip(rows, prompts, strict=True)])[:, None]
                assert_close(ours(x, mask=masks.causal(), cache=cache), expected)
