"""An error that is raised in a module names the module."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.transformer import Encoder, EncoderLayer, FeedForward

E, H = 12, 3


def _note(call: Callable[[], object]) -> str:
    with pytest.raises(clearhead.errors.ClearheadError) as caught:
        call()
    (note,) = caught.value.__notes__
    return note


def _stack() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _fail(module: nn.Module) -> str:
    return _note(lambda: module(torch.randn(2, 5, E), mask=masks.lengths(torch.tensor([1, 2, 3]))))


def test_without_a_name_it_is_the_class_and_the_sizes() -> None:
    assert _fail(clearhead.MultiHeadAttention(E, H)) == (
        "In MultiHeadAttention(embed_dim=12, num_heads=3, head_dim=4)."
    )
    x = torch.randn(2, 5, E + 1)
    note = _note(lambda: clearhead.nn.MultiheadAttention(E, H, batch_first=True)(x, x, x))
    assert note.startswith("In MultiheadAttention(")


def test_upgrade_gives_full_names() -> None:
    model = nn.ModuleDict({"text": _stack()})
    clearhead.upgrade(model, linears=False)
    attention = model["text"].layers[1].self_attn
    wrong = torch.randn(2, 5, E + 1)
    assert _note(lambda: attention(wrong, wrong, wrong)).startswith("In text.layers.1.self_attn: MultiheadAttention(")
    # A record of a part of the model keeps the full name.
    with clearhead.record(model["text"]) as _, torch.no_grad():
        model["text"](torch.randn(2, 5, E))
    assert _note(lambda: attention(wrong, wrong, wrong)).startswith("In text.layers.1.self_attn: ")


def test_a_record_gives_full_names_and_a_copy_has_none() -> None:
    layers = [EncoderLayer(E, clearhead.MultiHeadAttention(E, H), FeedForward(E, 16)) for _ in range(2)]
    model = nn.Sequential(Encoder(layers)).eval()
    with torch.no_grad(), clearhead.record(model):
        model(torch.randn(2, 5, E))
    mask = masks.lengths(torch.tensor([1, 2, 3]))
    assert _note(lambda: model[0](torch.randn(2, 5, E), mask=mask)).startswith("In 0.layers.0.self_attention: ")
    attention = layers[1].self_attention
    assert _fail(attention).startswith("In 0.layers.1.self_attention: MultiHeadAttention(")
    assert _fail(copy.deepcopy(attention)).startswith("In MultiHeadAttention(")


def test_a_shared_module_has_all_its_names() -> None:
    shared = clearhead.MultiHeadAttention(E, H)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = shared, shared

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    with torch.no_grad(), clearhead.record(model := Twice().eval()):
        model(torch.randn(2, 5, E))
    assert _fail(shared).startswith("In first or second: MultiHeadAttention(")


def test_a_loaded_module_has_its_name_in_the_checkpoint() -> None:
    loaded = clearhead.checkpoints.load(_stack().layers[0].state_dict(), num_heads=H)
    assert _fail(loaded).startswith("In self_attn: MultiHeadAttention(")
