"""`intervene`: heads changed beside the same change made by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead._environment import state
from clearhead.errors import ArgumentError, DTypeError, ShapeError

from .attending import BATCH, HEAD_DIM, HEADS, LENGTH, MODELS, WIDTH, Ours, kinds, made, upgraded


def scaled(model: nn.Module, projection: str, factors: dict[int, float]) -> nn.Module:
    """A copy whose output projection has the heads' columns multiplied: the same as scaling what the heads write."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        weight = twin.get_submodule(projection).weight
        for head, factor in factors.items():
            weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] *= factor
    return twin


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@kinds
@pytest.mark.parametrize("factors", [{1: 0.0}, {0: 0.5, 2: -3.0}, {0: 0.0, 1: 0.0, 2: 0.0}, {2: 1}], ids=str)
def test_scaling_is_scaling_the_projections_columns(kind: str, factors: dict[int, float]) -> None:
    model, name, _, x = made(kind)
    with clearhead.intervene(model, {(name, head): factor for head, factor in factors.items()}):
        found = model(x)
    close(found, scaled(model, MODELS[kind][2], factors)(x))
    if set(factors.values()) != {1}:
        assert not torch.allclose(found, model(x))


def head_output(model: nn.Module, name: str, head: int, x: Tensor) -> Tensor:
    """What a head writes, taken on its way."""
    seen: list[Tensor] = []

    def look(output: Tensor) -> Tensor:
        seen.append(output)
        return output

    with torch.no_grad(), clearhead.intervene(model, {(name, head): look}):
        model(x)
    return seen[0]


@kinds
def test_a_function_sees_the_heads_output(kind: str) -> None:
    """The projection's input holds the heads side by side."""
    model, name, projection, x = made(kind)
    inputs: list[Tensor] = []
    handle = projection.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    expected = model(x)
    handle.remove()
    close(head_output(model, name, 2, x), inputs[0][..., 2 * HEAD_DIM :])
    with clearhead.intervene(model, {(name, 2): lambda output: output}):
        close(model(x), expected)


@kinds
def test_a_function_may_do_anything(kind: str) -> None:
    model, name, _, x = made(kind)
    with clearhead.intervene(model, {(name, 1): lambda output: -2 * output}):
        found = model(x)
    close(found, scaled(model, MODELS[kind][2], {1: -2.0})(x))


@kinds
def test_patching_a_heads_own_output_back_changes_nothing(kind: str) -> None:
    model, name, _, x = made(kind)
    with clearhead.intervene(model, {(name, 0): head_output(model, name, 0, x)}):
        close(model(x), model(x))


@kinds
def test_patching_in_another_inputs_output(kind: str) -> None:
    model, name, projection, x = made(kind)
    other = torch.randn_like(x)
    patch = head_output(model, name, 1, other)
    inputs: list[Tensor] = []
    with clearhead.intervene(model, {(name, 1): patch}):
        handle = projection.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        model(x)
        handle.remove()
    close(inputs[0][..., HEAD_DIM : 2 * HEAD_DIM], patch)
    close(inputs[0][..., :HEAD_DIM], head_output(model, name, 0, x))


@pytest.mark.parametrize("shape", [(HEAD_DIM,), (LENGTH, HEAD_DIM), (BATCH, 1, HEAD_DIM), ()], ids=str)
def test_patches_broadcast(shape: tuple[int, ...]) -> None:
    model, name, _, x = made("Clearhead's")
    patch = torch.randn(shape).double()
    with clearhead.intervene(model, {(name, 0): patch}):
        found = model(x)
    with clearhead.intervene(model, {(name, 0): patch.expand(BATCH, LENGTH, HEAD_DIM)}):
        close(found, model(x))


@kinds
def test_mean_ablation(kind: str) -> None:
    model, name, _, x = made(kind)
    mean = head_output(model, name, 2, x).mean((0, 1))
    with clearhead.intervene(model, {(name, 2): "mean"}):
        found = model(x)
    with clearhead.intervene(model, {(name, 2): mean}):
        close(found, model(x))


def test_the_mean_leaves_out_queries_that_see_nothing() -> None:
    module, x = clearhead.MultiHeadAttention(WIDTH, HEADS).double(), torch.randn(BATCH, LENGTH, WIDTH).double()
    visible = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    visible[1, :, :4] = False
    outputs: list[Tensor] = []

    def look(output: Tensor) -> Tensor:
        outputs.append(output)
        return output

    with torch.no_grad(), clearhead.intervene(module, {("", 0): look}):
        module(x, mask=visible)
    seeing = outputs[0][visible.any(-1).squeeze(1)]
    assert len(seeing) == BATCH * LENGTH - 4
    with clearhead.intervene(module, {("", 0): "mean"}):
        found = module(x, mask=visible)
    with clearhead.intervene(module, {("", 0): seeing.mean(0)}):
        close(found, module(x, mask=visible))


