"""Small random models of transformers, and what goes into and comes out of their attention."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from clearhead import masks
from clearhead.caches import SlidingKVCache
from clearhead.caches._base import Cache

VOCABULARY, B, L, WINDOW = 31, 3, 17, 4
#: Tokens of every row that are no padding, in padded batches.
LENGTHS = torch.tensor([L, 11, 5])
#: Where a prompt ends and single steps begin.
PROMPT = 7

_NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, **_NO_TOKENS}
# H·D is not E, groups of three heads.
_GROUPED: dict[str, Any] = {
    **_TEXT,
    "hidden_size": 42,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 29,
    "max_position_embeddings": 64,
}
_WHOLE: dict[str, Any] = {**_TEXT, "hidden_size": 35, "num_attention_heads": 5, "intermediate_size": 29}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
_LATENT: dict[str, Any] = {
    **_TEXT,
    "hidden_size": 35,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,  # no experts
    "intermediate_size": 29,
    "kv_lora_rank": 13,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 11,
    "max_position_embeddings": 64,
}
_DEEPSEEK_YARN = {name: value for name, value in _YARN.items() if name != "truncate"}
#: What differs between models: DeepSeek-V3 has a latent for queries and YaRN with both mscales.
DEEPSEEK: dict[str, dict[str, Any]] = {
    "plain queries": {"q_lora_rank": None},
    "low-rank queries": {"q_lora_rank": 17},
    "halves": {"q_lora_rank": 17, "rope_interleave": False},
    "halves, plain queries": {"q_lora_rank": None, "rope_interleave": False},
    "biases": {"q_lora_rank": 17, "attention_bias": True, "attention_dropout": 0.1},
    "yarn": {"q_lora_rank": 17, "rope_parameters": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn, two mscales": {
        "q_lora_rank": None,
        "rope_parameters": _DEEPSEEK_YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    },
    "yarn, halves": {"q_lora_rank": 17, "rope_interleave": False, "rope_parameters": _DEEPSEEK_YARN},
    # Their rotary part turns complex numbers, which takes even sizes around it.
    "v2": {
        "q_lora_rank": 17,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 8,
        "rope_parameters": _DEEPSEEK_YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    },
}


@dataclass(frozen=True)
class Case:
    """A model, and where its attention is.

    Args:
        build: makes the model's class and configuration.
        x, output: names of the modules whose input and output are those of a layer's attention.
        layers: which layers are looked at.
        windowed: those of them with a sliding window.
        causal: whether the model hides the future.
        takes_positions: whether the model wants to be told positions in a left-padded batch.
    """

    build: Callable[[], nn.Module]
    x: str
    output: str
    layers: tuple[int, ...] = (0, 1)
    windowed: tuple[int, ...] = ()
    causal: bool = True
    takes_positions: bool = True

    @property
    def mask(self) -> masks.Mask | None:
        return masks.causal() if self.causal else None

    def model(self) -> nn.Module:
        return randomised(self.build())

    def cache(self, ours: Any, layer: int, batch_size: int = B) -> Cache:
        if layer in self.windowed:
            return SlidingKVCache(batch_size, ours.num_kv_heads, WINDOW, ours.head_dim)
        return ours.make_cache(batch_size, L)


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter random: biases, sinks and the weights of norms among them, which start as constants."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name.lower() and "bias" not in name else 0.0, std=0.25)
    return model.eval()


@dataclass
class Seen:
    """What went through the attention of some layers, call after call."""

    x: dict[int, list[Tensor]] = field(default_factory=dict)
    output: dict[int, list[Tensor]] = field(default_factory=dict)


@contextmanager
def watching(model: nn.Module, x: str, output: str, layers: tuple[int, ...]) -> Iterator[Seen]:
    seen, hooks = Seen(), []

    def watch(layer: int) -> None:
        ins, outs = seen.x.setdefault(layer, []), seen.output.setdefault(layer, [])

        def note_x(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ins.append(args[0] if args else kwargs["hidden_states"])

        def note_output(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            outs.append(result[0] if isinstance(result, tuple) else result)

        first, last = (model.get_submodule(name.format(layer=layer)) for name in (x, output))
        hooks.append(first.register_forward_pre_hook(note_x, with_kwargs=True))
        hooks.append(last.register_forward_hook(note_output))

    for layer in layers:
        watch(layer)
    try:
        with torch.no_grad():
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-5 of the largest output."""
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype == torch.float32
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def token_ids() -> Tensor:
    return torch.randint(VOCABULARY, (B, L))


def marks(side: str) -> Tensor:
    """A tokenizer's attention_mask, (B, L): 1 is a token, 0 is padding."""
    columns = torch.arange(L)
    return (columns < LENGTHS[:, None] if side == "right" else columns >= L - LENGTHS[:, None]).long()


