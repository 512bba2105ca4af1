"""The models of transformers whose attention is known, as data."""

from __future__ import annotations

from . import _readings as read
from ._blocks import Block, Reading
from ._build import multi_head
from ._deepseek import latent
from ._namings import Entry, Naming, fused, namings_called

_O_PROJ = namings_called("o_proj")[0]
_GPT2 = namings_called("gpt2")[0]
_BERT = namings_called("bert")[0]
_VIT_FILES = namings_called("vit")[0]
_FUSED = fused(
    "query_key_value",
    "query_key_value dense",
    "GPT-NeoX and BLOOM in transformers",
    (r"bias", r"masked_bias", r"rotary_emb\.inv_freq"),
)
# Files made with early versions have a bias of distances in the first cross-attention too, which no version applies.
_T5 = Naming.of_linears("t5", "q", "k", "v", "o", description="T5 in transformers")
_T5_CROSS = Naming.of_linears(
    "t5", "q", "k", "v", "o", description="T5 in transformers", ignored=(r"relative_attention_bias\.weight",)
)
# `build` reads the others: these show where the block is.
_DEEPSEEK = Naming(
    "deepseek",
    "DeepSeek in transformers, whose keys and values come from one latent",
    weights=(Entry("kv_b_proj.weight", ("key", "value")), Entry("o_proj.weight", ("output",))),
    biases=(),
    ignored=(r"rotary_emb\.inv_freq",),
)

_SELF_ATTN = "layers.{layer}.self_attn."


def _like_llama(*readings: Reading, bias: str | bool = "attention_bias") -> Block:
    """A block of Llama's names, with what is read of its configuration."""
    return Block("self", _SELF_ATTN, _O_PROJ, multi_head, readings, bias=bias)


def _like_t5(part: str, path: str, *readings: Reading) -> Block:
    """One of T5's three blocks, whose scores are not scaled."""
    return Block(
        part,
        path,
        _T5_CROSS if part == "cross" else _T5,
        multi_head,
        (read.unscaled, *readings),
        causal=part == "decoder",
        dropout="dropout_rate",
        bias=False,
        layers="num_hidden_layers" if part == "encoder" else "num_decoder_layers",
    )


#: The attention blocks of each ``model_type``. Several of one part are ways to store the same.
ARCHITECTURES: dict[str, tuple[Block, ...]] = {
    "llama": (_like_llama(read.rotary),),
    "mistral": (_like_llama(read.rotary, read.window, bias=False),),
    "qwen3": (_like_llama(read.rotary, read.head_norms, read.alternating_window),),
    "gemma2": (_like_llama(read.rotary, read.query_scale, read.softcap, read.alternating_window),),
    "gpt_oss": (_like_llama(read.rotary, read.sinks, read.alternating_window),),
    "gpt_neox": (
        Block(
            "self",
            "layers.{layer}.attention.",
            _FUSED,
            multi_head,
            (read.rotary,),
            bias="attention_bias",
            fused_by_head=True,
        ),
    ),
    "bloom": (Block("self", "h.{layer}.self_attention.", _FUSED, multi_head, (read.alibi,), fused_by_head=True),),
    "t5": (
        _like_t5("encoder", "encoder.block.{layer}.layer.0.SelfAttention.", read.relative_bias(bidirectional=True)),
        _like_t5("decoder", "decoder.block.{layer}.layer.0.SelfAttention.", read.relative_bias(bidirectional=False)),
        _like_t5("cross", "decoder.block.{layer}.layer.1.EncDecAttention."),
    ),
    "deepseek_v2": (Block("self", _SELF_ATTN, _DEEPSEEK, latent),),
    "deepseek_v3": (Block("self", _SELF_ATTN, _DEEPSEEK, latent),),
    "gpt2": (Block("self", "h.{layer}.attn.", _GPT2, multi_head, (read.gpt2_scale,), dropout="attn_pdrop"),),
    "bert": (
        Block(
            "self",
            "encoder.layer.{layer}.attention.",
            _BERT,
            multi_head,
            causal=False,
            dropout="attention_probs_dropout_prob",
        ),
    ),
    "vit": tuple(
        Block(
            "self",
            path,
            naming,
            multi_head,
            causal=False,
            dropout="attention_probs_dropout_prob",
            bias="qkv_bias",
            out_bias=True,
        )
        # In a model, and in its files.
        for path, naming in (
            ("layers.{layer}.attention.", _O_PROJ),
            ("encoder.layer.{layer}.attention.", _VIT_FILES),
        )
    ),
}
