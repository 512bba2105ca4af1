"""A model that gives every query a sink of its own, and every score a bias: transformers' `eager` and ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import clearhead.integrations.transformers  # noqa: F401  registers the name
from tests.support.closeness import require_near
from tests.support.randomised import randomised

B, L = 2, 9
SIZES: dict[str, Any] = {
    **{"vocab_size": 31, "unpadded_vocab_size": 31, "hidden_size": 48, "num_hidden_layers": 2, "eos_token_id": None},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "sliding_window_size": 4, "d_rel": 4},
    **{"swa_num_attention_heads": 6, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 8},
    **{"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 64},
}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    config = transformers.Inkling2TextConfig(**SIZES)
    config._experts_implementation = "eager"
    return randomised(transformers.Inkling2TextModel(config), 0.1)


def run(model: Any, name: str, **inputs: Any) -> tuple[Any, dict[str, Tensor]]:
    """The output under an attention of this name, and the gradients of all parameters."""
    model.set_attn_implementation(name)
    model.zero_grad()
    output = model(**inputs)
    output.last_hidden_state.square().sum().backward()
    return output, {key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("padded", [False, True])
def test_outputs_and_gradients(model: Any, padded: bool) -> None:
    inputs: dict[str, Any] = {"input_ids": torch.randint(31, (B, L))}
    marks = torch.ones(B, L, dtype=torch.long)
    if padded:
        marks[0, :4] = 0
        inputs["attention_mask"] = marks
    (theirs, of_theirs), (ours, of_ours) = (run(model, name, **inputs) for name in ("eager", "clearhead"))
    real = marks.bool()
    require_near(ours.last_hidden_state[real], theirs.last_hidden_state[real])
    assert any("sink_proj" in key for key in of_ours)
    if not padded:  # eager attends from padding to padding
        require_near(of_ours, of_theirs)


def test_weights(model: Any) -> None:
    inputs = {"input_ids": torch.randint(31, (B, L)), "output_attentions": True}
    (theirs, _), (ours, _) = (run(model, name, **inputs) for name in ("eager", "clearhead"))
    require_near(ours.attentions, theirs.attentions)
    assert all((weights.sum(-1) < 1).all() for weights in ours.attentions)
