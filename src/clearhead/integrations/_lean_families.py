"""The encoders of transformers: the places of the parts of their layers, as data, and their calls in the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import Tensor, nn

from .._call.sequences import PackedSequences
from .._encoder.layers import Angles, LeanLayers
from .._environment import Environment
from ..checkpoints._architectures import ARCHITECTURES
from ..checkpoints._namings import Naming, fused, namings_called
from ..masks._base import Mask

_BERT = ARCHITECTURES["bert"][0]
(_O_PROJ,) = namings_called("o_proj")
_DISTILBERT = Naming.of_linears("distilbert", "q_lin", "k_lin", "v_lin", "out_lin")
_MODERNBERT = fused("modernbert", "Wqkv Wo", "ModernBERT in transformers")


#: Modules of an encoder that the loop calls.
CALLED = ("embeddings", "embed_tokens", "pooler", "rotary_emb")


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
        counted: whether the configuration tells how many of the layers run. Default False: all.
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
    counted: bool = False
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
    counted=True,
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


def parts_in_loop(encoder: nn.Module) -> set[str]:
    """The children of an encoder whose code the loop replaces."""
    family = FAMILIES[type(encoder).__name__]
    return {part.partition(".")[0] for part in (family.layers, family.last_norm or "")}


def run_lean(
    layers: LeanLayers,
    encoder: Any,
    arguments: Mapping[str, Any],
    environment: Environment,
    *,
    mask: Mask | None = None,
    sequences: PackedSequences | None = None,
) -> Tensor | None:
    """The last hidden states of an encoder, (B, L, E), or (1, T, E) of packed tokens.

    Args:
        arguments: those of each token, with positions.
        mask: that hides padding.
        sequences: of packed tokens.

    Returns:
        ``None`` for embeddings that the layers' own code has to take or refuse: with gradients, or of other sizes.
    """
    family = FAMILIES[type(encoder).__name__]
    x = _embedded(encoder, family, arguments)
    if type(x) is not Tensor or x.dim() != 3 or x.shape[-1] != layers.features or not x.is_cpu:
        return None
    if x.dtype != layers.parameters_dtype or (environment.gradients and x.requires_grad):
        return None
    angles = None if family.rotary is None else _angles(encoder, x, arguments["position_ids"], layers)
    return layers.run(x, environment, mask=mask, sequences=sequences, angles=angles).to(x.dtype)


def _embedded(encoder: Any, family: Family, arguments: Mapping[str, Any]) -> Tensor:
    embeddings = getattr(encoder, family.embeddings)
    if isinstance(embeddings, nn.Embedding):
        embedded = arguments.get("inputs_embeds")
        x = embeddings(arguments["input_ids"]) if embedded is None else embedded
    else:
        x = embeddings(**{name: arguments.get(name) for name in family.takes})
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
    fields, pooler = {"last_hidden_state": states}, getattr(encoder, "pooler", None)
    if pooler is not None:
        fields["pooler_output"] = pooler(states)
    output = _output_class(FAMILIES[type(encoder).__name__].output)(**fields)
    return output.to_tuple() if as_tuple else output


@cache
def _output_class(name: str) -> Any:
    """A class of results of transformers."""
    from transformers import modeling_outputs

    return getattr(modeling_outputs, name)