@kinds
def test_gradients_flow(kind: str) -> None:
    model, name, _, x = made(kind)
    twin = scaled(model, MODELS[kind][2], {1: 0.5})
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    with clearhead.intervene(model, {(name, 1): 0.5}):
        model(ours).square().sum().backward()
    twin(theirs).square().sum().backward()
    close(ours.grad, theirs.grad)


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_gradients_under_activation_checkpointing(use_reentrant: bool) -> None:
    """What is recomputed in the backward pass has to be changed in the same way."""

    class Checkpointed(Ours):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=use_reentrant)

    model, plain = Checkpointed().double(), Ours().double()
    model.load_state_dict(plain.state_dict())
    gradients: list[Tensor] = []
    for each in (model, plain):
        x = torch.ones(BATCH, LENGTH, WIDTH).double().cumsum(1).div(7).sin().requires_grad_()
        with clearhead.intervene(each, {("attend", 1): 0.5}):
            each(x).square().sum().backward()
        found = [x.grad, *(parameter.grad for parameter in each.parameters())]
        gradients.append(torch.cat([gradient.flatten() for gradient in found if gradient is not None]))
    close(*gradients)


def test_gradients_flow_into_a_patch() -> None:
    model, name, _, x = made("Clearhead's")
    patch = torch.zeros(HEAD_DIM, dtype=torch.float64, requires_grad=True)
    with clearhead.intervene(model, {(name, 1): patch}):
        model(x).square().sum().backward()
    assert patch.grad is not None
    assert patch.grad.abs().min() > 0


def test_only_the_named_module_changes() -> None:
    model = upgraded().double()
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    first = model.layers[0](x)
    with clearhead.intervene(model, {("layers.1.self_attn", 0): 0.0}):
        close(model.layers[0](x), first)
        model(x)


def test_every_call_of_the_block_is_changed() -> None:
    model, name, _, x = made("Clearhead's")
    with clearhead.intervene(model, {(name, 1): 0.0}):
        once, twice = model(x), model(x)
    close(once, twice)


def test_dropout_and_padding_go_on() -> None:
    model = upgraded().double().train()
    x = torch.randn(BATCH, LENGTH, WIDTH).double()
    hidden = torch.arange(LENGTH) >= torch.tensor([[LENGTH], [3]])
    with clearhead.intervene(model, {("layers.0.self_attn", 0): 0.0}):
        found = model(x, src_key_padding_mask=hidden)
    poisoned = x.masked_fill(hidden[..., None], 1e6)
    with clearhead.intervene(model, {("layers.0.self_attn", 0): 0.0}):
        close(model(poisoned, src_key_padding_mask=hidden)[~hidden], found[~hidden])


def test_a_record_inside_sees_the_attention_and_changes_nothing() -> None:
    model, name, _, x = made("Clearhead's")
    with clearhead.intervene(model, {(name, 1): 0.0}):
        alone = model(x)
        with clearhead.record(model) as rec:
            close(model(x), alone)
    assert list(rec) == [name]


def test_a_function_may_itself_attend() -> None:
    model, name, _, x = made("Clearhead's")

    def attend(output: Tensor) -> Tensor:
        heads = output[:, None]
        return clearhead.attention(heads, heads, heads)[:, 0]

    with clearhead.intervene(model, {(name, 1): attend}):
        found = model(x)
    with clearhead.intervene(model, {(name, 1): attend(head_output(model, name, 1, x))}):
        close(found, model(x))


def test_a_compiled_model_is_changed_too() -> None:
    model, name, _, x = made("Clearhead's")
    expected = scaled(model, MODELS["Clearhead's"][2], {1: 0.0})(x)
    model.compile(backend="eager")
    model(x)
    with clearhead.intervene(model, {(name, 1): 0.0}):
        close(model(x), expected)


def test_nothing_is_left_behind() -> None:
    model, name, _, x = made("Clearhead's")
    expected = model(x)
    with pytest.raises(ZeroDivisionError), clearhead.intervene(model, {(name, 1): lambda output: output / (1 // 0)}):
        model(x)
    assert not state.observers
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    close(model(x), expected)


REFUSED: dict[str, tuple[type[Exception], str, Any]] = {
    "name": (
        ArgumentError,
        "changes: expected names of the model's modules, got 'atend'.*Near: attend",
        {("atend", 0): 0.0},
    ),
    "negative head": (ArgumentError, "changes: expected head numbers ≥ 0, got -1", {("attend", -1): 0.0}),
    "head as text": (ArgumentError, "changes: expected head numbers ≥ 0, got '1'", {("attend", "1"): 0.0}),
    "head not there": (ArgumentError, "changes: expected a head of 'attend', 0 … 2, got 3", {("attend", 3): 0.0}),
    "change": (
        DTypeError,
        "changes: expected a number, 'mean', a tensor or a function, got list",
        {("attend", 0): [1]},
    ),
    "word": (
        DTypeError,
        "changes: expected a number, 'mean', a tensor or a function, got str",
        {("attend", 0): "zero"},
    ),
    "patch": (
        ShapeError,
        r"changes: expected a patch that broadcasts.*\(2, 7, 4\), got \(5, 4\)",
        {("attend", 0): torch.ones(5, 4)},
    ),
    "function's shape": (
        ShapeError,
        r"changes: expected a tensor \(2, 7, 4\), got",
        {("attend", 0): lambda x: x[:, :3]},
    ),
    "function's type": (ShapeError, "changes: expected a tensor .*got NoneType", {("attend", 0): lambda x: None}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    kind, text, changes = REFUSED[case]
    model, _, _, x = made("Clearhead's")
    with pytest.raises(kind, match=text), clearhead.intervene(model, changes):
        model(x)


def test_attention_that_does_not_run_through_clearhead() -> None:
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    text = r"expected modules whose attention runs through Clearhead, got 'self_attn'.*clearhead\.upgrade\(model\)"
    with pytest.raises(ArgumentError, match=text), clearhead.intervene(model, {("self_attn", 0): 0.0}):
        model(x)
