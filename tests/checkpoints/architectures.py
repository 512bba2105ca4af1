"""Small random models of transformers, and what goes into and comes out of their attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from clearhead import masks
from clearhead.caches import Cache, SlidingKVCache
from clearhead.checkpoints import from_transformers
from tests.support.closeness import require_near
from tests.support.randomised import randomised

VOCABULARY, B, L, WINDOW = 31, 3, 17, 4
#: Tokens of every row that are no padding, in padded batches.
LENGTHS = torch.tensor([L, 11, 5])
#: Where a prompt ends and single steps begin.
PROMPT = 7

_TEXT: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_WHOLE: dict[str, Any] = _TEXT | {
    "hidden_size": 35,
    "num_attention_heads": 5,
    "num_hidden_layers": 2,
    "intermediate_size": 29,
    "max_position_embeddings": 64,
}
# H·D is not E, groups of three heads.
_GROUPED = _WHOLE | {"hidden_size": 42, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
_ALTERNATING = _GROUPED | {
    "num_hidden_layers": 3,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_HYBRID = _GROUPED | {
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.4},
    "rms_norm_eps": 1e-2,
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 4, "linear_value_head_dim": 4},
}
_SCALED = {"rope_theta": 100.0, "original_max_position_embeddings": 16}
_LLAMA3 = _SCALED | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = _SCALED | {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0}
_PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25}
_LATENT = _WHOLE | {
    "num_key_value_heads": 5,
    "first_k_dense_replace": 2,  # no experts
    "kv_lora_rank": 13,
    "qk_nope_head_dim": 7,
    "qk_rope_head_dim": 6,
    "v_head_dim": 11,
}
#: What differs between DeepSeek's models: V3 has a latent for queries and YaRN with both mscales.
DEEPSEEK: dict[str, dict[str, Any]] = {
    "plain queries": {"q_lora_rank": None},
    "low-rank queries": {"q_lora_rank": 17},
    "halves, biases": {"q_lora_rank": 17, "rope_interleave": False, "attention_bias": True, "attention_dropout": 0.1},
    "yarn": {"q_lora_rank": 17, "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "yarn, two mscales": {"q_lora_rank": None, "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    "yarn, halves": {"q_lora_rank": 17, "rope_interleave": False, "rope_parameters": _YARN},
    # The rotary part of V2 multiplies complex numbers, which requires even sizes around it.
    "v2": {
        "q_lora_rank": 17,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 8,
        "rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    },
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 23,
    "d_kv": 7,
    "d_ff": 29,
    "num_heads": 5,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 13,
    "dropout_rate": 0.1,
}


def build(stem: str, options: dict[str, Any]) -> Any:
    """A model with eager attention, of transformers' classes `stem`Model and `stem`Config."""
    config = getattr(transformers, f"{stem}Config")(**options)
    config._attn_implementation = config._experts_implementation = "eager"
    return getattr(transformers, f"{stem}Model")(config)


def deepseek(name: str) -> Any:
    """A model with the settings that `DEEPSEEK` has under this name."""
    return build("DeepseekV2" if name == "v2" else "DeepseekV3", _LATENT | DEEPSEEK[name])


def t5() -> Any:
    return randomised(build("T5", _T5))


@dataclass(frozen=True)
class Case:
    """A model, and where its attention is.

    Args:
        stem: what the names of its classes begin with.
        options: its configuration.
        x, output: names of the modules whose input and output are those of a layer's attention.
        layers: which layers are compared.
        windowed: those of them with a sliding window.
        causal: whether the model hides the future.
        takes_positions: whether the model needs positions in a left-padded batch.
        part: of an encoder-decoder the stack that runs.
    """

    stem: str
    options: dict[str, Any]
    x: str = "layers.{layer}.self_attn"
    output: str = ""  # as `x`
    layers: tuple[int, ...] = (0, 1)
    windowed: tuple[int, ...] = ()
    causal: bool = True
    takes_positions: bool = True
    part: str | None = None

    @property
    def mask(self) -> masks.Mask | None:
        return masks.causal() if self.causal else None

    def build(self) -> Any:
        model = build(self.stem, self.options)
        return getattr(model, self.part) if self.part else model

    def model(self) -> Any:
        return randomised(self.build())

    def load(self, model: nn.Module, layer: int) -> Any:
        source: Any = model
        if self.part:
            source = {f"{self.part}.{name}": tensor for name, tensor in model.state_dict().items()}
        return from_transformers(source, layer, config=model.config, part=self.part).eval()

    def run(self, model: nn.Module, **inputs: Tensor) -> Seen:
        with self.watching(model) as seen:
            model(**inputs)
        return seen

    def watching(self, model: nn.Module) -> Any:
        return watching(model, self.x, self.output or self.x, self.layers)

    def cache(self, ours: Any, layer: int) -> Cache:
        if layer in self.windowed:
            return SlidingKVCache(B, ours.num_kv_heads, WINDOW, ours.head_dim)
        return ours.make_cache(B, L)


