"""The plan of a module's calls: a module that changes between two calls computes what it then is."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

import clearhead
from clearhead import masks
from clearhead._layer.layer_plan import _plan_of_key
from clearhead.errors import ClearheadError, DeviceError, DTypeError
from tests.support.closeness import require_near
from tests.support.randomised import randomised

B, L, E, H = 2, 5, 12, 3
Module = nn.Module
Change = Callable[[Any], Any]


def own(**options: Any) -> clearhead.MultiHeadAttention:
    return randomised(clearhead.MultiHeadAttention(E, H, **options)).eval()


def drop_in(**options: Any) -> clearhead.nn.MultiheadAttention:
    return randomised(clearhead.nn.MultiheadAttention(E, H, batch_first=True, **options)).eval()


def call(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, clearhead.MultiHeadAttention):
        return module(x)
    return module(x, x, x, need_weights=False)[0]


def projections(module: Any, x: Tensor) -> list[Tensor]:
    if isinstance(module, clearhead.MultiHeadAttention):
        return [module.q_proj(x), module.k_proj(x), module.v_proj(x)]
    return [*F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)]


def formula(module: Any, x: Tensor) -> Tensor:
    """The output by the formula, in the operations of the module's own parts."""
    q, k, v = (each.unflatten(-1, (module.num_heads, -1)).transpose(1, 2).double() for each in projections(module, x))
    scale = getattr(module, "scale", None) or q.shape[-1] ** -0.5
    scores = q @ k.mT * scale
    cap = getattr(module, "softcap", None)
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    rule = getattr(module, "mask", None)
    scores = scores if rule is None else scores.masked_fill(~rule.dense(x.shape[1]), float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2).to(x.dtype)
    return module.out_proj(mixed)


def fewer_heads(module: Any) -> None:
    module.num_heads = module.num_kv_heads = 2
    module.head_dim = E // 2


def other_weights(module: Any) -> None:
    torch.manual_seed(1)
    module.load_state_dict({name: torch.randn_like(x) for name, x in module.state_dict().items()})


class LowRank(nn.Module):
    """A linear layer and an update of rank 2."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def doubles(*arguments: Any) -> Tensor:
    return 2 * arguments[-1]


def weight_of(module: Any) -> tuple[nn.Module, str]:
    return (module.q_proj, "weight") if isinstance(module, clearhead.MultiHeadAttention) else (module, "in_proj_weight")


CHANGES: dict[str, Change] = {
    "weights": other_weights,
    "a hook on the output projection": lambda module: module.out_proj.register_forward_hook(doubles),
    "a hook before the output projection": lambda module: module.out_proj.register_forward_pre_hook(
        lambda _, arguments: (2 * arguments[0],)
    ),
    "an adapter of the output projection": lambda module: setattr(module, "out_proj", LowRank(module.out_proj)),
    "a replaced forward": lambda module: setattr(module.out_proj, "forward", lambda x: 2 * x),
    "no bias": lambda module: setattr(module.out_proj, "bias", None),
    "a wider output": lambda module: setattr(module, "out_proj", nn.Linear(E, 2 * E)),
    "a parametrization": lambda module: parametrize.register_parametrization(*weight_of(module), Doubled()),
    "a frozen weight": lambda module: module.requires_grad_(False),
}
OF_OWN: dict[str, Change] = {
    "scale": lambda module: setattr(module, "scale", 0.3),
    "a soft-cap": lambda module: setattr(module, "softcap", 0.7),
    "a mask": lambda module: setattr(module, "mask", masks.sliding_window(1, 0)),
    "heads": fewer_heads,
    "an adapter": lambda module: setattr(module, "k_proj", LowRank(module.k_proj)),
    "a hook": lambda module: module.v_proj.register_forward_hook(doubles),
    "a shared projection": lambda module: setattr(module, "k_proj", module.q_proj),
}


def seen_twice(module: Any) -> Tensor:
    """Calls whose plan is known after the first: the input of both."""
    x = torch.randn(B, L, E)
    require_near(call(module, x), formula(module, x))
    with torch.no_grad():
        require_near(call(module, x), formula(module, x))
        require_near(call(module, x), formula(module, x))
    return x


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [own, drop_in])
def test_a_change_between_two_calls_counts(make: Callable[[], Any], change: str) -> None:
    module = make()
    x = seen_twice(module)
    before = call(module, x)
    CHANGES[change](module)
    for _ in range(2):
        require_near(call(module, x), formula(module, x))
    with torch.no_grad():
        require_near(call(module, x), formula(module, x))
    changed = call(module, x)
    assert change == "a frozen weight" or changed.shape != before.shape or not torch.allclose(changed, before)


@pytest.mark.parametrize("change", OF_OWN)
def test_a_changed_part_of_the_own_module_counts(change: str) -> None:
    module = own()
    x = seen_twice(module)
    before = call(module, x)
    OF_OWN[change](module)
    for _ in range(2):
        require_near(call(module, x), formula(module, x))
    assert not torch.allclose(call(module, x), before)


@pytest.mark.parametrize("make", [own, drop_in])
def test_a_hook_that_is_removed_counts_no_more(make: Callable[[], Any]) -> None:
    module = make()
    x = seen_twice(module)
    handle = module.out_proj.register_forward_hook(doubles)
    require_near(call(module, x), formula(module, x))
    handle.remove()
    seen_twice(module)


@pytest.mark.parametrize("make", [own, drop_in])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype(make: Callable[[], Any], dtype: torch.dtype) -> None:
    module = make()
    x = seen_twice(module)
    module.to(dtype)
    with pytest.raises(DTypeError):
        call(module, x)
    near: Any = {"atol": 0.02, "rtol": 0.02} if dtype is torch.bfloat16 else {}
    for _ in range(2):
        output = call(module, x.to(dtype))
        assert output.dtype is dtype
        torch.testing.assert_close(output, formula(module, x.to(dtype)), **near)
    seen_twice(module.float())


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_a_projection_on_meta_is_refused_after_calls_that_were_not(name: str) -> None:
    module = own()
    x = seen_twice(module)
    getattr(module, name).to("meta")
    with pytest.raises((DeviceError, RuntimeError)):
        call(module, x)


@pytest.mark.parametrize("make", [own, drop_in])
def test_functional_call_uses_its_parameters(make: Callable[[], Any]) -> None:
    module = make()
    x = seen_twice(module)
    other = copy.deepcopy(module)
    other_weights(other)
    arguments = (x,) if make is own else (x, x, x)
    for _ in range(2):
        output = torch.func.functional_call(module, dict(other.named_parameters()), arguments)
        require_near(output if isinstance(output, Tensor) else output[0], formula(other, x))
    require_near(call(module, x), formula(module, x))


@pytest.mark.parametrize("make", [own, drop_in])
def test_copies_and_modules_of_equal_settings_share_nothing_but_the_plan(make: Callable[[], Any]) -> None:
    module = make()
    x = seen_twice(module)
    other = copy.deepcopy(module)
    other_weights(other)
    known = _plan_of_key.cache_info().currsize
    for _ in range(2):
        require_near(call(other, x), formula(other, x))
        require_near(call(module, x), formula(module, x))
    assert _plan_of_key.cache_info().currsize == known


class Doubling(TorchFunctionMode):
    """A mode in which linear layers return twice what they compute, in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is F.linear else result


