"""What the processes agree on when a module is split: the same module in each, and parts that it uses twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import masks
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel
from clearhead.errors import ArgumentError, DistributedError
from clearhead.transformer import Encoder, EncoderLayer, FeedForward

from .building import EMBED, attention, encoder, gradients, require_close
from .comparing import compare_in_parts
from .meshes import line
from .processes import Processes

SPLITS = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}


def _see_all(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= 0 * k


class _Turning:
    """A position part without a text of its own."""

    def __call__(self, q: Tensor, k: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        return q, k


def _layer(**options: Any) -> EncoderLayer:
    feed_forward = FeedForward(EMBED, 24, activation=options.pop("activation", None))
    return EncoderLayer(EMBED, attention(4), feed_forward, **options).double()


#: What one process has, and what is named.
OTHERS: dict[str, tuple[Any, Any, str]] = {
    "softcap": (lambda: attention(4), lambda: attention(4, softcap=5.0), "softcap of the module"),
    "scale": (lambda: attention(4), lambda: attention(4, scale=0.1), "scale of the module"),
    "dropout": (lambda: attention(4), lambda: attention(4, dropout=0.1), "dropout of the module"),
    "alibi": (lambda: attention(4), lambda: attention(4, mask="alibi"), "mask of the module"),
    "window": (
        lambda: attention(4, mask=masks.sliding_window(2, 0)),
        lambda: attention(4, mask=masks.sliding_window(3, 0)),
        "mask of the module",
    ),
    "rotary": (lambda: attention(4), lambda: attention(4, position="rotary"), "position of the module"),
    "scaled rotary": (
        lambda: attention(4, position="rotary"),
        lambda: attention(4, position="rotary of the length"),
        "position of the module",
    ),
    "q_norm": (lambda: attention(4), lambda: attention(4, q_norm="norm"), "q_norm of the module"),
    "k_norm": (lambda: attention(4), lambda: attention(4, k_norm="layer norm"), "k_norm of the module"),
    "activation": (_layer, lambda: _layer(activation=nn.functional.gelu), "parts beside attention"),
    "residual dropout": (_layer, lambda: _layer(dropout=0.1), "parts beside attention"),
    "norm first": (_layer, lambda: _layer(norm_first=True), "module"),
    "heads": (lambda: attention(4), lambda: attention(2), "module"),
    "frozen": (lambda: attention(4), lambda: attention(4).requires_grad_(False), "module"),
    "layers": (lambda: encoder(1), lambda: encoder(2), "attention modules"),
}


def _other(function: str, name: str) -> None:
    make, other, said = OTHERS[name]
    module = other() if torch.distributed.get_rank() else make()
    with pytest.raises(
        DistributedError, match=rf"^{function}: {said}: expected the same .* (in process 1 of the group|got \[1, 2\])"
    ):
        SPLITS[function](module, line())
    SPLITS[function](make(), line())


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("function", SPLITS)
def test_another_module_is_refused_by_name(two: Processes, function: str, name: str) -> None:
    two.run(_other, function, name)


def _equal(function: str) -> None:
    """Objects of this process alone, and addresses that differ, make no other module."""
    for _ in range(torch.distributed.get_rank() + 1):
        kept = [_Turning() for _ in range(97)]
    SPLITS[function](attention(4, position=kept[-1], mask=masks.mask_mod(_see_all)), line())


@pytest.mark.parametrize("function", SPLITS)
def test_equal_modules_are_split(two: Processes, function: str) -> None:
    two.run(_equal, function)


def _shared() -> None:
    layer = encoder(1, kv_heads=1).layers[0]
    whole, x = Encoder([layer, layer]).double(), torch.randn(2, 9, EMBED, dtype=torch.float64)
    compare_in_parts(whole, None, x, prepare=lambda module: tensor_parallel(module, line()), mask=masks.causal())
    split = context_parallel(copy.deepcopy(whole), line())
    part = shard_sequence(x, line())
    output = split(part, mask=masks.causal())
    require_close(output, shard_sequence(whole(x, mask=masks.causal()), line()), 1e-12)
    output.sum().backward()
    whole(x, mask=masks.causal()).sum().backward()
    expected = gradients(whole)
    for name, found in gradients(split).items():
        torch.distributed.all_reduce(found)
        require_close(found, expected[name], 1e-12, name)


def test_a_layer_that_is_used_twice_is_split_once(two: Processes) -> None:
    two.run(_shared)


def _tied() -> None:
    whole = encoder(2, kv_heads=4)
    first, second = (layer.self_attention for layer in whole.layers)
    second.q_proj.weight = first.q_proj.weight  # type: ignore[union-attr]
    said = (
        r"module.layers.1.self_attention.q_proj.weight: expected a parameter of one part, got that of module.layers.0"
    )
    with pytest.raises(ArgumentError, match=said):
        tensor_parallel(whole, line())
    rows = _layer()
    rows.self_attention.out_proj = rows.self_attention.q_proj  # type: ignore[union-attr]
    with pytest.raises(ArgumentError, match=r"expected a part that is split in one way, got that of module.self_att"):
        tensor_parallel(rows, line())


def test_parameters_that_two_parts_share_are_refused(two: Processes) -> None:
    two.run(_tied)


def _dropped() -> None:
    split, x = tensor_parallel(_layer(dropout=0.5), line()), torch.randn(2, 9, EMBED, dtype=torch.float64)
    torch.manual_seed(torch.distributed.get_rank())
    split.eval()(x)
    split.train()
    said = "tensor_parallel: dropout: state of PyTorch's generator: expected the same in every process"
    with pytest.raises(DistributedError, match=said):
        split(x)
    torch.manual_seed(3)
    output = split(x).detach()
    first = output.clone()
    torch.distributed.broadcast(first, 0)
    assert torch.equal(output, first)


def test_dropout_of_processes_that_were_seeded_apart_is_refused(two: Processes) -> None:
    two.run(_dropped)
