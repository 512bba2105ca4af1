"""Tiny calls with masks, and of two or three inputs, give in one step the bits of the ordinary way."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import masks
from clearhead.errors import ShapeError
from clearhead.masks._base import Mask
from clearhead.nn._short_ways import tiny

from .tiny_layers import B, E, H, L, made, needs_native, went_in_one_step

S = 7
DROP_INS = ["drop-in", "drop-in, length first", "drop-in without bias"]
drop_ins = pytest.mark.parametrize("kind", DROP_INS)

pytestmark = needs_native


def nothing_done(*_: object) -> None:
    pass


def padding(keys: int) -> Tensor:
    hidden = torch.arange(keys) >= torch.tensor([[keys], [2], [keys - 1]])
    return hidden[:B]


def triangle(keys: int) -> Tensor:
    return torch.ones(L, keys, dtype=torch.bool).triu(1)


def blind(keys: int) -> Tensor:
    """Query 2 sees nothing, and key 1 is seen by nobody."""
    hidden = torch.zeros(L, keys, dtype=torch.bool)
    hidden[2] = hidden[:, 1] = True
    return hidden


def added(hidden: Tensor) -> Tensor:
    numbers = torch.linspace(-1, 1, hidden.numel()).view(hidden.shape)
    return numbers.masked_fill(hidden, -torch.inf)


MASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda keys: {},
    "padding": lambda keys: {"key_padding_mask": padding(keys)},
    "padding that hides nothing": lambda keys: {"key_padding_mask": torch.zeros(B, keys, dtype=torch.bool)},
    "padding of numbers": lambda keys: {"key_padding_mask": added(padding(keys))},
    "triangle": lambda keys: {"attn_mask": triangle(keys)},
    "blind": lambda keys: {"attn_mask": blind(keys)},
    "numbers": lambda keys: {"attn_mask": added(blind(keys))},
    "both": lambda keys: {"attn_mask": triangle(keys), "key_padding_mask": padding(keys)},
    "both of numbers": lambda keys: {"attn_mask": added(triangle(keys)), "key_padding_mask": added(padding(keys))},
    "one of each": lambda keys: {"attn_mask": added(blind(keys)), "key_padding_mask": padding(keys)},
    "causal and padding": lambda keys: {"is_causal": True, "key_padding_mask": padding(keys)},
    "causal and both": lambda keys: {
        "is_causal": True,
        "attn_mask": added(blind(keys)),
        "key_padding_mask": padding(keys),
    },
}
every_mask = pytest.mark.parametrize("name", MASKS)
every_input = pytest.mark.parametrize("count", [1, 2, 3], ids=["alone", "two inputs", "three inputs"])


def drawn(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value of so many different tensors."""
    lengths = (L, S, S) if count > 1 else (L,)
    x = [torch.linspace(-2, 2, B * n * E, dtype=dtype).view(B, n, E).mul(i + 1.3).sin() for i, n in enumerate(lengths)]
    return [each.requires_grad_() for each in x[:count]]


def attend(module: nn.Module, inputs: list[Tensor], given: dict[str, Any]) -> Tensor:
    """The output, of inputs that have been computed, so that they are no leaves."""
    x = [1.5 * each for each in inputs]
    query, key, value = x[0], x[min(1, len(x) - 1)], x[-1]
    if not isinstance(module, nn.MultiheadAttention):
        return module(query, key, value, **given)
    if module.batch_first:
        return module(query, key, value, need_weights=False, **given)[0]
    turned = {id(each): each.transpose(0, 1).contiguous() for each in x}
    query, key, value = (turned[id(each)] for each in (query, key, value))
    return module(query, key, value, need_weights=False, **given)[0].transpose(0, 1)


def derivatives(module: nn.Module, inputs: list[Tensor], given: dict[str, Any]) -> list[Tensor]:
    output = attend(module, inputs, given)
    return [output, *torch.autograd.grad(output.square().sum(), [*inputs, *module.parameters()])]


def is_one_step(output: Tensor) -> bool:
    function = output.grad_fn
    return went_in_one_step(output) or "_OneStepBackward" in str(function.next_functions if function else "")


def same_bits(module: nn.Module, count: int, given: dict[str, Any]) -> None:
    inputs = drawn(count)
    assert is_one_step(attend(module, inputs, given))
    found = derivatives(module, inputs, given)
    with torch.no_grad():
        alone = attend(module, inputs, given)
    handles = [child.register_forward_hook(nothing_done) for child in module.children()]
    assert not is_one_step(attend(module, inputs, given))
    expected = derivatives(module, inputs, given)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    with torch.no_grad():
        assert torch.equal(attend(module, inputs, given), alone)
    for handle in handles:
        handle.remove()


