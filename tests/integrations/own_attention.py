"""Small models whose attention computes its softmax itself, and inputs of them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

import clearhead
from tests.integrations.architectures import SMALL, VOCABULARY
from tests.integrations.encoders import BATCH, LENGTH, OPTIONS, build, masks_of

_BOXES = {"coordinate_size": 5, "shape_size": 6, "max_2d_position_embeddings": 64, "max_rel_2d_pos": 32}
_BINS = {"rel_pos_bins": 8, "max_rel_pos": 16, "rel_2d_pos_bins": 8, "input_size": 32, "patch_size": 8}
#: Options of small models of each type.
TYPES: dict[str, dict[str, Any]] = {
    "Flaubert": OPTIONS["FlaubertModel"],
    "LayoutLMv3": SMALL | _BOXES | _BINS,
    "Luke": SMALL | {"entity_vocab_size": 11, "entity_emb_size": 16},
    "MPNet": SMALL,
    "MegatronBert": SMALL,
    "RemBert": OPTIONS["RemBertModel"],
    "RoFormer": OPTIONS["RoFormerModel"],
    "XLM": OPTIONS["XLMModel"],
}
OF_TOKENS = [name for name in TYPES if name not in ("LayoutLMv3", "Luke")]


def make(name: str, model: str = "Model", **options: Any) -> Any:
    return build(f"{name}Model", model, **TYPES[name] | options)


def upgraded(model: Any) -> Any:
    """A copy that computes with Clearhead's attention, padded."""
    ours = copy.deepcopy(model)
    assert clearhead.upgrade(ours, linears=False).models == ("",)
    return ours


def given(name: str, side: str) -> dict[str, Tensor]:
    mask = torch.ones(BATCH, LENGTH).long() if side == "none" else masks_of(side)
    arguments = {"input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH)) * mask, "attention_mask": mask}
    if name == "LayoutLMv3":
        boxes = torch.randint(0, 30, (BATCH, LENGTH, 4)).sort(-1).values
        arguments |= {"bbox": boxes, "pixel_values": torch.randn(BATCH, 3, 32, 32)}
    if name == "Luke":
        entities = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 1]])
        arguments |= {"entity_ids": torch.randint(1, 11, (BATCH, 3)), "entity_attention_mask": entities}
        arguments["entity_position_ids"] = torch.randint(0, LENGTH, (BATCH, 3, 4))
    return arguments
