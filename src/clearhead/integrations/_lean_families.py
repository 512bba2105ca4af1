"""How the encoders of transformers name the parts of their layers, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from torch import nn

from .. import masks
from .._encoder.layers import LayerParts
from .._encoder.products import Affine
from .._encoder.steps import Norm
from .._layer.unmodified import parameters_of
from ..checkpoints._architectures import ARCHITECTURES
from ..checkpoints._namings import Naming, fused, namings_called
from ..masks._base import Mask

_BERT = ARCHITECTURES["bert"][0]
(_O_PROJ,) = namings_called("o_proj")
_DISTILBERT = Naming.of_linears("distilbert", "q_lin", "k_lin", "v_lin", "out_lin")
_MODERNBERT = fused("modernbert", "Wqkv Wo", "ModernBERT in transformers")


@dataclass(frozen=True)
class Family:
    """Where the encoders of one kind have what a layer computes with. Names in layers count from the layer.

    Args:
        path: of the attention of a layer, with ``{layer}`` for its number.
        naming: of its linear layers.
        up: the first linear layers of the feed-forward part.
        down: its last one.
        norms: of attention and of the feed-forward part.
        activation: the module or function of the feed-forward part.
        norm_first: whether the norms precede the parts.
        last_norm: of the encoder's output. Default: none.
        holds_gate: whether the one layer of `up` holds both that a gated part multiplies. Default False.
        embeddings: the module from tokens to features. Default ``"embeddings"``.
        takes: names of arguments that it takes.
        rotary: the module with the angles of rotary positions. Default: none.
        output: the class of transformers of its results.
    """

    path: str
    naming: Naming
    up: tuple[str, ...]
    down: str
    norms: tuple[str, str]
    activation: str
    norm_first: bool = False
    last_norm: str | None = None
    holds_gate: bool = False
    embeddings: str = "embeddings"
    takes: tuple[str, ...] = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids")
    rotary: str | None = None
    output: str = "BaseModelOutputWithPooling"

    @property
    def layers(self) -> str:
        """The list of layers."""
        return self.path.partition(".{layer}.")[0]

    @property
    def attention(self) -> str:
        """The attention of a layer."""
        return self.path.partition("{layer}.")[2].rstrip(".")


_LIKE_BERT = Family(
    _BERT.path,
    _BERT.naming,
    ("intermediate.dense",),
    "output.dense",
    ("attention.output.LayerNorm", "output.LayerNorm"),
    "intermediate.intermediate_act_fn",
    output="BaseModelOutputWithPoolingAndCrossAttentions",
)
_GATED = Family(
    "layers.{layer}.self_attn.",
    _O_PROJ,
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
    ("post_attention_layernorm", "post_mlp_layernorm"),
    "mlp.act_fn",
    rotary="rotary_emb",
)

#: By the classes of transformers.
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        ("BertModel", "CamembertModel", "RobertaModel", "XLMRobertaModel", "Data2VecTextModel"), _LIKE_BERT
    ),
    "ElectraModel": replace(_LIKE_BERT, output="BaseModelOutputWithPastAndCrossAttentions"),
    "ErnieModel": replace(_LIKE_BERT, takes=(*_LIKE_BERT.takes, "task_type_ids")),
    "RobertaPreLayerNormModel": replace(
        _LIKE_BERT, norms=("attention.LayerNorm", "intermediate.LayerNorm"), norm_first=True, last_norm="LayerNorm"
    ),
    "XLMRobertaXLModel": replace(
        _LIKE_BERT,
        norms=("attention.self_attn_layer_norm", "LayerNorm"),
        norm_first=True,
        last_norm="encoder.LayerNorm",
    ),
    "DistilBertModel": Family(
        "transformer.layer.{layer}.attention.",
        _DISTILBERT,
        ("ffn.lin1",),
        "ffn.lin2",
        ("sa_layer_norm", "output_layer_norm"),
        "ffn.activation",
        takes=("input_ids", "inputs_embeds", "position_ids"),
        output="BaseModelOutput",
    ),
    "ModernBertModel": Family(
        "layers.{layer}.attn.",
        _MODERNBERT,
        ("mlp.Wi",),
        "mlp.Wo",
        ("attn_norm", "mlp_norm"),
        "mlp.act",
        norm_first=True,
        last_norm="final_norm",
        holds_gate=True,
        takes=("input_ids", "inputs_embeds"),
        rotary="rotary_emb",
        output="BaseModelOutput",
    ),
    "EuroBertModel": replace(
        _GATED,
        norms=("input_layernorm", "post_attention_layernorm"),
        norm_first=True,
        last_norm="norm",
        embeddings="embed_tokens",
        takes=("input_ids",),
        output="BaseModelOutput",
    ),
    "GteModel": _GATED,
    "NomicBertModel": _GATED,
    "JinaEmbeddingsV3Model": replace(_GATED, up=("mlp.fc1",), down="mlp.fc2", activation="mlp.activation_fn"),
}


def read_layers(encoder: nn.Module, family: Family) -> list[LayerParts]:
    """The layers of an encoder whose linear layers nothing was changed on.

    Raises:
        AttributeError: if the encoder is built in another way than its family.
        ValueError: with the reason, if a part was changed.
    """
    config = cast(Any, encoder.config)
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return [_read_layer(layer, family, heads) for layer in cast(Any, encoder.get_submodule(family.layers))]


def _read_layer(layer: nn.Module, family: Family, heads: tuple[int, int]) -> LayerParts:
    attention: Any = layer.get_submodule(family.attention)
    *inputs, output = (_read_affine(attention, entry.key.removesuffix(".weight")) for entry in family.naming.weights)
    up = tuple(_read_affine(layer, name) for name in family.up)
    if family.holds_gate:
        up = _halves(up[0])
    parts, _, name = family.activation.rpartition(".")
    first, second = (_read_norm(layer.get_submodule(name)) for name in family.norms)
    window = getattr(attention, "sliding_window", None)
    return LayerParts(
        tuple(inputs),
        output,
        up,
        getattr(layer.get_submodule(parts), name),
        _read_affine(layer, family.down),
        first,
        second,
        heads,
        None if window is None else _window(window - 1),
        None if family.rotary is None else getattr(layer, "attention_type", ""),
    )


@cache
def _window(keys: int) -> Mask:
    return masks.sliding_window(keys, keys)


def _read_affine(parent: nn.Module, name: str) -> Affine:
    parameters = parameters_of(parent.get_submodule(name))
    if parameters is None:
        raise ValueError(f"{name} has hooks, an adapter or other code than nn.Linear's")
    weight, bias = parameters["weight"], parameters["bias"]
    if not weight.is_contiguous() or type(weight) is not nn.Parameter:
        raise ValueError(f"{name} has a weight that is quantized or not contiguous")
    return Affine(weight.detach(), None if bias is None else bias.detach())


def _halves(both: Affine) -> tuple[Affine, Affine]:
    half = both.weight.shape[0] // 2
    first, second = (slice(0, half), slice(half, None))
    return _rows(both, first), _rows(both, second)


def _rows(of: Affine, rows: slice) -> Affine:
    return Affine(of.weight[rows], None if of.bias is None else of.bias[rows])


def read_last_norm(encoder: nn.Module, family: Family) -> Norm | None:
    """The norm of the output of a pre-norm encoder."""
    return None if family.last_norm is None else _read_norm(encoder.get_submodule(family.last_norm))


def _read_norm(module: Any) -> Norm | None:
    """A LayerNorm or RMSNorm over the features; ``None`` for an identity."""
    if isinstance(module, nn.Identity):
        return None
    weight, bias = module.weight, getattr(module, "bias", None)
    if isinstance(module, nn.LayerNorm):
        return Norm(weight, bias, module.eps, centers=True)
    return Norm(weight, None, module.variance_epsilon, centers=False)


@cache
def output_class(name: str) -> Any:
    """A class of results of transformers."""
    from transformers import modeling_outputs

    return getattr(modeling_outputs, name)
