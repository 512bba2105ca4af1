"""The encoders that are measured: MiniLM with its trained weights, other sizes with random ones."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from clearhead.cli._demo import default_model_path

__all__ = ["DTYPES", "MODELS", "RANDOM", "load_model"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: The class and the configuration of models with random weights: sizes as their published checkpoints have them.
RANDOM: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT-base": ("Bert", {}),
    "DeBERTa-v3-small": (
        "DebertaV2",
        {
            "hidden_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "intermediate_size": 3072,
            "relative_attention": True,
            "position_buckets": 256,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
    ),
    "MPNet": ("MPNet", {}),
}
MODELS = ("MiniLM", *RANDOM)
#: Of random models, for the smallest work.
TINY = {"num_hidden_layers": 1, "hidden_size": 48, "intermediate_size": 24, "num_attention_heads": 12}


def load_model(name: str, dtype: str, smallest: bool = False) -> nn.Module:
    """A model with the attention that transformers chooses, for inference.

    Args:
        name: one of `MODELS`.
        dtype: one of `DTYPES`.
        smallest: whether a tiny model stands for a random one.
    """
    if name in RANDOM:
        kind, sizes = RANDOM[name]
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**sizes | (TINY if smallest else {}))
        config.position_embedding_type = "absolute"  # as in files of models; CTranslate2's converter reads it
        model = getattr(transformers, f"{kind}Model")(config)
    else:
        model = transformers.AutoModel.from_pretrained(str(default_model_path()), attn_implementation="sdpa")
    return model.eval().to(DTYPES[dtype])
