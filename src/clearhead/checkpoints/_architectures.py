"""The models of transformers whose attention `from_transformers` reads, as data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from . import _readings as read
from ._blocks import Reading, StoredAttention, gated_queries
from ._deepseek import latent
from ._namings import Entry, Naming, namings_called

_O_PROJ, _GPT2, _BERT, _VIT_FILES = (namings_called(name)[0] for name in ("o_proj", "gpt2", "bert", "vit"))
(_FUSED,) = namings_called("gpt_neox")
_T5 = Naming.of_linears("t5", "q", "k", "v", "o", description="T5 in transformers")
# Files made with early versions have a bias of distances in the first cross-attention too, which no version applies.
_T5_CROSS = replace(_T5, ignored=(r"relative_attention_bias\.weight",))
# `latent` reads the other tensors: these show where the block is.
_DEEPSEEK = Naming(
    "deepseek",
    "DeepSeek in transformers, whose keys and values come from one latent",
    weights=(Entry("kv_b_proj.weight", ("key", "value")), Entry("o_proj.weight", ("output",))),
    biases=(),
    ignored=(r"rotary_emb\.inv_freq",),
)
_BERT_DROPOUT = "attention_probs_dropout_prob"
_VIT: dict[str, Any] = {"causal": False, "dropout": _BERT_DROPOUT, "bias": "qkv_bias", "out_bias": True}
_LATENT = StoredAttention("layers.{layer}.self_attn.", _DEEPSEEK, build=latent)


def _like_llama(*readings: Reading, bias: str | bool = "attention_bias", **options: Any) -> tuple[StoredAttention, ...]:
    """A block of Llama's names, with what is read of its configuration."""
    return (StoredAttention("layers.{layer}.self_attn.", _O_PROJ, readings, bias=bias, **options),)


def _like_t5(part: str, path: str, *readings: Reading, layers: str = "num_decoder_layers") -> StoredAttention:
    """One of T5's three blocks, whose scores are not scaled."""
    naming = _T5_CROSS if part == "cross" else _T5
    options: Any = {"part": part, "causal": part == "decoder", "dropout": "dropout_rate", "bias": False}
    return StoredAttention(path, naming, (read.unscaled, *readings), layers=layers, **options)


#: The attention blocks of each ``model_type``. Several of one part are ways to store the same.
ARCHITECTURES: dict[str, tuple[StoredAttention, ...]] = {
    "llama": _like_llama(read.rotary),
    "mistral": _like_llama(read.rotary, read.window, bias=False),
    "qwen3": _like_llama(read.rotary, read.head_norms, read.alternating_window),
    "gemma2": _like_llama(read.rotary, read.query_scale, read.softcap, read.alternating_window),
    "gpt_oss": _like_llama(read.rotary, read.sinks, read.alternating_window),
    "afmoe": _like_llama(read.local_rotary, read.head_norms, read.alternating_window, read.gate),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5_text"),
        _like_llama(read.rotary, read.centred_norms, read.gate, build=gated_queries),
    ),
    "gpt_neox": (StoredAttention("layers.{layer}.attention.", _FUSED, (read.rotary,), bias="attention_bias"),),
    "bloom": (StoredAttention("h.{layer}.self_attention.", _FUSED, (read.alibi,)),),
    "t5": (
        _like_t5(
            "encoder",
            "encoder.block.{layer}.layer.0.SelfAttention.",
            read.relative_bias(bidirectional=True),
            layers="num_hidden_layers",
        ),
        _like_t5("decoder", "decoder.block.{layer}.layer.0.SelfAttention.", read.relative_bias(bidirectional=False)),
        _like_t5("cross", "decoder.block.{layer}.layer.1.EncDecAttention."),
    ),
    "deepseek_v2": (_LATENT,),
    "deepseek_v3": (_LATENT,),
    "gpt2": (StoredAttention("h.{layer}.attn.", _GPT2, (read.gpt2_scale,), dropout="attn_pdrop"),),
    "bert": (StoredAttention("encoder.layer.{layer}.attention.", _BERT, causal=False, dropout=_BERT_DROPOUT),),
    # In a model, and in its files.
    "vit": (
        StoredAttention("layers.{layer}.attention.", _O_PROJ, **_VIT),
        StoredAttention("encoder.layer.{layer}.attention.", _VIT_FILES, **_VIT),
    ),
}
