"""`intervene`, compared with the same change made by hand, and `head_importance`, with finite differences."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import clearhead
import clearhead.integrations.transformers
from clearhead import masks
from clearhead.errors import ArgumentError
from tests.integrations.architectures import token_ids

from .conftest import nothing_left
from .small_models import small

BATCH, LENGTH, WIDTH, HEADS = 2, 7, 12, 3
HEAD_DIM = WIDTH // HEADS
close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)


class Ours(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.MultiHeadAttention(WIDTH, HEADS, mask=masks.causal())


class Checkpointed(Ours):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


def upgraded() -> nn.Module:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    clearhead.upgrade(model)
    return model


def llama() -> Any:
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": 1, "head_dim": HEAD_DIM}
    model = small("llama", hidden_size=WIDTH, intermediate_size=16, **heads)
    model.set_attn_implementation("clearhead")
    return model


class Logits(nn.Module):
    """A transformers model as a function of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).logits


# How to make the model, the name of an attention module in it, and the name of its output projection.
MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "Clearhead's": (Ours, "attend", "attend.out_proj"),
    "upgraded": (upgraded, "layers.1.self_attn", "layers.1.self_attn.out_proj"),
    "transformers": (Logits, "model.model.layers.0.self_attn", "model.model.layers.0.self_attn.o_proj"),
}
kinds = pytest.mark.parametrize("kind", MODELS)


def made(kind: str) -> tuple[nn.Module, str, nn.Linear, Tensor]:
    make, name, projection = MODELS[kind]
    model = make().double()
    return model, name, model.get_submodule(projection), torch.randn(BATCH, LENGTH, WIDTH).double()


OURS = "Clearhead's"


def changed(model: nn.Module, changes: Any, *inputs: Tensor, **options: Any) -> Tensor:
    with clearhead.intervene(model, changes):
        return model(*inputs, **options)


def scaled(kind: str, model: nn.Module, factors: dict[int, float]) -> nn.Module:
    """A copy whose output projection has the heads' columns multiplied, which equals scaling the heads' outputs."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        weight = twin.get_submodule(MODELS[kind][2]).weight
        for head, factor in factors.items():
            weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] *= factor
    return twin


def head_output(model: nn.Module, name: str, head: int, *inputs: Tensor, **options: Any) -> Tensor:
    outputs: list[Tensor] = []
    with torch.no_grad():
        changed(model, {(name, head): lambda output: outputs.append(output) or output}, *inputs, **options)
    return outputs[0]


@kinds
@pytest.mark.parametrize("factors", [{1: 0.0}, {0: 0.5, 2: -3.0}, {0: 0.0, 1: 0.0, 2: 0.0}, {2: 1}], ids=str)
def test_scaling_equals_scaling_the_projections_columns(kind: str, factors: dict[int, float]) -> None:
    model, name, _, x = made(kind)
    expected = scaled(kind, model, factors)
    for change in (lambda factor: factor, lambda factor: lambda output: factor * output):
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        result = changed(model, {(name, head): change(factor) for head, factor in factors.items()}, ours)
        close(result, expected(theirs))
        (gradient,) = torch.autograd.grad(result.square().sum(), ours)
        close(gradient, *torch.autograd.grad(expected(theirs).square().sum(), theirs))
    assert torch.allclose(result, model(x)) == (set(factors.values()) == {1})


@kinds
def test_patches(kind: str) -> None:
    """The projection's input holds the heads side by side."""
    model, name, projection, x = made(kind)
    inputs: list[Tensor] = []
    projection.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    expected = model(x)
    same, other = head_output(model, name, 2, x), head_output(model, name, 2, torch.randn_like(x))
    close(same, inputs[0][..., 2 * HEAD_DIM :])
    close(changed(model, {(name, 2): same}, x), expected)
    patched = changed(model, {(name, 2): other}, x)
    close(inputs[-1][..., 2 * HEAD_DIM :], other)
    close(inputs[-1][..., : 2 * HEAD_DIM], inputs[0][..., : 2 * HEAD_DIM])
    assert not torch.allclose(patched, expected)
    mean = same.mean((0, 1))
    close(changed(model, {(name, 2): "mean"}, x), changed(model, {(name, 2): mean}, x))


