"""Both modules at tiny sizes: the same bits whatever observes a layer, and what is changed on a layer counts."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Callable, Sequence
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
from tests.support.budgets import in_turn
from tests.support.closeness import require_near
from tests.support.derivatives import derivatives

B, L, S, H, D = 3, 5, 7, 2, 7
E = H * D

KINDS: dict[str, Callable[[], nn.Module]] = {
    "own": lambda: clearhead.MultiHeadAttention(E, H),
    "own without biases": lambda: clearhead.MultiHeadAttention(E, H, bias=False),
    "own, one bias": lambda: clearhead.MultiHeadAttention(E, H, bias=False, out_bias=True),
    "own, grouped": lambda: clearhead.MultiHeadAttention(E, 4, num_kv_heads=2, head_dim=3),
    "own, scaled": lambda: clearhead.MultiHeadAttention(E, H, scale=0.3, sinks=True),
    "drop-in": lambda: clearhead.nn.MultiheadAttention(E, H, batch_first=True),
    "drop-in, length first": lambda: clearhead.nn.MultiheadAttention(E, H),
    "drop-in without bias": lambda: clearhead.nn.MultiheadAttention(E, H, bias=False, batch_first=True),
    "drop-in, appended keys": lambda: clearhead.nn.MultiheadAttention(
        E, H, add_bias_kv=True, add_zero_attn=True, batch_first=True
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("kind", ["own", "drop-in"])


def made(kind: str) -> Any:
    module = KINDS[kind]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def drawn(count: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value, of so many tensors."""
    lengths = (L, S, S) if count > 1 else (L,)
    x = [torch.linspace(-2, 2, B * n * E, dtype=dtype).view(B, n, E).mul(i + 1.3).sin() for i, n in enumerate(lengths)]
    return [item.requires_grad_() for item in x[:count]]


def padding(keys: int) -> Tensor:
    return torch.arange(keys) >= torch.tensor([[keys], [2], [keys - 1]])


def blind(keys: int) -> Tensor:
    """Query 2 is fully masked, and key 1 is masked for every query."""
    hidden = torch.zeros(L, keys, dtype=torch.bool)
    hidden[2] = hidden[:, 1] = True
    return hidden


def as_bias(hidden: Tensor) -> Tensor:
    return torch.linspace(-1, 1, hidden.numel()).view(hidden.shape).masked_fill(hidden, -torch.inf)


#: Arguments of the drop-in; `output_of` translates them for the other module.
MASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda keys: {},
    "causal": lambda keys: {"is_causal": True},
    "padding": lambda keys: {"key_padding_mask": padding(keys)},
    "padding that hides nothing": lambda keys: {"key_padding_mask": torch.zeros(B, keys, dtype=torch.bool)},
    "float padding": lambda keys: {"key_padding_mask": as_bias(padding(keys))},
    "blind": lambda keys: {"attn_mask": blind(keys)},
    "bias": lambda keys: {"attn_mask": as_bias(blind(keys))},
    "bias of items": lambda keys: {"attn_mask": as_bias(blind(keys)).expand(B, L, keys).clone()},
    "both": lambda keys: {"attn_mask": blind(keys), "key_padding_mask": padding(keys)},
    "bias and padding": lambda keys: {"attn_mask": as_bias(blind(keys)), "key_padding_mask": padding(keys)},
    "causal and both": lambda keys: {
        "is_causal": True,
        "attn_mask": as_bias(blind(keys)),
        "key_padding_mask": as_bias(padding(keys)),
    },
}


def own_mask(given: dict[str, Any]) -> Any:
    masks_of: list[masks.Mask] = [masks.causal()] if given.get("is_causal") else []
    if (attn_mask := given.get("attn_mask")) is not None:
        masks_of.append(masks.bias(attn_mask) if attn_mask.is_floating_point() else masks.drop(attn_mask))
    if (padding := given.get("key_padding_mask")) is not None:
        masks_of.append(masks.bias(padding[:, None, None]) if padding.is_floating_point() else masks.drop(keys=padding))
    return functools.reduce(operator.and_, masks_of) if masks_of else None


