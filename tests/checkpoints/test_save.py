"""Writing weights back: the same bits in every naming, on the same device, in the same dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import clearhead
from clearhead.checkpoints import NAMINGS, Naming, identify, load, save
from clearhead.errors import CheckpointError
from clearhead.positions import LogScale

from .lessons import assert_same_bits

E, H = 35, 5


def odd_numbers(module: nn.Module) -> nn.Module:
    """Numbers that a careless conversion would not survive, among ordinary ones."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
            parameter.view(-1)[:4] = torch.tensor([-0.0, float("nan"), float("-inf"), 1e-42])
    return module


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("naming", NAMINGS, ids=lambda naming: naming.name)
def test_there_and_back(naming: Naming, dtype: torch.dtype) -> None:
    ours = odd_numbers(clearhead.MultiHeadAttention(E, H, dtype=dtype))
    theirs = save(ours, naming)
    # The keys of a fused weight do not tell how its rows are sorted.
    named = naming if "query_key_value.weight" in naming.keys else None
    assert identify(theirs, naming=named).naming == naming
    again = load(theirs, H, naming=named)
    assert_same_bits(again.state_dict(), ours.state_dict())
    assert_same_bits(save(again, naming), theirs)


@pytest.mark.parametrize("num_kv_heads", [1, 5])
def test_grouped_heads(num_kv_heads: int) -> None:
    ours = odd_numbers(clearhead.MultiHeadAttention(E, 10, num_kv_heads=num_kv_heads, head_dim=3, bias=False))
    again = load(save(ours, "o_proj"), 10)
    assert again.num_kv_heads == num_kv_heads
    assert_same_bits(again.state_dict(), ours.state_dict())


@pytest.mark.parametrize("naming", ["clearhead", "torch", "gpt2"])
def test_a_device_without_memory_is_kept(naming: str) -> None:
    saved = save(clearhead.MultiHeadAttention(E, H, device="meta"), naming)
    assert all(tensor.is_meta for tensor in (*saved.values(), *load(saved, H).parameters()))


def test_each_tensor_keeps_a_dtype_of_its_own() -> None:
    state = {f"w_{part}.weight": torch.randn(E, E).to(torch.bfloat16) for part in "qkv"}
    state |= {"w_o.weight": torch.randn(E, E), "w_o.bias": torch.randn(E, dtype=torch.float64)}
    assert_same_bits(save(load(state, H), "w_q"), state)


def test_a_bias_for_some_is_written_as_zeros_for_the_others() -> None:
    ours = clearhead.MultiHeadAttention(E, H)
    ours.k_proj = nn.Linear(E, E, bias=False)
    nn.init.ones_(ours.q_proj.bias)
    query, key, _ = save(ours, "torch")["in_proj_bias"].chunk(3)
    assert torch.equal(query, torch.ones(E))
    assert torch.equal(key, torch.zeros(E))
    assert "w_k.bias" not in save(ours, "w_q")


def test_what_is_saved_is_a_copy_without_gradients() -> None:
    ours = clearhead.MultiHeadAttention(E, H)
    for naming in ("clearhead", "torch", "gpt2"):
        for tensor in save(ours, naming).values():
            assert not tensor.requires_grad
            assert tensor.is_contiguous()
            tensor.zero_()
    assert ours.q_proj.weight.abs().sum() > 0


def test_our_own_module_can_be_the_source() -> None:
    ours = clearhead.MultiHeadAttention(E, H, scale=0.5, dropout=0.1).eval()
    again = load(ours)
    assert (again.num_heads, again.scale, again.dropout, again.training) == (H, 0.5, 0.1, False)
    assert_same_bits(again.state_dict(), ours.state_dict())


def two_dtypes() -> clearhead.MultiHeadAttention:
    ours = clearhead.MultiHeadAttention(E, H)
    ours.k_proj.double()
    return ours


def parametrized() -> clearhead.MultiHeadAttention:
    ours = clearhead.MultiHeadAttention(E, H)
    nn.utils.parametrizations.weight_norm(ours.q_proj)
    return ours


@pytest.mark.parametrize(
    ("make", "naming", "text"),
    [
        (two_dtypes, "torch", "several dtypes or devices for what is one tensor there, in_proj_weight"),
        (parametrized, "w_q", r"module\.q_proj: expected a plain nn\.Linear, got Parametrized.* Merge"),
        (lambda: clearhead.MultiHeadAttention(E, H, kdim=17), "timm", "inputs of 35, 17, 35 features, which share one"),
        (lambda: clearhead.MultiHeadAttention(E, H, num_kv_heads=1), "torch", "got .*key/value heads 7 and"),
        (
            lambda: clearhead.MultiHeadAttention(E, H, qdim=17),
            "torch",
            "naming torch has a place for, got query 17,",
        ),
        (lambda: clearhead.MultiHeadAttention(E, H, head_dim=3), "torch", "got .*all heads 15,"),
        (lambda: clearhead.MultiHeadAttention(E, H, gate="head"), "w_q", "got gate_proj.weight, .* no naming has"),
        (lambda: clearhead.MultiHeadAttention(E, H, sinks=True), "w_q", "got sinks, which no naming has"),
        (lambda: clearhead.MultiHeadAttention(E, H, position=LogScale(H)), "w_q", "got position.weight, which no"),
    ],
)
def test_what_cannot_be_saved(make: Callable[[], clearhead.MultiHeadAttention], naming: str, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        save(make(), naming)
