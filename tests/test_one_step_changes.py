"""Tiny self-attention in one step is out of the way of whatever hangs on a layer, stands around it or changes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.nn.utils import parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead
from clearhead import masks
from clearhead._call.observers import observing
from clearhead._call.spec import AttentionCall
from clearhead._layer import one_step
from clearhead.errors import ClearheadError

from .tiny_layers import B, D, E, H, L, input_of, made, needs_native, run, went_in_one_step


def by_hand(module: nn.Module, x: Tensor) -> Tensor:
    """The formula around the projections as they are called."""
    q, k, v = (clearhead.split_heads(each(x), H) for each in (module.q_proj, module.k_proj, module.v_proj))
    weights = (q @ k.mT / math.sqrt(D)).softmax(-1)
    return module.out_proj(clearhead.merge_heads(weights @ v))


class Doubled(clearhead.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.low = base, nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.low(x)


class Twice(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def step_of_an_optimiser(module: nn.Module) -> None:
    optimiser = torch.optim.SGD(module.parameters(), lr=0.003)
    run(module, input_of()).square().sum().backward()
    optimiser.step()


def without_gradient(change: Callable[[nn.Linear], object]) -> Callable[[nn.Module], object]:
    def changed(module: nn.Module) -> None:
        with torch.no_grad():
            change(module.k_proj)
            change(module.out_proj)

    return changed


def with_forward(projection: Any) -> None:
    inner = projection.forward
    projection.forward = lambda x: inner(x) + 1


def doubled(normed: Any) -> None:
    normed.parametrizations.weight.original0.data.mul_(2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "weight in place": without_gradient(lambda p: p.weight.mul_(1.5)),
    "weight behind autograd's back": without_gradient(lambda p: p.weight.data.mul_(1.5)),
    "data of the weight": without_gradient(lambda p: setattr(p.weight, "data", p.weight.data * 2)),
    "another parameter": without_gradient(lambda p: setattr(p, "weight", nn.Parameter(p.weight * 2))),
    "bias taken away": without_gradient(lambda p: setattr(p, "bias", None)),
    "weight with other strides": without_gradient(lambda p: setattr(p.weight, "data", p.weight.data.t())),
    "loaded": lambda m: m.load_state_dict({name: 2 * each for name, each in m.state_dict().items()}),
    "an optimiser": step_of_an_optimiser,
    "another projection": lambda m: setattr(m, "v_proj", nn.Linear(E, E)),
    "a subclass": lambda m: setattr(m, "v_proj", Doubled(E, E)),
    "an adapter": lambda m: setattr(m, "q_proj", Adapted(m.q_proj)),
    "an adapter at the end": lambda m: setattr(m, "out_proj", Adapted(m.out_proj)),
    "a hook": lambda m: m.q_proj.register_forward_hook(lambda _module, _args, output: output * 2),
    "a hook at the end": lambda m: m.out_proj.register_forward_hook(lambda _module, _args, output: output * 2),
    "a hook before": lambda m: m.v_proj.register_forward_pre_hook(lambda _module, args: (args[0] * 2,)),
    "forward of one": lambda m: with_forward(m.v_proj),
    "parametrized": lambda m: parametrize.register_parametrization(m.v_proj, "weight", Twice()),
    "pruned": lambda m: prune.l1_unstructured(m.v_proj, "weight", amount=0.5),
    "normed": lambda m: doubled(nn.utils.parametrizations.weight_norm(m.v_proj)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("train", [False, True])
def test_a_layer_that_is_changed_between_two_calls(change: str, train: bool) -> None:
    module, x = made("own"), input_of()
    with torch.set_grad_enabled(train):
        before = [run(module, x).detach() for _ in range(2)][1]
        torch.testing.assert_close(before, by_hand(module, x).detach())
        with torch.enable_grad():
            CHANGES[change](module)
        after = run(module, x)
        torch.testing.assert_close(after, by_hand(module, x))
    assert (after - before).abs().max() > 0.01, "the change has to be seen"


DROP_IN_CHANGES: dict[str, Callable[[Any], object]] = {
    "weight in place": lambda m: m.in_proj_weight.data.mul_(2),
    "data of the weight": lambda m: setattr(m.in_proj_weight, "data", m.in_proj_weight.data * 2),
    "another bias": lambda m: setattr(m, "in_proj_bias", nn.Parameter(torch.ones(3 * E))),
    "an optimiser": step_of_an_optimiser,
    "parametrized": lambda m: parametrize.register_parametrization(m, "in_proj_weight", Twice()),
    "pruned": lambda m: prune.l1_unstructured(m, "in_proj_weight", amount=0.5),
    "an adapter": lambda m: setattr(m, "out_proj", Adapted(m.out_proj)),
    "a hook": lambda m: m.out_proj.register_forward_hook(lambda _module, _args, output: output * 2),
    "an appended key": lambda m: (
        setattr(m, "bias_k", nn.Parameter(torch.ones(1, 1, E))),
        setattr(m, "bias_v", nn.Parameter(torch.ones(1, 1, E))),
    ),
    "a key of zeros": lambda m: setattr(m, "add_zero_attn", True),
    "another layout": lambda m: setattr(m, "batch_first", False),
}


@pytest.mark.parametrize("change", DROP_IN_CHANGES)
def test_a_drop_in_that_is_changed_between_two_calls(change: str) -> None:
    module, x = made("drop-in"), input_of()
    before = [run(module, x) for _ in range(2)][1].detach()
    DROP_IN_CHANGES[change](module)
    after = run(module, x)
    assert (after - before).abs().max() > 0.01, "the change has to be seen"
    torch.testing.assert_close(after, module(x, x, x)[0])  # with weights, which takes the long way


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_what_hooks_are_told(name: str) -> None:
    module, x = made("own"), input_of()
    run(module, x)
    seen: list[str] = []
    child = module.get_submodule(name)
    for register in (
        child.register_forward_pre_hook,
        child.register_forward_hook,
        child.register_full_backward_pre_hook,
        child.register_full_backward_hook,
    ):
        handle = register(lambda *_: seen.append("own"))
        run(module, x).sum().backward()
        handle.remove()
        assert seen == ["own"]
        seen.clear()
    for register in (
        global_hooks.register_module_forward_hook,
        global_hooks.register_module_forward_pre_hook,
        global_hooks.register_module_full_backward_hook,
    ):
        handle = register(lambda called, *_: seen.append("global") if called is child else None)
        run(module, x).sum().backward()
        handle.remove()
        assert seen == ["global"]
        seen.clear()


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is F.linear
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode_class", [Counting, Dispatched])
def test_modes_see_every_product_and_attention(mode_class: type[Counting] | type[Dispatched]) -> None:
    module, x = made("own"), input_of()
    expected = run(module, x)
    with mode_class() as mode:
        assert torch.equal(run(module, x), expected)
    assert mode.products == 4


def around(kind: str) -> AbstractContextManager[Any]:
    return {
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "kernel": lambda: clearhead.use_kernel("reference"),
        "product": lambda: clearhead.use_linear("pytorch"),
        "saved tensors": lambda: torch.autograd.graph.save_on_cpu(),
        "forward mode": torch.autograd.forward_ad.dual_level,
        "function mode": Counting,
        "dispatch mode": Dispatched,
        "nothing": nullcontext,
    }[kind]()


@needs_native
@pytest.mark.parametrize(
    "kind", ["autocast", "kernel", "product", "saved tensors", "forward mode", "function mode", "dispatch mode"]
)
def test_surroundings_that_see_single_operations(kind: str) -> None:
    module, x = made("own"), input_of()
    for around_it, expected in ((kind, False), ("nothing", True)):
        with around(around_it):
            assert went_in_one_step(run(module, x)) == expected


class Seeing:
    recomputing = False

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []

    def attended(self, call: AttentionCall, output: Tensor) -> Tensor:
        self.shapes.append(call.query.shape)
        return 0 * output


@pytest.mark.parametrize("kind", ["own", "drop-in"])
def test_observers_see_attention_and_change_it(kind: str) -> None:
    module, x, observer = made(kind), input_of(), Seeing()
    run(module, x)
    with observing(observer):
        output = run(module, x)
    assert observer.shapes == [(B, H, L, D)]
    assert torch.equal(output, module.out_proj.bias.expand(B, L, E))


@needs_native
def test_the_kernel_that_is_forced_runs() -> None:
    module, x = made("own"), input_of()
    run(module, x)
    with clearhead.use_kernel("sdpa"):
        forced = run(module, x)
    torch.testing.assert_close(forced, run(module, x))
    with clearhead.use_kernel("flex"), pytest.raises(clearhead.errors.KernelError):
        run(module, x)


class Logged(Tensor):
    pass


def other_inputs() -> dict[str, Callable[[nn.Module], Tensor]]:
    x = input_of(requires_grad=False)
    return {
        "another length": lambda m: run(m, x[:, :2]),
        "not contiguous": lambda m: run(m, x.transpose(0, 1)).transpose(0, 1),
        "no batch": lambda m: run(m, x[0]),
        "a subclass": lambda m: run(m, x.as_subclass(Logged)),
        "mapped over": lambda m: torch.vmap(lambda one: run(m, one))(x[None])[0],
        "called with other weights": lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (x,)),
        "in inference mode": lambda m: inferred(m, x),
    }


def inferred(module: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return run(module, x)


@pytest.mark.parametrize("name", other_inputs())
def test_other_inputs_after_a_known_one(name: str) -> None:
    module, x = made("own"), input_of(requires_grad=False)
    run(module, x)
    expected = {"another length": by_hand(module, x[:, :2]), "no batch": by_hand(module, x)[0]}
    if name == "not contiguous":
        expected[name] = by_hand(module, x.transpose(0, 1)).transpose(0, 1)
    found = other_inputs()[name](module)
    assert type(found) is (Logged if name == "a subclass" else Tensor)
    torch.testing.assert_close(found.as_subclass(Tensor), expected.get(name, by_hand(module, x)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda m, x: m(x[..., :3]),
        lambda m, x: m(x.double()),
        lambda m, x: m(x.to("meta")),
        lambda m, x: m(x, None, x),
        lambda m, x: setattr(m, "dropout", 1.5) or m(x),
        lambda m, x: setattr(m, "scale", True) or m(x),
        lambda m, x: m.double()(x),
    ],
)
def test_errors_are_the_same_after_a_good_call(wrong: Callable[[Any, Tensor], Tensor]) -> None:
    module, x = made("own"), input_of()
    run(module, x)
    with pytest.raises(ClearheadError, match="expected"):
        wrong(module, x)


def test_parts_that_are_given_to_a_known_layer() -> None:
    module, x = made("own"), input_of(requires_grad=False)
    before = run(module, x)
    module.dropout = 0.5
    assert not torch.equal(run(module, x), run(module, x))
    assert torch.equal(run(module.eval(), x), before)
    for name, part in (
        ("mask", masks.sliding_window(1, 1)),
        ("softcap", 0.5),
        ("scale", 0.1),
        ("sinks", nn.Parameter(torch.ones(H))),
        ("q_norm", nn.RMSNorm(D)),
        ("position", lambda q, k, positions: (2 * q, k)),
    ):
        kept = getattr(module, name)
        setattr(module, name, part)
        assert (run(module, x) - before).abs().max() > 1e-3, name
        setattr(module, name, kept)
        assert torch.equal(run(module, x), before)


@pytest.mark.parametrize("kind", ["own", "drop-in"])
def test_without_the_native_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = made(kind), input_of()
    expected = run(module, x)
    monkeypatch.setattr(one_step, "extension", None)
    assert not went_in_one_step(run(module, x))
    torch.testing.assert_close(run(module, x), expected)