def close_to_exact(module: nn.Module, count: int, given: dict[str, Any]) -> None:
    found = derivatives(module, drawn(count), given)
    exact = derivatives(copy.deepcopy(module).double(), drawn(count, torch.float64), given)
    for group in (slice(0, 1), slice(1, None)):  # the gradient of a key's bias is nothing but rounding
        largest = max(float(each.detach().abs().max()) for each in exact[group])
        for one, other in zip(found[group], exact[group], strict=True):
            assert (one.double() - other).abs().max() < 1e-5 * largest


@drop_ins
@every_mask
@every_input
def test_the_drop_in(kind: str, name: str, count: int) -> None:
    module, given = made(kind), MASKS[name](L if count == 1 else S)
    same_bits(module, count, given)
    close_to_exact(module, count, given)


@pytest.mark.parametrize("kind", ["own", "drop-in", "drop-in, length first"])
def test_a_query_that_is_the_value_too(kind: str) -> None:
    module, (x, key) = made(kind), [each[:, :L].detach() for each in drawn(2)]

    def run(value: Tensor) -> Tensor:
        if kind == "own":
            return module(x, key, value)
        return module(x, key, value, need_weights=False)[0]

    assert torch.equal(run(x), run(x.clone()))
    assert (run(x) - run(key)).abs().max() > 1e-3


OWN: dict[str, Callable[[int], Mask | Tensor | None]] = {
    "none": lambda keys: None,
    "a bool tensor": lambda keys: ~triangle(keys),
    "keys": lambda keys: masks.keep(keys=~padding(keys)),
    "numbers": lambda keys: masks.bias(added(blind(keys))),
    "numbers of each item": lambda keys: masks.bias(added(blind(keys)).expand(B, L, keys).clone()),
    "causal and keys": lambda keys: masks.causal() & masks.drop(keys=padding(keys)),
}


@pytest.mark.parametrize("kind", ["own", "without biases", "one bias", "grouped", "scaled"])
@pytest.mark.parametrize("name", OWN)
@every_input
def test_the_module(kind: str, name: str, count: int) -> None:
    module, given = made(kind), {"mask": OWN[name](L if count == 1 else S)}
    same_bits(module, count, given)
    close_to_exact(module, count, given)