def positions_of(attention_mask: Tensor) -> Tensor:
    """0, 1, 2, … for tokens and −1 for padding."""
    return attention_mask.cumsum(-1) * attention_mask - 1


def _model(model_class: Any, config: Any) -> nn.Module:
    config._attn_implementation = "eager"
    return model_class(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        **_GROUPED, num_hidden_layers=2, attention_bias=True, rope_parameters=dict(_LLAMA3)
    )
    return _model(transformers.LlamaModel, config)


def _mistral() -> nn.Module:
    config = transformers.MistralConfig(**_GROUPED, num_hidden_layers=2, sliding_window=WINDOW)
    return _model(transformers.MistralModel, config)


def _qwen3() -> nn.Module:
    config = transformers.Qwen3Config(
        **_GROUPED,
        num_hidden_layers=3,
        rms_norm_eps=1e-2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    )
    return _model(transformers.Qwen3Model, config)


def _gemma2() -> nn.Module:
    config = transformers.Gemma2Config(
        **_GROUPED,
        num_hidden_layers=3,
        query_pre_attn_scalar=19,
        attn_logit_softcapping=1.5,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
    )
    return _model(transformers.Gemma2Model, config)


def _gpt_oss() -> nn.Module:
    config = transformers.GptOssConfig(
        **_GROUPED,
        num_hidden_layers=3,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=WINDOW,
        layer_types=_ALTERNATING,
        rope_parameters=dict(_YARN),
    )
    # The fast way of its experts, which are not looked at here, wants sizes of its own.
    config._experts_implementation = "eager"
    return _model(transformers.GptOssModel, config)


def _gpt_neox() -> nn.Module:
    config = transformers.GPTNeoXConfig(
        **(_WHOLE | {"hidden_size": 80}),
        num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
    )
    return _model(transformers.GPTNeoXModel, config)


def _bloom() -> nn.Module:
    return _model(transformers.BloomModel, transformers.BloomConfig(**_TEXT, hidden_size=35, n_head=5, n_layer=2))


def deepseek(name: str) -> nn.Module:
    """A model with the settings that `DEEPSEEK` has under this name."""
    version = "V2" if name == "v2" else "V3"
    config = getattr(transformers, f"Deepseek{version}Config")(**(_LATENT | DEEPSEEK[name]))
    return _model(getattr(transformers, f"Deepseek{version}Model"), config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        **_TEXT, n_embd=35, n_head=5, n_layer=2, n_positions=L, scale_attn_by_inverse_layer_idx=True
    )
    return _model(transformers.GPT2Model, config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(**_WHOLE, num_hidden_layers=2, max_position_embeddings=L)
    return transformers.BertModel._from_config(config, add_pooling_layer=False, attn_implementation="eager")


def _bert_decoder() -> nn.Module:
    config = transformers.BertConfig(**_WHOLE, num_hidden_layers=2, max_position_embeddings=L, is_decoder=True)
    return transformers.BertModel._from_config(config, add_pooling_layer=False, attn_implementation="eager")


def t5() -> nn.Module:  # not among the cases: it has three kinds of attention
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=23,
        d_kv=7,
        d_ff=29,
        num_heads=5,
        num_layers=2,
        num_decoder_layers=3,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=13,
        dropout_rate=0.1,
    )
    return randomised(_model(transformers.T5Model, config))


_SELF = "layers.{layer}.self_attn"

CASES = {
    "llama": Case(_llama, _SELF, _SELF),
    "mistral": Case(_mistral, _SELF, _SELF, windowed=(0, 1)),
    "qwen3": Case(_qwen3, _SELF, _SELF, (0, 1, 2), windowed=(0, 2)),
    "gemma2": Case(_gemma2, _SELF, _SELF, (0, 1, 2), windowed=(0, 2)),
    "gpt_oss": Case(_gpt_oss, _SELF, _SELF, (0, 1, 2), windowed=(0, 2)),
    "gpt_neox": Case(_gpt_neox, "layers.{layer}.attention", "layers.{layer}.attention"),
    # BLOOM's attention also adds the layer's input.
    "bloom": Case(_bloom, "h.{layer}.self_attention", "h.{layer}.self_attention.dense", takes_positions=False),
    **{f"deepseek, {name}": Case(functools.partial(deepseek, name), _SELF, _SELF) for name in DEEPSEEK},
    "gpt2": Case(_gpt2, "h.{layer}.attn", "h.{layer}.attn"),
    # BERT's block adds its input and normalises: `output.dense` is where attention ends.
    "bert": Case(
        _bert, "encoder.layer.{layer}.attention.self", "encoder.layer.{layer}.attention.output.dense", causal=False
    ),
    # The same as a language model, step by step.
    "bert decoder": Case(
        _bert_decoder, "encoder.layer.{layer}.attention.self", "encoder.layer.{layer}.attention.output.dense"
    ),
}
DECODERS = [name for name, case in CASES.items() if case.causal]