@dataclass
class Seen:
    """Inputs and outputs of the attention of each layer, call after call."""

    x: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    output: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))


@contextmanager
def watching(model: nn.Module, x: str, output: str, layers: tuple[int, ...]) -> Iterator[Seen]:
    seen, hooks = Seen(), []
    for layer in layers:

        def note_x(_: Any, args: Any, kwargs: Any, *, layer: int = layer) -> None:
            seen.x[layer].append(args[0] if args else kwargs["hidden_states"])

        def note_output(_: Any, args: Any, result: Any, *, layer: int = layer) -> None:
            seen.output[layer].append(result[0] if isinstance(result, tuple) else result)

        first, last = (model.get_submodule(name.format(layer=layer)) for name in (x, output))
        hooks += [first.register_forward_pre_hook(note_x, with_kwargs=True), last.register_forward_hook(note_output)]
    with torch.no_grad():
        yield seen
    for hook in hooks:
        hook.remove()


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-5 of the largest output."""
    assert ours.dtype == theirs.dtype == torch.float32
    require_near(ours, theirs, least=0)


def token_ids() -> Tensor:
    return torch.randint(VOCABULARY, (B, L))


def marks(side: str) -> Tensor:
    """A tokenizer's attention_mask, (B, L): 1 is a token, 0 is padding."""
    columns = torch.arange(L)
    return (columns < LENGTHS[:, None] if side == "right" else columns >= L - LENGTHS[:, None]).long()


def positions_of(attention_mask: Tensor) -> Tensor:
    """0, 1, 2, … for tokens and −1 for padding."""
    return attention_mask.cumsum(-1) * attention_mask - 1


_SELF = "block.{layer}.layer.0.SelfAttention"
# BERT's block adds its input and normalises: `output.dense` is where attention ends.
_BERT: Any = {"x": "encoder.layer.{layer}.attention.self", "output": "encoder.layer.{layer}.attention.output.dense"}
_WINDOWS: Any = {"layers": (0, 1, 2), "windowed": (0, 2)}

CASES = {
    "llama": Case("Llama", _GROUPED | {"attention_bias": True, "rope_parameters": _LLAMA3}),
    "mistral": Case("Mistral", _GROUPED | {"sliding_window": WINDOW}, windowed=(0, 1)),
    "qwen3": Case("Qwen3", _ALTERNATING | {"rms_norm_eps": 1e-2, "use_sliding_window": True}, **_WINDOWS),
    "gemma2": Case("Gemma2", _ALTERNATING | {"query_pre_attn_scalar": 19, "attn_logit_softcapping": 1.5}, **_WINDOWS),
    "gpt_oss": Case(
        "GptOss",
        _ALTERNATING
        | {"num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": _YARN | {"truncate": False}},
        **_WINDOWS,
    ),
    "afmoe": Case("Afmoe", _ALTERNATING | {"num_dense_layers": 3, "rms_norm_eps": 1e-2}, **_WINDOWS),
    "qwen3_next": Case("Qwen3Next", _HYBRID | {"attention_bias": True}, layers=(1,)),
    "qwen3_5": Case("Qwen3_5Text", _HYBRID, layers=(1,)),
    "gpt_neox": Case(
        "GPTNeoX", _WHOLE | {"hidden_size": 80, "rope_parameters": _PARTIAL}, x="layers.{layer}.attention"
    ),
    # BLOOM's attention also adds the layer's input.
    "bloom": Case(
        "Bloom",
        _TEXT | {"hidden_size": 35, "n_head": 5, "n_layer": 2},
        x="h.{layer}.self_attention",
        output="h.{layer}.self_attention.dense",
        takes_positions=False,
    ),
    **{
        f"deepseek, {name}": Case("DeepseekV2" if name == "v2" else "DeepseekV3", _LATENT | DEEPSEEK[name])
        for name in DEEPSEEK
    },
    "gpt2": Case(
        "GPT2",
        _TEXT | {"n_embd": 35, "n_head": 5, "n_layer": 2, "n_positions": L, "scale_attn_by_inverse_layer_idx": True},
        x="h.{layer}.attn",
    ),
    "bert": Case("Bert", _WHOLE, **_BERT, causal=False),
    # The same as a language model, step by step.
    "bert decoder": Case("Bert", _WHOLE | {"is_decoder": True}, **_BERT),
    "t5 encoder": Case("T5", _T5, x=_SELF, causal=False, takes_positions=False, part="encoder"),
    "t5 decoder": Case("T5", _T5, x=_SELF, layers=(0, 1, 2), takes_positions=False, part="decoder"),
}
#: One of each kind, for what does not depend on the settings of latent attention.
TYPICAL = [name for name in CASES if "deepseek" not in name or name in ("deepseek, yarn", "deepseek, v2")]
