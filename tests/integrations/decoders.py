"""Small random decoders of transformers, and the dense masks of what their caches hold."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface

from clearhead.integrations import transformers as integration
from tests.checkpoints.architectures import CASES, deepseek, randomised, t5

WORDS, PROMPT, NEW, SINKS, BUDGET = 31, 11, 7, 2, 6
TOTAL = PROMPT + NEW
#: Tokens of each forward.
STEPS = [PROMPT, *[1] * (NEW - 3), 3]
KINDS: dict[str, dict[str, Any]] = {
    "sliding": {"window": 5},
    "heavy_hitters": {"budget": BUDGET},
    "sinks_and_recent": {"budget": BUDGET, "sinks": SINKS},
}
DECODERS = ["llama", "mistral", "qwen3", "gemma2", "gpt_oss", "gpt_neox", "gpt2", "deepseek_v2", "deepseek_v3"]


def cache_of(model: Any, kind: Any) -> Any:
    return integration.cache_for(model, kind, **KINDS.get(kind, {}))


def model_of(name: str, implementation: str = "clearhead", **settings: Any) -> Any:
    """A language model of random parameters on the tiny configuration of one architecture."""
    torch.manual_seed(13)
    if name == "t5":
        config: Any = t5().config
        model: Any = transformers.T5ForConditionalGeneration(config)
        config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 0
    else:
        versions = {"deepseek_v2": "v2", "deepseek_v3": "low-rank queries"}
        config = (deepseek(versions[name]) if name in versions else CASES[name].build()).config
        config.update({"max_position_embeddings": 64} | settings)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.generation_config.update(bos_token_id=None, eos_token_id=None, pad_token_id=0, max_length=None)
    model = randomised(model)
    model.set_attn_implementation(implementation)
    return model


def batch(padding: str = "none") -> tuple[Tensor, Tensor]:
    """Ids (2, TOTAL) and the attention_mask of a tokenizer."""
    ids = torch.randint(1, WORDS, (2, TOTAL), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :4] = 0
    elif padding == "gaps":
        mask[0, [2, 5, 13]] = 0
        mask[1, 7:PROMPT] = 0
    return ids, mask


def prompt_of(padding: str = "none") -> dict[str, Any]:
    ids, mask = batch(padding)
    return {"input_ids": ids[:, :PROMPT], "attention_mask": mask[:, :PROMPT]}


def positions_of(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)


def own_windows(model: Any) -> list[int | None]:
    config = model.config
    if config.model_type == "mistral":
        return [config.sliding_window] * config.num_hidden_layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [config.sliding_window if kind == "sliding_attention" else None for kind in types]


class Visible:
    """Bool (B, H, TOTAL, TOTAL) for every layer: the keys that each query attends to, by what the cache holds."""

    def __init__(self, model: Any, mask: Tensor, window: int | None) -> None:
        self.windows, self.window, self.mask = own_windows(model), window, mask.bool()
        self.heads = model.config.num_attention_heads
        batch_size, length = mask.shape
        self.layers = [torch.zeros(batch_size, self.heads, length, length, dtype=torch.bool) for _ in self.windows]

    def add(self, cache: Any, start: int, stop: int) -> None:
        """Before a forward with the tokens of columns start … stop − 1."""
        for layer, own_window, visible in zip(cache.layers, self.windows, self.layers, strict=True):
            position = self.mask.cumsum(1)[:, None, :stop]  # windows count tokens, not padding
            distance = position[:, :, start:, None] - position[:, :, None]  # (B, 1, L, stop)
            new = torch.ones(stop, stop, dtype=torch.bool).tril()[start:].repeat(*visible.shape[:2], 1, 1)
            new[..., :start] = False if start == 0 else self.cached(layer.cache.positions, start)[:, :, None]
            for window in (own_window, self.window):
                if window is not None:
                    new &= distance < window
            visible[:, :, start:stop, :stop] = new & self.mask[:, None, None, :stop]

    def cached(self, positions: Tensor, start: int) -> Tensor:
        """Bool (B, H, start): the columns whose keys a layer holds."""
        positions = positions[:, None] if positions.dim() == 2 else positions  # (B, 1 or Hkv, S)
        columns = torch.zeros(len(positions), positions.shape[1], start, dtype=torch.bool)
        for row, mask in enumerate(self.mask[:, :start]):
            real = mask.nonzero().flatten()
            for head, cached in enumerate(positions[row]):
                columns[row, head, real[cached[cached >= 0]]] = True
        return columns.repeat_interleave(self.heads // columns.shape[1], 1)


def dense_logits(model: Any, ids: Tensor, mask: Tensor, visible: list[Tensor]) -> Tensor:
    """The model's logits without a cache, every layer under its own mask."""

    def forward(module: Any, query: Tensor, key: Tensor, value: Tensor, _: Any, *args: Any, **kwargs: Any) -> Any:
        return integration.attention_forward(module, query, key, value, visible[module.layer_idx], *args, **kwargs)

    AttentionInterface.register("dense test mask", forward)
    other = copy.deepcopy(model)
    other.set_attn_implementation("dense test mask")
    with torch.no_grad():
        return other(ids, position_ids=positions_of(mask), use_cache=False).logits


def cached_logits(
    model: Any, cache: Any, ids: Tensor, mask: Tensor, steps: list[int], visible: Visible | None = None, start: int = 0
) -> Tensor:
    """The logits of the same tokens, so many at a time."""
    logits = []
    for step in steps:
        stop = start + step
        if visible is not None:
            visible.add(cache, start, stop)
        told = {"attention_mask": mask[:, :stop], "position_ids": positions_of(mask)[:, start:stop]}
        with torch.no_grad():
            logits.append(model(ids[:, start:stop], past_key_values=cache, **told).logits)
        start = stop
    return torch.cat(logits, 1)


def generated(model: Any, cache: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    chosen = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(past_key_values=cache, **chosen | options)