@pytest.mark.parametrize("kind", ["own", "drop-in", "drop-in, length first"])
@pytest.mark.parametrize("count", [1, 2])
def test_second_derivatives(kind: str, count: int) -> None:
    keys = L if count == 1 else S
    given = {"mask": masks.keep(~blind(keys))} if kind == "own" else {"attn_mask": blind(keys)}

    def penalty(module: nn.Module, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        output = attend(module, inputs, given)
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        total = torch.stack([each.square().sum() for each in first]).sum()
        return torch.autograd.grad(total, (*inputs, *module.parameters()), allow_unused=True, materialize_grads=True)

    module = made(kind)
    found = penalty(module, drawn(count))
    exact = penalty(copy.deepcopy(module).double(), drawn(count, torch.float64))
    largest = max(float(each.abs().max()) for each in exact)
    assert all((one.double() - other).abs().max() < 1e-5 * largest for one, other in zip(found, exact, strict=True))


@drop_ins
@pytest.mark.parametrize("wanted", ["query", "key", "in_proj_weight", "in_proj_bias", "out_proj.weight"])
def test_only_the_gradients_that_are_wanted(kind: str, wanted: str) -> None:
    module = made(kind)
    inputs, given = drawn(2), MASKS["both"](S)
    every = {"query": inputs[0], "key": inputs[1], **dict(module.named_parameters())}
    if wanted not in every:
        pytest.skip("it has no such parameter")
    (expected,) = torch.autograd.grad(attend(module, inputs, given).sin().sum(), every[wanted])
    for name, tensor in every.items():
        tensor.requires_grad_(name == wanted)
    (found,) = torch.autograd.grad(attend(module, inputs, given).sin().sum(), every[wanted])
    assert torch.equal(found, expected)


@drop_ins
@pytest.mark.parametrize("numbers", [False, True])
def test_what_is_hidden_stays_hidden(kind: str, numbers: bool) -> None:
    """NaN in padding reaches neither outputs nor gradients, and queries that see nothing get none."""
    module, hidden = made(kind), padding(S)
    given = {"key_padding_mask": added(hidden) if numbers else hidden, "attn_mask": blind(S)[:, :1].expand(L, S)}
    query, key = drawn(2)
    expected = attend(module, [query, key], given).detach()
    with torch.no_grad():
        key[hidden] = torch.nan
    output = attend(module, [query, key], given)
    assert torch.equal(output, expected)
    of_query, of_key = torch.autograd.grad(output.square().sum(), [query, key])
    assert of_query.isfinite().all()
    assert not of_query[:, 2].any()
    assert not of_key[hidden].any()
    assert of_key.isfinite().all()


def test_nothing_is_kept() -> None:
    given = MASKS["one of each"](S)
    module, inputs = made("drop-in"), drawn(2)
    output = attend(module, inputs, given)
    seen = [weakref.ref(each) for each in (*inputs, *given.values(), module.in_proj_weight, output)]
    del given, module, inputs, output
    gc.collect()
    assert [each() for each in seen] == [None] * len(seen)


def test_a_mask_that_is_changed_between_two_calls() -> None:
    module, (query, key), hidden = made("drop-in"), drawn(2), torch.zeros(B, S, dtype=torch.bool)
    first = attend(module, [query, key], {"key_padding_mask": hidden})
    hidden.numpy()[:, 3] = True
    second = attend(module, [query, key], {"key_padding_mask": hidden})
    kept = torch.arange(S) != 3
    torch.testing.assert_close(second, attend(module, [query, key[:, kept]], {}))
    assert (first - second).abs().max() > 1e-3
    (before,) = torch.autograd.grad(second.sum(), key, retain_graph=True)
    hidden.fill_(False)
    assert torch.equal(torch.autograd.grad(second.sum(), key)[0], before)


def test_numbers_that_are_changed_before_the_backward_pass() -> None:
    numbers = added(triangle(S))
    output = attend(made("drop-in"), drawn(2), {"attn_mask": numbers})
    numbers.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@every_mask
def test_checkpointing(name: str) -> None:
    module, inputs, given = made("drop-in"), drawn(2), MASKS[name](S)
    expected = derivatives(module, inputs, given)
    output = checkpoint(lambda *x: attend(module, list(x), given), *inputs, use_reentrant=False)
    found = [output, *torch.autograd.grad(output.square().sum(), [*inputs, *module.parameters()])]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


OTHER_WAYS: dict[str, Callable[[], dict[str, Any]]] = {
    "a mask that wants a gradient": lambda: {"attn_mask": torch.zeros(L, S, requires_grad=True)},
    "a mask of every head": lambda: {"attn_mask": torch.zeros(B * H, L, S, dtype=torch.bool)},
    "padding that wants a gradient": lambda: {"key_padding_mask": torch.zeros(B, S, requires_grad=True)},
}


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_other_masks_go_the_ordinary_way(name: str) -> None:
    module, inputs, given = made("drop-in"), drawn(2), OTHER_WAYS[name]()
    output = attend(module, inputs, given)
    assert not is_one_step(output)
    torch.testing.assert_close(output, attend(module, inputs, {}))
    learnt = [mask for mask in given.values() if mask.requires_grad]
    assert all(grad.abs().max() > 0 for grad in torch.autograd.grad(output.square().sum(), learnt)) if learnt else True


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ({"key_padding_mask": torch.zeros(S, B, dtype=torch.bool)}, (L, S, S)),
        ({"key_padding_mask": torch.zeros(1, S, dtype=torch.bool)}, (L, S, S)),
        ({"attn_mask": torch.zeros(1, S, dtype=torch.bool)}, (L, S, S)),
        ({"attn_mask": torch.zeros(S, L)}, (L, S, S)),
        ({}, (L, S, L)),
    ],
)
def test_errors_are_the_same_after_a_good_call(given: dict[str, Any], inputs: tuple[int, ...]) -> None:
    module = made("drop-in")
    attend(module, drawn(2), MASKS["both"](S))
    with pytest.raises(ShapeError, match="expected"):
        module(*(torch.zeros(B, length, E) for length in inputs), need_weights=False, **given)


def test_masks_of_large_calls_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not looked at costs nothing."""
    module = clearhead.nn.MultiheadAttention(E, H, batch_first=True)
    hidden, x = torch.zeros(2, 40000, dtype=torch.bool), torch.zeros(2, 40000, E)
    seen: list[torch.Size] = []
    inner = Tensor.logical_not
    monkeypatch.setattr(Tensor, "logical_not", lambda self: (seen.append(self.shape), inner(self))[1])
    tiny(module, x, x, x, hidden, None, False, None)
    assert not seen
