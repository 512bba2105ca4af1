"""`head_importance`: derivatives beside finite differences."""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import clearhead
from clearhead._environment import state
from clearhead.errors import ArgumentError, ShapeError

from .attending import BATCH, HEAD_DIM, HEADS, LENGTH, VOCABULARY, WIDTH, Ours, kinds, llama, made, upgraded


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@kinds
def test_importance_is_the_derivative_in_the_heads_gate(kind: str) -> None:
    """Michel et al.: per example the absolute derivative at gate 1, here by central differences, then the mean."""
    model, name, _, _ = made(kind)
    batches = [torch.randn(size, LENGTH, WIDTH).double() for size in (3, 2)]
    found = clearhead.head_importance(model, batches, squares, progress=False)
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
    torch.testing.assert_close(found[name], expected / 5, rtol=rtol, atol=1e-9)


def test_importance_of_every_layer_in_running_order() -> None:
    model = upgraded()
    found = clearhead.head_importance(model, [torch.randn(BATCH, LENGTH, WIDTH)], squares, progress=False)
    assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all(value.shape == (HEADS,) and bool((value > 0).all()) for value in found.values())


def test_a_head_that_writes_nothing_does_not_matter() -> None:
    model, name, projection, x = made("Clearhead's")
    with torch.no_grad():
        projection.weight[:, HEAD_DIM : 2 * HEAD_DIM] = 0
    found = clearhead.head_importance(model, [x], squares, progress=False)[name]
    assert found[1] == 0
    assert found[0] > 0


def test_importance_leaves_the_model_as_it_was() -> None:
    model, _, projection, x = made("Clearhead's")
    model.train()
    projection.weight.grad = torch.ones_like(projection.weight)
    with torch.no_grad():
        clearhead.head_importance(model, [x], squares, progress=False)
    assert model.training
    assert bool((projection.weight.grad == 1).all())
    assert model.attend.q_proj.weight.grad is None
    assert not state.observers


def test_importance_with_frozen_parameters() -> None:
    model, name, _, x = made("Clearhead's")
    expected = clearhead.head_importance(model, [x], squares, progress=False)[name]
    found = clearhead.head_importance(model.requires_grad_(False), [x], squares, progress=False)[name]
    torch.testing.assert_close(found, expected)


def test_importance_takes_any_batches() -> None:
    model = llama()
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["ids"]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten())

    found = clearhead.head_importance(model, ({"ids": ids} for _ in range(2)), loss, progress=False)
    assert list(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_importance_under_activation_checkpointing_is_right_or_refused(use_reentrant: bool) -> None:
    class Checkpointed(Ours):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    plain = Ours().double()
    model = Checkpointed().double()
    model.load_state_dict(plain.state_dict())
    x = torch.randn(BATCH, LENGTH, WIDTH).double().requires_grad_()
    expected = clearhead.head_importance(plain, [x], squares, progress=False)
    try:
        found = clearhead.head_importance(model, [x], squares, progress=False)
    except (ArgumentError, CheckpointError):
        return
    torch.testing.assert_close(found["attend"], expected["attend"])


def test_progress_is_shown_when_wanted() -> None:
    model, _, _, x = made("Clearhead's")
    shown: dict[bool, str] = {}
    for progress in (True, False):
        terminal = io.StringIO()
        with redirect_stdout(terminal):
            clearhead.head_importance(model, [x, x], squares, progress=progress)
        shown[progress] = terminal.getvalue()
    assert "head importance" in shown[True]
    assert shown[False] == ""


def test_importance_refuses() -> None:
    model, _, _, x = made("Clearhead's")
    with pytest.raises(ArgumentError, match="model, batches: expected batches on which attention runs through Clear"):
        clearhead.head_importance(model, [], squares, progress=False)
    with pytest.raises(ArgumentError, match=r"model, batches: .*clearhead\.upgrade\(model\)"):
        clearhead.head_importance(nn.Linear(WIDTH, 1).double(), [x], squares, progress=False)
    with pytest.raises(ShapeError, match=r"loss: expected a scalar, got \(2, 7, 12\)"):
        clearhead.head_importance(model, [x], lambda model, batch: model(batch), progress=False)
