"""`head_ablation`, a difference of two losses, and both measures as columns of a census."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.errors import DTypeError

from .conftest import HEADS, NAMES, WIDTH, Stack, nothing_left


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def ablation(model: nn.Module, *batches: Tensor, **options: Any) -> dict[str, Tensor]:
    return clearhead.head_ablation(model, batches, squares, progress=False, **options)


@pytest.mark.parametrize("change", [0.0, -0.5, "mean"])
def test_it_is_the_difference_of_the_losses(change: Any, model: Stack, x: Tensor) -> None:
    """Over three examples in two batches."""
    batches = (x, x[:1] * 2)
    values = ablation(model, *batches, change=change)
    assert list(values) == NAMES
    for name in NAMES:
        for head in range(HEADS):
            with torch.no_grad():
                whole = [float(squares(model, batch)) for batch in batches]
                with clearhead.intervene(model, {(name, head): change}):
                    without = [float(squares(model, batch)) for batch in batches]
            expected = (2 * (without[0] - whole[0]) + without[1] - whole[1]) / 3
            assert float(values[name][head]) == pytest.approx(expected, abs=1e-6)
    assert nothing_left(model)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_head_that_is_not_read_changes_nothing(model: Stack, x: Tensor) -> None:
    attend = model.blocks[1].attend
    with torch.no_grad():
        attend.out_proj.weight[:, : WIDTH // HEADS] = 0
    values = ablation(model, x)["blocks.1.attend"]
    assert float(values[0]) == 0
    assert bool((values[1:] != 0).all())


def test_a_module_that_runs_twice_has_two_rows(x: Tensor) -> None:
    layer = clearhead.MultiHeadAttention(WIDTH, HEADS)
    values = ablation(nn.Sequential(layer, layer), x)
    assert list(values) == ["0/0", "0/1"]
    assert not torch.allclose(values["0/0"], values["0/1"])


def test_it_is_a_column_of_a_census(model: Stack, x: Tensor) -> None:
    model = model.eval()
    importance = clearhead.head_importance(model, [x], squares, progress=False)
    census = clearhead.census(model, [x])
    census = census.with_column("ablation", ablation(model, x)).with_column("importance", importance)
    assert len(census.rank_heads("ablation")) == 3 * HEADS
    head = census.as_json()["heads"][-1]
    assert head["columns"] == {name: float(census.mean(name)[NAMES[2]][-1]) for name in ("ablation", "importance")}


@pytest.mark.parametrize("change", [None, "median", torch.zeros(1)])
def test_other_changes_are_refused(change: Any, model: Stack, x: Tensor) -> None:
    with pytest.raises(DTypeError, match="change: expected a number or 'mean'"):
        ablation(model, x, change=change)
