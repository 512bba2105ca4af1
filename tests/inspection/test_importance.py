"""`head_importance`: derivatives beside finite differences."""

from __future__ import annotations

import io
from contextlib import redirect_stdout, suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

import clearhead
from clearhead.errors import ArgumentError, ShapeError

from .attending import (
    BATCH,
    HEAD_DIM,
    HEADS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Checkpointed,
    Ours,
    kinds,
    llama,
    made,
    upgraded,
)
from .stacks import nothing_left


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def importance(model: nn.Module, *batches: Tensor) -> dict[str, Tensor]:
    return clearhead.head_importance(model, batches, squares, progress=False)


@kinds
def test_importance_is_the_derivative_in_the_heads_gate(kind: str) -> None:
    """Michel et al.: per example the absolute derivative at gate 1, here by central differences, then the mean."""
    model, name, _, _ = made(kind)
    batches = [torch.randn(size, LENGTH, WIDTH).double() for size in (3, 2)]
    values = importance(model, *batches)
    # The RMSNorm of transformers' Llama computes in float32, whatever comes in.
    step, rtol = (3e-3, 1e-3) if kind == "transformers" else (1e-5, 1e-6)
    expected = torch.zeros(HEADS, dtype=torch.float64)
    for head in range(HEADS):
        for x in [item[None] for batch in batches for item in batch]:
            losses: list[float] = []
            for gate in (1 + step, 1 - step):
                with torch.no_grad(), clearhead.intervene(model, {(name, head): gate}):
                    losses.append(float(squares(model, x)))
            expected[head] += abs(losses[0] - losses[1]) / (2 * step)
    torch.testing.assert_close(values[name], expected / 5, rtol=rtol, atol=1e-9)


def test_importance_of_every_layer_in_running_order() -> None:
    values = importance(upgraded(), torch.randn(BATCH, LENGTH, WIDTH))
    assert list(values) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all(value.shape == (HEADS,) and bool((value > 0).all()) for value in values.values())


def test_importance_leaves_the_model_unchanged() -> None:
    """Also with frozen parameters. A head with an output projection of zero has no importance."""
    model, name, projection, x = made("Clearhead's")
    with torch.no_grad():
        projection.weight[:, HEAD_DIM : 2 * HEAD_DIM] = 0
    model.train()
    projection.weight.grad = torch.ones_like(projection.weight)
    with torch.no_grad():
        values = importance(model, x)[name]
    assert (values > 0).tolist() == [True, False, True]
    assert model.training
    assert bool((projection.weight.grad == 1).all())
    assert model.attend.q_proj.weight.grad is None
    assert nothing_left(model)
    torch.testing.assert_close(importance(model.requires_grad_(False), x)[name], values)


def test_importance_takes_any_batches() -> None:
    model = llama()
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["ids"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())

    values = clearhead.head_importance(model, ({"ids": ids} for _ in range(2)), loss, progress=False)
    assert list(values) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_importance_under_activation_checkpointing_is_right_or_refused(use_reentrant: bool) -> None:
    plain, model = Ours().double(), Checkpointed(use_reentrant).double()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(BATCH, LENGTH, WIDTH).double().requires_grad_()
    expected = importance(plain, x)
    with suppress(ArgumentError, CheckpointError):
        torch.testing.assert_close(importance(model, x), expected)


@pytest.mark.parametrize("progress", [True, False])
def test_progress(progress: bool) -> None:
    model, _, _, x = made("Clearhead's")
    with redirect_stdout(io.StringIO()) as terminal:
        clearhead.head_importance(model, [x, x], squares, progress=progress)
    assert ("head importance" in terminal.getvalue()) == progress
    assert progress or not terminal.getvalue()


def test_importance_refuses() -> None:
    model, _, _, x = made("Clearhead's")
    with pytest.raises(ArgumentError, match="model, batches: expected batches on which attention runs through Clear"):
        importance(model)
    with pytest.raises(ArgumentError, match=r"model, batches: .*clearhead\.upgrade\(model\)"):
        importance(nn.Linear(WIDTH, 1).double(), x)
    with pytest.raises(ShapeError, match=r"loss: expected a scalar, got \(2, 7, 12\)"):
        clearhead.head_importance(model, [x], lambda model, batch: model(batch), progress=False)
