"""The encoders of transformers: the places of the parts of their layers, as data, and their calls in the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import masks
from .._call.sequences import PackedSequences
from .._encoder.layers import Angles, LayerParts, LeanLayers
from .._encoder.products import Affine
from .._encoder.steps import Norm
from .._environment import Environment
from .._layer.unmodified import parameters_of
from ..checkpoints._architectures import ARCHITECTURES
from ..checkpoints._namings import Naming, fused, namings_called
from ..masks._base import Mask
from ._lean import Reading
from ._unpad_checks import works_token_by_token

_BERT = ARCHITECTURES["bert"][0]
(_O_PROJ,) = namings_called("o_proj")
_DISTILBERT = Naming.of_linears("distilbert", "q_lin", "k_lin", "v_lin", "out_lin")
_MODERNBERT = fused("modernbert", "Wqkv Wo", "ModernBERT in transformers")


#: Modules of an encoder that the loop calls.
_CALLED = ("embeddings", "embed_tokens", "pooler", "rotary_emb")


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
        project: a linear layer from the embeddings' features to those of the layers. Default: none.
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
    project: str | None = None
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
    "MegatronBertModel": replace(_LIKE_BERT, norms=("attention.ln", "ln"), norm_first=True, last_norm="encoder.ln"),
    "RemBertModel": replace(_LIKE_BERT, project="encoder.embedding_hidden_mapping_in"),
    "ElectraModel": replace(
        _LIKE_BERT, project="embeddings_project", output="BaseModelOutputWithPastAndCrossAttentions"
    ),
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


def read_encoder(encoder: nn.Module) -> Reading:
    """The layers of an encoder whose linear layers nothing was changed on.

    Raises:
        AttributeError: if the encoder is built in another way than its family.
        ValueError: with the reason, if a part was changed.
    """
    family = FAMILIES.get(type(encoder).__name__)
    if family is None or not works_token_by_token(encoder):
        raise ValueError("they are of no known family, or have other code than transformers'")
    config = cast(Any, encoder.config)
    heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    layers = [_read_layer(layer, family, heads) for layer in cast(Any, encoder.get_submodule(family.layers))]
    last = None if family.last_norm is None else read_norm(encoder.get_submodule(family.last_norm))
    names = {name for name in (*_CALLED, family.project) if name is not None}
    called = [part for name, part in encoder.named_modules() if name in names]
    kept = {id(module) for part in called for module in part.modules()} | {id(encoder)}
    modules = [module for module in encoder.modules() if id(module) not in kept]
    return Reading(modules, layers, family.norm_first, last)


def parts_in_loop(encoder: nn.Module) -> set[str]:
    """The children of an encoder whose code the loop replaces."""
    family = FAMILIES[type(encoder).__name__]
    return {part.partition(".")[0] for part in (family.layers, family.last_norm or "")}


def _read_layer(layer: nn.Module, family: Family, heads: tuple[int, int]) -> LayerParts:
    attention: Any = layer.get_submodule(family.attention)
    *inputs, output = (read_affine(attention, entry.key.removesuffix(".weight")) for entry in family.naming.weights)
    up = tuple(read_affine(layer, name) for name in family.up)
    if family.holds_gate:
        up = _halves(up[0])
    parts, _, name = family.activation.rpartition(".")
    first, second = (read_norm(layer.get_submodule(name)) for name in family.norms)
    window = getattr(attention, "sliding_window", None)
    return LayerParts(
        tuple(inputs),
        output,
        up,
        getattr(layer.get_submodule(parts), name),
        read_affine(layer, family.down),
        first,
        second,
        heads,
        None if window is None else _window(window - 1),
        None if family.rotary is None else getattr(layer, "attention_type", ""),
    )


@cache
def _window(keys: int) -> Mask:
    return masks.sliding_window(keys, keys)


def read_affine(parent: nn.Module, name: str) -> Affine:
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


def read_norm(module: Any) -> Norm | None:
    """A LayerNorm or RMSNorm over the features; ``None`` for an identity."""
    if isinstance(module, nn.Identity):
        return None
    weight, bias = module.weight, getattr(module, "bias", None)
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) == 1:
        return Norm(weight, bias, module.eps, centers=True)
    if not type(module).__name__.endswith("RMSNorm"):
        raise ValueError(f"{type(module).__name__} is no norm over the features")
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return Norm(weight, None, torch.finfo(torch.float32).eps if epsilon is None else epsilon, centers=False)


def run_lean(
    layers: LeanLayers,
    encoder: Any,
    arguments: Mapping[str, Any],
    environment: Environment,
    *,
    mask: Mask | None = None,
    sequences: PackedSequences | None = None,
) -> Tensor:
    """The last hidden states of an encoder, (B, L, E), or (1, T, E) of packed tokens.

    Args:
        arguments: those of each token, with positions.
        mask: that hides padding.
        sequences: of packed tokens.
    """
    family = FAMILIES[type(encoder).__name__]
    x = _embedded(encoder, family, arguments)
    angles = None if family.rotary is None else _angles(encoder, x, arguments["position_ids"], layers)
    return layers.run(x, environment, mask=mask, sequences=sequences, angles=angles).to(x.dtype)


def _embedded(encoder: Any, family: Family, arguments: Mapping[str, Any]) -> Tensor:
    embeddings = getattr(encoder, family.embeddings)
    if isinstance(embeddings, nn.Embedding):
        embedded = arguments.get("inputs_embeds")
        x = embeddings(arguments["input_ids"]) if embedded is None else embedded
    else:
        x = embeddings(**{name: arguments[name] for name in family.takes if name in arguments})
    # ELECTRA has the layer only if its embeddings are narrower.
    if family.project is None or not hasattr(encoder, family.project.partition(".")[0]):
        return x
    return encoder.get_submodule(family.project)(x)


def _angles(encoder: Any, x: Tensor, positions: Tensor, layers: LeanLayers) -> dict[str, Angles]:
    found: dict[str, Angles] = {}
    for name in layers.names_of_angles:
        tables = encoder.rotary_emb(x, positions, name) if name else encoder.rotary_emb(x, positions)
        found[name] = Angles(*(table.flatten(0, 1).float().contiguous() for table in tables))
    return found


def results_of(encoder: Any, states: Tensor, as_tuple: bool) -> Any:
    """The results of an encoder from its last hidden states (B, L, E), as its own forward returns them."""
    output = _output_class(FAMILIES[type(encoder).__name__].output)(last_hidden_state=states)
    pooler = getattr(encoder, "pooler", None)
    if pooler is not None:
        output["pooler_output"] = pooler(states)
    return output.to_tuple() if as_tuple else output


@cache
def _output_class(name: str) -> Any:
    """A class of results of transformers."""
    from transformers import modeling_outputs

    return getattr(modeling_outputs, name)
