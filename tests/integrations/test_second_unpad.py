"""Encoders without padding, call after call: each with its own padding, on either side, as the padded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.budgets import slow

from .conftest import Rows
from .encoders import BATCH, ENCODERS, LENGTH, inputs_of, pair, require_near
from .encoders import build as build_encoder

FEW = ("BertModel", "RobertaModel", "DistilBertModel", "ModernBertModel")
KINDS = ("right", "left", "gaps", "right", "none", "short", "left")


def padded(kind: str) -> dict[str, Any]:
    if kind == "none":
        return inputs_of("right") | {"attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long)}
    if kind == "short":  # other items and lengths than in the call before
        return {
            name: x[1:4, :7] | (name == "attention_mask") * (torch.arange(7) < 2).long()
            for name, x in inputs_of("right").items()
        }
    return inputs_of(kind)


@pytest.mark.parametrize("name", [*FEW, *slow(*(each for each in ENCODERS if each not in FEW))])
@torch.no_grad()
def test_paddings_in_turn(rows: Rows, name: str) -> None:
    """States and, where there is one, the pooler's output, which reads the first column whatever lies there."""
    theirs, ours = pair(build_encoder(name))
    for kind in KINDS:
        given = padded(kind)
        real = given["attention_mask"].bool()
        for more in ({}, {"output_hidden_states": True}):
            expected, found = (model(**given, **more) for model in (theirs, ours))
            require_near(found.last_hidden_state, expected.last_hidden_state, real)
            for state, its in zip(found.get("hidden_states") or (), expected.get("hidden_states") or (), strict=True):
                require_near(state, its, real)
            if expected.get("pooler_output") is not None:
                require_near(found.pooler_output, expected.pooler_output)


@pytest.mark.parametrize("kind", ["right", "left", "gaps"])
@pytest.mark.parametrize("name", ["BertModel", "DistilBertModel", "ModernBertModel"])
@torch.no_grad()
def test_a_head_that_reads_the_first_column(rows: Rows, name: str, kind: str) -> None:
    """With padding there, the column is a padded token's, which a row of real tokens has not."""
    theirs, ours = pair(build_encoder(name, "ForSequenceClassification", num_labels=3))
    for each in (kind, "right", kind):
        given = inputs_of(each)
        require_near(ours(**given).logits, theirs(**given).logits)


@pytest.mark.parametrize("kind", ["right", "left", "gaps", "runs"])
@torch.no_grad()
def test_windows(rows: Rows, kind: str) -> None:
    """A window counts the tokens of the padded batch, padding between them included."""
    theirs, ours = pair(build_encoder("ModernBertModel", local_attention=4))
    given = inputs_of("right" if kind == "runs" else kind)
    if kind == "runs":
        at, start = torch.arange(LENGTH), torch.tensor([0, 3, 5, 1, 2])[:, None]
        given["attention_mask"] = ((at >= start) & (at < start + 7)).long()
    real = given["attention_mask"].bool()
    require_near(ours(**given).last_hidden_state, theirs(**given).last_hidden_state, real)