def output_of(module: Any, inputs: Sequence[Tensor], given: dict[str, Any] | None = None) -> Any:
    """The output (B, L, E) of inputs (B, length, E)."""
    query, key, value = inputs[0], inputs[min(1, len(inputs) - 1)], inputs[-1]
    if not isinstance(module, nn.MultiheadAttention):
        return module(query, key, value, mask=own_mask(given or {}))
    arguments = {"need_weights": False, **(given or {})}
    if module.batch_first:
        return module(query, key, value, **arguments)[0]
    first = {id(x): x.transpose(0, 1).contiguous() for x in inputs}
    return module(*(first[id(x)] for x in (query, key, value)), **arguments)[0].transpose(0, 1)


def numbers(module: nn.Module, inputs: Sequence[Tensor], given: dict[str, Any] | None = None) -> list[Tensor]:
    """Output, and gradients of inputs and parameters; the inputs are no leaves and are used beside the layer too."""
    computed = [1.5 * x for x in inputs]
    output = output_of(module, computed, given)
    loss = (output + computed[0]).tanh().square().sum()
    return derivatives(output, [*inputs, *module.parameters()], [lambda _: loss])


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def require_as_exact(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """To 1e-5 of the largest number, since the gradient of a key's bias is nothing but rounding."""
    for group in (slice(0, 1), slice(1, None)):
        require_near(found[group], expected[group], least=0, together=True)


def nothing(*_: object) -> None:
    pass


@in_turn({"kind": KINDS, "mask": MASKS}, {"count": [1, 2, 3]})
def test_against_float64_and_with_hooks(kind: str, mask: str, count: int) -> None:
    """A hook makes a layer call its submodules, which compute the same bits."""
    module, inputs, given = made(kind), drawn(count), MASKS[mask](L if count == 1 else S)
    result = numbers(module, inputs, given)
    with torch.no_grad():
        alone = output_of(module, [1.5 * x for x in inputs], given)
    assert torch.equal(alone, result[0])
    wide = {name: x.double() if isinstance(x, Tensor) and x.dtype.is_floating_point else x for name, x in given.items()}
    require_as_exact(result, numbers(copy.deepcopy(module).double(), drawn(count, torch.float64), wide))
    for child in module.children():
        child.register_forward_hook(nothing)
        child.register_full_backward_hook(nothing)
    assert same(numbers(module, inputs, given), result)
    with torch.no_grad():
        assert torch.equal(output_of(module, [1.5 * x for x in inputs], given), alone)


@both
def test_changes_in_place(kind: str) -> None:
    """The output may be written to; what was saved, a bias too, may not."""
    module, (x,) = made(kind), drawn()
    output = output_of(module, [x])
    output += x
    torch.testing.assert_close(
        torch.autograd.grad(output.sum(), x), torch.autograd.grad((output_of(module, [x]) + x).sum(), x)
    )
    y, bias = x * 2, as_bias(blind(L))
    for changed, output in ((y, output_of(module, [y])), (bias, output_of(module, [x], {"attn_mask": bias}))):
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@every_kind
@pytest.mark.parametrize("mask", ["none", "both"])
def test_the_output_is_contiguous(kind: str, mask: str) -> None:
    module, x = made(kind), drawn()[0].detach()
    output = output_of(module, [x], MASKS[mask](L))
    assert (output.transpose(0, 1) if getattr(module, "batch_first", True) is False else output).is_contiguous()


def test_a_query_that_is_the_value_too() -> None:
    x, key = (item[:, :L].detach() for item in drawn(2))
    for kind in ("own", "drop-in", "drop-in, length first"):
        module = made(kind)
        assert torch.equal(output_of(module, [x, key, x]), output_of(module, [x, key, x.clone()]))
        assert (output_of(module, [x, key, x]) - output_of(module, [x, key, key])).abs().max() > 1e-3


# What is changed on a layer, or stands around it.


def by_hand(module: Any, x: Tensor) -> Tensor:
    """The formula around the projections as they are called."""
    q, k, v = (clearhead.split_heads(item(x), H) for item in (module.q_proj, module.k_proj, module.v_proj))
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


def change_both(change: Callable[[nn.Linear], object]) -> Callable[[Any], object]:
    def changed(module: Any) -> None:
        with torch.no_grad():
            change(module.k_proj)
            change(module.out_proj)

    return changed


def bias_as_buffer(projection: Any) -> None:
    bias = projection.bias.detach() + 1
    del projection.bias
    projection.register_buffer("bias", bias)


def replace_forward(projection: Any) -> None:
    inner = projection.forward
    projection.forward = lambda x: inner(x) + 1


def double_norm(normed: Any) -> None:
    normed.parametrizations.weight.original0.data.mul_(2)


def double_output(module: nn.Module) -> None:
    module.register_forward_hook(lambda _module, _args, output: output * 2)


def compile_doubled(projection: nn.Module) -> None:
    projection.compile(backend=lambda graph, _: lambda *inputs: [2 * x for x in graph(*inputs)])


OWN_CHANGES: dict[str, Callable[[Any], object]] = {
    "weight in place": change_both(lambda p: p.weight.mul_(1.5)),
    "data of the weight": change_both(lambda p: setattr(p.weight, "data", p.weight.data * 2)),
    "another parameter": change_both(lambda p: setattr(p, "weight", nn.Parameter(p.weight * 2))),
    "bias taken away": change_both(lambda p: setattr(p, "bias", None)),
    "bias as a buffer": change_both(bias_as_buffer),
    "weight with other strides": change_both(lambda p: setattr(p.weight, "data", p.weight.data.t())),
    "a subclass": lambda m: setattr(m, "v_proj", Doubled(E, E)),
    "an adapter": lambda m: setattr(m, "q_proj", Adapted(m.q_proj)),
    "a hook at the end": lambda m: double_output(m.out_proj),
    "a hook before": lambda m: m.v_proj.register_forward_pre_hook(lambda _module, args: (args[0] * 2,)),
    "forward of one": lambda m: replace_forward(m.v_proj),
    "parametrized": lambda m: parametrize.register_parametrization(m.v_proj, "weight", Twice()),
    "pruned": lambda m: prune.l1_unstructured(m.v_proj, "weight", amount=0.5),
    "compiled": lambda m: compile_doubled(m.v_proj),
    "normed": lambda m: double_norm(nn.utils.parametrizations.weight_norm(m.v_proj)),
}


@pytest.mark.parametrize("change", OWN_CHANGES)
@pytest.mark.parametrize("train", [False, True])
def test_a_layer_that_is_changed_between_two_calls(change: str, train: bool) -> None:
    module, (x,) = made("own"), drawn()
    with torch.set_grad_enabled(train):
        before = [output_of(module, [x]).detach() for _ in range(2)][1]
        torch.testing.assert_close(before, by_hand(module, x).detach())
        with torch.enable_grad():
            OWN_CHANGES[change](module)
        after = output_of(module, [x])
        torch.testing.assert_close(after, by_hand(module, x))
    assert (after - before).abs().max() > 0.01, "the change has to be seen"


def append_key(module: Any) -> None:
    module.bias_k, module.bias_v = (nn.Parameter(torch.ones(1, 1, E)) for _ in range(2))


DROP_IN_CHANGES: dict[str, Callable[[Any], object]] = {
    "weight in place": lambda m: m.in_proj_weight.data.mul_(2),
    "data of the weight": lambda m: setattr(m.in_proj_weight, "data", m.in_proj_weight.data * 2),
    "another bias": lambda m: setattr(m, "in_proj_bias", nn.Parameter(torch.ones(3 * E))),
    "parametrized": lambda m: parametrize.register_parametrization(m, "in_proj_weight", Twice()),
    "pruned": lambda m: prune.l1_unstructured(m, "in_proj_weight", amount=0.5),
    "an adapter": lambda m: setattr(m, "out_proj", Adapted(m.out_proj)),
    "a hook": lambda m: double_output(m.out_proj),
    "an appended key": append_key,
    "a key of zeros": lambda m: setattr(m, "add_zero_attn", True),
    "another layout": lambda m: setattr(m, "batch_first", False),
}


@pytest.mark.parametrize("change", DROP_IN_CHANGES)
def test_a_drop_in_that_is_changed_between_two_calls(change: str) -> None:
    module, (x,) = made("drop-in"), drawn()
    before = [output_of(module, [x]) for _ in range(2)][1].detach()
    DROP_IN_CHANGES[change](module)
    after = module(x, x, x, need_weights=False)[0]
    assert (after - before).abs().max() > 0.01, "the change has to be seen"
    twin = nn.MultiheadAttention(E, H, batch_first=module.batch_first, add_zero_attn=module.add_zero_attn)
    twin.bias_k, twin.bias_v = module.bias_k, module.bias_v
    for name in ("in_proj_weight", "in_proj_bias"):
        setattr(twin, name, nn.Parameter(getattr(module, name).detach()))
    twin.out_proj = nn.Identity()  # type: ignore[assignment]  # its weight is read, which Identity does not have
    twin.out_proj.weight, twin.out_proj.bias = torch.eye(E), None  # type: ignore[assignment]
    torch.testing.assert_close(after, module.out_proj(twin(x, x, x)[0]))


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_every_kind_of_hook_is_called_once(name: str) -> None:
    module, (x,) = made("own"), drawn()
    output_of(module, [x])
    child, seen = module.get_submodule(name), []
    registers = [
        child.register_forward_pre_hook,
        child.register_forward_hook,
        child.register_full_backward_pre_hook,
        child.register_full_backward_hook,
        global_hooks.register_module_forward_pre_hook,
        global_hooks.register_module_forward_hook,
        global_hooks.register_module_full_backward_pre_hook,
        global_hooks.register_module_full_backward_hook,
    ]
    for register in registers:
        handle = register(lambda called, *_: seen.append(called) if called is child else None)  # type: ignore[operator]
        output_of(module, [x]).sum().backward()
        handle.remove()
        assert seen == [child]
        seen.clear()


class Counting(TorchFunctionMode):
    products = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is F.linear
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode_class", [Counting, Dispatched])
def test_modes_see_every_projection(mode_class: type[Counting] | type[Dispatched]) -> None:
    module, (x,) = made("own"), drawn()
    expected = output_of(module, [x])
    with mode_class() as mode:
        assert torch.equal(output_of(module, [x]), expected)
    assert mode.products == 4


class Logged(Tensor):
    pass


OTHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "another length": lambda m, x: output_of(m, [torch.cat([x, x], 1)])[:, :L],
    "not contiguous": lambda m, x: output_of(m, [x.transpose(0, 1).contiguous().transpose(0, 1)]),
    "no batch": lambda m, x: torch.stack([output_of(m, [item]) for item in x]),
    "a subclass": lambda m, x: output_of(m, [x.as_subclass(Logged)]),
    "mapped over": lambda m, x: torch.vmap(lambda item: output_of(m, [item]))(x[None])[0],
    "inference mode": lambda m, x: torch.inference_mode()(output_of)(m, [x]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_inputs_after_the_usual_ones(name: str) -> None:
    """Every token twice changes no average."""
    module, (x,) = made("own"), [x.detach() for x in drawn()]
    expected = output_of(module, [x])
    output = OTHERS[name](module, x)
    assert type(output) is (Logged if name == "a subclass" else Tensor)
    torch.testing.assert_close(output.as_subclass(Tensor), expected)


def test_functional_call_uses_the_given_parameters() -> None:
    for kind in ("own", "drop-in"):
        module, (x,) = made(kind), drawn()
        before = output_of(module, [x])
        doubled = {name: (2 * item).detach().requires_grad_() for name, item in module.named_parameters()}
        arguments = (x,) if kind == "own" else (x, x, x, None, False)
        result = torch.func.functional_call(module, doubled, arguments)
        result = result if kind == "own" else result[0]
        gradients = torch.autograd.grad(result.square().sum(), list(doubled.values()))
        module.load_state_dict(doubled)
        after = output_of(module, [x])
        torch.testing.assert_close(result, after)
        torch.testing.assert_close(gradients, torch.autograd.grad(after.square().sum(), list(module.parameters())))
        assert (after - before).abs().max() > 0.01


def test_parts_that_are_given_to_a_layer_between_calls() -> None:
    module, (x,) = made("own"), [x.detach() for x in drawn()]
    before = output_of(module, [x])
    module.dropout = 0.5
    assert not torch.equal(output_of(module, [x]), output_of(module, [x]))
    assert torch.equal(output_of(module.eval(), [x]), before)
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
        assert (output_of(module, [x]) - before).abs().max() > 1e-3, name
        setattr(module, name, kept)
        assert torch.equal(output_of(module, [x]), before)
