"""Small random encoders of transformers, upgraded to run without padding, and padded batches for them."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import clearhead
from tests.integrations.architectures import SMALL, VOCABULARY, relative_error

BATCH, LENGTH = 5, 13
_STEMS = "Bert Camembert Data2VecText Deberta DebertaV2 DistilBert Electra Ernie EuroBert Flaubert Gte JinaEmbeddingsV3"
_STEMS += " MPNet MegatronBert ModernBert NomicBert RemBert RoFormer Roberta RobertaPreLayerNorm XLM XLMRoberta"
_STEMS += " XLMRobertaXL"
#: Those that can leave padding out.
ENCODERS = [f"{stem}Model" for stem in _STEMS.split()]
_RELATIVE = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCABULARY, "pad_index": 0, "bos_index": 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "DebertaModel": SMALL | _RELATIVE,
    "DebertaV2Model": SMALL | _RELATIVE | {"position_buckets": 6, "share_att_key": True, "norm_rel_ebd": "layer_norm"},
    "DistilBertModel": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 40, "vocab_size": VOCABULARY},
    "ElectraModel": SMALL | {"embedding_size": 16},
    "EuroBertModel": SMALL | {"num_key_value_heads": 2, "head_dim": 8},
    "FlaubertModel": _XLM,
    "ModernBertModel": SMALL | {"local_attention": 6, "global_attn_every_n_layers": 2},
    "RemBertModel": SMALL | {"input_embedding_size": 16},
    "RoFormerModel": SMALL | {"embedding_size": 16},
    "XLMModel": _XLM,
}
_DROPOUTS = "attention_dropout attention_probs_dropout_prob classifier_dropout dropout embedding_dropout"
_DROPOUTS += " hidden_dropout_prob mlp_dropout seq_classif_dropout"
NO_DROPOUT = dict.fromkeys(_DROPOUTS.split(), 0.0) | {"pad_token_id": 0}


def build(name: str, model: str = "Model", **options: Any) -> Any:
    """A random model; its weights are far from uniform attention, and everything but embeddings of padding counts."""
    stem = name.removesuffix("Model")
    config = getattr(transformers, f"{stem}Config")(**(OPTIONS.get(name, SMALL) | NO_DROPOUT | options))
    built = getattr(transformers, f"{stem}{model}")(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.85 / built.config.hidden_size**0.5)  # features of one size in any width
    return built


def without_pooler(model: Any) -> Any:
    model.pooler = None
    return model


def pair(model: Any) -> tuple[Any, Any]:
    """The model with transformers' own attention, padded, and a copy of it that removes padding."""
    ours = copy.deepcopy(model)
    assert clearhead.upgrade(ours, unpad=True).unpadded
    return model, ours


def masks_of(kind: str) -> Tensor:
    """(B, L), as a tokenizer gives it."""
    lengths, columns = torch.tensor([LENGTH, 3, 1, 7, 9])[:, None], torch.arange(LENGTH)
    if kind == "gaps":
        return ((torch.rand(BATCH, LENGTH) < 0.6) | (columns == 4)).long()
    return (columns < lengths if kind == "right" else columns >= LENGTH - lengths).long()


def inputs_of(kind: str) -> dict[str, Tensor]:
    mask, ids = masks_of(kind), torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    return {"input_ids": ids if kind == "gaps" else ids * mask, "attention_mask": mask}


def require_near(actual: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    """The two agree, at real tokens if there is a mask (B, L)."""
    real: Any = ... if mask is None else mask.bool()
    assert relative_error(actual[real], expected[real]) <= 2e-5


def gradients_of(model: nn.Module, loss: Tensor) -> list[Tensor]:
    learnt = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, learnt, allow_unused=True)
    return [gradient for gradient in gradients if gradient is not None]