@pytest.mark.parametrize("shape", [(HEAD_DIM,), (LENGTH, HEAD_DIM), (BATCH, 1, HEAD_DIM), ()], ids=str)
def test_patches_broadcast_and_have_gradients(shape: tuple[int, ...]) -> None:
    model, name, _, x = made(OURS)
    patch = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    output = changed(model, {(name, 0): patch}, x)
    close(output, changed(model, {(name, 0): patch.expand(BATCH, LENGTH, HEAD_DIM)}, x))
    output.square().sum().backward()
    assert patch.grad is not None
    assert patch.grad.abs().min() > 0


def test_the_mean_excludes_fully_masked_queries() -> None:
    module, x = clearhead.MultiHeadAttention(WIDTH, HEADS).double(), torch.randn(BATCH, LENGTH, WIDTH).double()
    visible = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    visible[1, :, :4] = False
    mean = head_output(module, "", 0, x, mask=visible)[visible.any(-1).squeeze(1)].mean(0)
    close(changed(module, {("", 0): "mean"}, x, mask=visible), changed(module, {("", 0): mean}, x, mask=visible))


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_gradients_under_activation_checkpointing(use_reentrant: bool) -> None:
    """Recomputation in the backward pass applies the same changes."""
    model, plain = Checkpointed(use_reentrant).double(), Ours().double()
    model.load_state_dict(plain.state_dict())
    gradients: list[Tensor] = []
    for each in (model, plain):
        x = torch.ones(BATCH, LENGTH, WIDTH).double().cumsum(1).div(7).sin().requires_grad_()
        with clearhead.intervene(each, {("attend", 1): 0.5}):
            each(x).square().sum().backward()
        leaves = [x, *each.parameters()]
        gradients.append(torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None]))
    close(*gradients)


def test_only_the_named_module_changes_and_padding_stays_out() -> None:
    model = upgraded().double().train()
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    hidden = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [3]])
    first = model.layers[0](x)
    with clearhead.intervene(model, {("layers.1.self_attn", 0): 0.0}):
        close(model.layers[0](x), first)
        clean = model(x, src_key_padding_mask=hidden)
        close(model(x, src_key_padding_mask=hidden), clean)
        poisoned = x.masked_fill(hidden[..., None], 1e6)
        close(model(poisoned, src_key_padding_mask=hidden)[~hidden], clean[~hidden])


def test_a_record_inside_covers_the_attention_and_changes_nothing() -> None:
    model, name, _, x = made(OURS)
    with clearhead.intervene(model, {(name, 1): 0.0}):
        alone = model(x)
        with clearhead.record(model) as rec:
            close(model(x), alone)
    assert list(rec) == [name]


def test_a_function_may_itself_attend() -> None:
    model, name, _, x = made(OURS)

    def attend(output: Tensor) -> Tensor:
        heads = output[:, None]
        return clearhead.attention(heads, heads, heads)[:, 0]

    patch = attend(head_output(model, name, 1, x))
    close(changed(model, {(name, 1): attend}, x), changed(model, {(name, 1): patch}, x))


def test_a_compiled_model_is_changed_too() -> None:
    model, name, _, x = made(OURS)
    expected = scaled(OURS, model, {1: 0.0})(x)
    model.compile(backend="eager")
    model(x)
    close(changed(model, {(name, 1): 0.0}, x), expected)


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


def test_importance_leaves_the_model_unchanged() -> None:
    """Also with frozen parameters. A head with an output projection of zero has no importance."""
    model, name, projection, x = made(OURS)
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


def test_importance_takes_any_batches_and_has_layers_in_running_order() -> None:
    model = llama()
    ids = token_ids(LENGTH)

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
    model, _, _, x = made(OURS)
    with redirect_stdout(io.StringIO()) as terminal:
        clearhead.head_importance(model, [x, x], squares, progress=progress)
    assert ("head importance" in terminal.getvalue()) == progress
    assert progress or not terminal.getvalue()