@pytest.mark.parametrize("make", [own, drop_in])
def test_a_mode_around_a_later_call_counts(make: Callable[[], Any]) -> None:
    module = make()
    x = seen_twice(module)
    with Doubling():
        require_near(call(module, x), formula(module, x))
    seen_twice(module)


def test_a_replaced_function_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    module, linear = own(), F.linear
    x = seen_twice(module)
    monkeypatch.setattr(F, "linear", lambda *arguments: 2 * linear(*arguments))
    require_near(call(module, x), formula(module, x))


@pytest.mark.parametrize("make", [own, drop_in])
def test_gradients_after_calls_without(make: Callable[[], Any]) -> None:
    module = make()
    with torch.no_grad():
        x = torch.randn(B, L, E)
        for _ in range(2):
            call(module, x)
    leaves = [x.clone().requires_grad_(), *module.parameters()]
    for wanted in ([True] * len(leaves), [False, *[True] * (len(leaves) - 1)], [True, *[False] * (len(leaves) - 1)]):
        for leaf, needs in zip(leaves, wanted, strict=True):
            leaf.requires_grad_(needs)
        needed = [leaf for leaf in leaves if leaf.requires_grad]
        for found, expected in zip(
            torch.autograd.grad(call(module, leaves[0]).square().sum(), needed),
            torch.autograd.grad(formula(module, leaves[0]).square().sum(), needed),
            strict=True,
        ):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("setting", ["scale", "softcap", "dropout"])
def test_settings_are_checked_in_every_call(setting: str) -> None:
    module = own(scale=1.0, softcap=1.0)
    module.train()
    module.dropout = 1.0
    x = torch.randn(B, L, E)
    for _ in range(2):
        module(x)
    setattr(module, setting, True)
    with pytest.raises(ClearheadError):
        module(x)


@pytest.mark.parametrize("shapes", [((B, L, E), (B + 1, L, E)), ((B, L, E), (B, L, E + 1)), ((L, E), (B, L, E))])
def test_inputs_that_do_not_fit_are_refused_after_those_that_do(shapes: tuple[tuple[int, ...], ...]) -> None:
    module = own()
    x = torch.randn(B, L, E)
    for _ in range(2):
        module(x, x.clone())
    query, key = (torch.randn(shape) for shape in shapes)
    for _ in range(2):
        with pytest.raises(ClearheadError):
            module(query, key)


@pytest.mark.parametrize("make", [own, drop_in])
@pytest.mark.parametrize("gradients", [False, True])
def test_nothing_of_a_call_lives_on(make: Callable[[], Any], gradients: bool) -> None:
    module = make()
    x = output = torch.randn(B, L, E)
    with torch.set_grad_enabled(gradients):
        for _ in range(2):
            x = torch.randn(B, L, E)
            output = call(module, x)
    held = [weakref.ref(each) for each in (x, output, module, *module.parameters())]
    del module, x, output
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_no_mask_of_a_call_lives_on() -> None:
    module, x = own(), torch.randn(B, L, E)
    lengths = torch.tensor([3, 5])
    mask = masks.lengths(lengths)
    for _ in range(2):
        module(x, mask=mask)
    held = weakref.ref(mask), weakref.ref(lengths)
    del mask, lengths
    gc.collect()
    assert [ref() for ref in held] == [None, None]


@pytest.mark.parametrize("make", [own, drop_in])
def test_a_module_keeps_nothing_of_its_calls(make: Callable[[], Any]) -> None:
    module = make()
    before = set(vars(module))
    seen_twice(module)
    assert set(vars(module)) == before
