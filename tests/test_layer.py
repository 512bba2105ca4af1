"""Both modules at tiny sizes: the same bits whatever observes a layer, and what is changed on a layer counts."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable, Sequence
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
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import masks

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
    return [each.requires_grad_() for each in x[:count]]


def padding(keys: int) -> Tensor:
    return torch.arange(keys) >= torch.tensor([[keys], [2], [keys - 1]])


def blind(keys: int) -> Tensor:
    """Query 2 is fully masked, and key 1 is masked for every query."""
    hidden = torch.zeros(L, keys, dtype=torch.bool)
    hidden[2] = hidden[:, 1] = True
    return hidden


def as_bias(hidden: Tensor) -> Tensor:
    return torch.linspace(-1, 1, hidden.numel()).view(hidden.shape).masked_fill(hidden, -torch.inf)


#: Arguments of the drop-in; `attend` translates them for the other module.
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
every_mask = pytest.mark.parametrize("mask", MASKS)


def own_mask(given: dict[str, Any]) -> Any:
    found: Any = masks.causal() if given.get("is_causal") else None
    for name, tensor in given.items():
        if isinstance(tensor, Tensor):
            per_key = name == "key_padding_mask"
            if tensor.is_floating_point():
                part = masks.bias(tensor[:, None, None] if per_key else tensor)
            else:
                part = masks.drop(keys=tensor) if per_key else masks.drop(tensor)
            found = part if found is None else found & part
    return found


def attend(module: Any, inputs: Sequence[Tensor], given: dict[str, Any] | None = None, **more: Any) -> Any:
    """The output (B, L, E), and weights if they are wanted, of inputs that are (B, length, E)."""
    query, key, value = inputs[0], inputs[min(1, len(inputs) - 1)], inputs[-1]
    if not isinstance(module, nn.MultiheadAttention):
        return module(query, key, value, mask=own_mask(given or {}), **more)
    arguments = {"need_weights": False, **(given or {}), **more}
    if module.batch_first:
        output, weights = module(query, key, value, **arguments)
    else:
        first = {id(x): x.transpose(0, 1).contiguous() for x in inputs}
        output, weights = module(*(first[id(x)] for x in (query, key, value)), **arguments)
        output = output.transpose(0, 1)
    return (output, weights) if more.get("need_weights") else output


def derivatives(module: nn.Module, inputs: Sequence[Tensor], given: dict[str, Any] | None = None) -> list[Tensor]:
    """Output, and gradients of inputs and parameters; the inputs are no leaves and are used beside the layer too."""
    computed = [1.5 * x for x in inputs]
    output = attend(module, computed, given)
    loss = (output + computed[0]).tanh().square().sum()
    return [output, *torch.autograd.grad(loss, [*inputs, *module.parameters()])]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def require_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """To 1e-5 of the largest number, since the gradient of a key's bias is nothing but rounding."""
    for group in (slice(0, 1), slice(1, None)):
        largest = max((float(each.detach().abs().max()) for each in expected[group]), default=1.0)
        for one, other in zip(found[group], expected[group], strict=True):
            assert (one.double() - other).abs().max() < 1e-5 * largest


def nothing(*_: object) -> None:
    pass


@every_kind
@every_mask
@pytest.mark.parametrize("count", [1, 2, 3], ids=["self", "memory", "three inputs"])
def test_against_float64_and_with_hooks(kind: str, mask: str, count: int) -> None:
    """A hook makes a layer call its submodules, which compute the same bits."""
    module, inputs, given = made(kind), drawn(count), MASKS[mask](L if count == 1 else S)
    found = derivatives(module, inputs, given)
    with torch.no_grad():
        alone = attend(module, [1.5 * x for x in inputs], given)
    assert torch.equal(alone, found[0])
    wide = {name: x.double() if isinstance(x, Tensor) and x.dtype.is_floating_point else x for name, x in given.items()}
    require_close(found, derivatives(copy.deepcopy(module).double(), drawn(count, torch.float64), wide))
    for child in module.children():
        child.register_forward_hook(nothing)
        child.register_full_backward_hook(nothing)
    assert same(derivatives(module, inputs, given), found)
    with torch.no_grad():
        assert torch.equal(attend(module, [1.5 * x for x in inputs], given), alone)


@every_kind
@pytest.mark.parametrize("mask", ["none", "causal", "both"])
def test_weights_beside_the_output(kind: str, mask: str) -> None:
    module, inputs, given = made(kind), drawn(2), MASKS[mask](S)
    output = attend(module, inputs, given)
    for average in (True, False):
        again, weights = attend(module, inputs, given, need_weights=True, average_attn_weights=average)
        torch.testing.assert_close(again, output)
        sums = weights.sum(-1).detach()
        if kind == "own, scaled":  # sinks take a part
            assert bool((sums < 1).all())
        elif mask == "both" and "appended" not in kind:
            assert bool((sums[..., 2] == 0).all())
        else:
            torch.testing.assert_close(sums, torch.ones_like(sums))


@every_kind
@pytest.mark.parametrize("count", [1, 2])
def test_second_derivatives(kind: str, count: int) -> None:
    given = MASKS["blind"](L if count == 1 else S)

    def penalty(module: nn.Module, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(attend(module, inputs, given).square().sum(), inputs, create_graph=True)
        total = torch.stack([each.square().sum() for each in first]).sum()
        return torch.autograd.grad(total, (*inputs, *module.parameters()), allow_unused=True, materialize_grads=True)

    module = made(kind)
    found, exact = (penalty(copy.deepcopy(module).to(d), drawn(count, d)) for d in (torch.float32, torch.float64))
    largest = max(float(each.abs().max()) for each in exact)
    assert all((one.double() - other).abs().max() < 1e-5 * largest for one, other in zip(found, exact, strict=True))


@every_kind
def test_only_the_gradients_that_are_wanted(kind: str) -> None:
    module, inputs, given = made(kind), drawn(2), MASKS["padding"](S)
    every = {"query": inputs[0], "key": inputs[1], **dict(module.named_parameters())}
    expected = torch.autograd.grad(attend(module, inputs, given).sin().sum(), list(every.values()))
    for wanted, gradient in zip(every, expected, strict=True):
        for name, tensor in every.items():
            tensor.requires_grad_(name == wanted)
        attend(module, inputs, given).sin().sum().backward()
        assert [name for name, tensor in every.items() if tensor.grad is not None] == [wanted]
        torch.testing.assert_close(every[wanted].grad, gradient)
        every[wanted].grad = None
    for tensor in every.values():
        tensor.requires_grad_(False)
    assert not attend(module, inputs, given).requires_grad


@every_mask
@both
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(kind: str, mask: str, reentrant: bool) -> None:
    """Also where a recorder sees the first pass and not the second."""
    module, inputs, given = made(kind), drawn(2), MASKS[mask](S)
    leaves = [*inputs, *module.parameters()]
    expected = [attend(module, inputs, given)]
    expected += torch.autograd.grad(expected[0].square().sum(), leaves)
    for around in (nullcontext(), clearhead.record(module)):
        with around:
            output = checkpoint(lambda *x: attend(module, list(x), given), *inputs, use_reentrant=reentrant)
        output.square().sum().backward()
        assert same([output, *(leaf.grad for leaf in leaves)], expected)
        for leaf in leaves:
            leaf.grad = None


def test_a_backward_pass_under_autocast_is_that_of_the_forward_pass() -> None:
    """What PyTorch's own products do there is PyTorch's; attention stays in float32."""
    x = drawn()[0].view(B, 1, L, E)
    expected = torch.autograd.grad(clearhead.attention(x, x, x).square().sum(), x)
    output = clearhead.attention(x, x, x)
    loss = output.square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert clearhead.attention(x, x, x).dtype == torch.bfloat16
        found = torch.autograd.grad(loss, x)
    assert same(found, expected)


@both
@pytest.mark.parametrize("gradient", ["expanded", "transposed", "negated"])
def test_gradients_that_are_views(kind: str, gradient: str) -> None:
    module, (x,) = made(kind), drawn()
    given = {
        "expanded": torch.ones(()).expand(B, L, E),
        "transposed": torch.randn(E, L, B).permute(2, 1, 0),
        "negated": torch.complex(torch.zeros(B, L, E), torch.randn(B, L, E)).conj().imag,
    }[gradient]
    (found,) = torch.autograd.grad(attend(module, [x]), x, given)
    (expected,) = torch.autograd.grad(attend(module, [x]), x, given.resolve_neg().contiguous())
    torch.testing.assert_close(found, expected)


@both
def test_changes_in_place(kind: str) -> None:
    """The output may be written to; what was saved, a bias too, may not."""
    module, (x,) = made(kind), drawn()
    output = attend(module, [x])
    output += x
    torch.testing.assert_close(
        torch.autograd.grad(output.sum(), x), torch.autograd.grad((attend(module, [x]) + x).sum(), x)
    )
    y, bias = x * 2, as_bias(blind(L))
    for changed, output in ((y, attend(module, [y])), (bias, attend(module, [x], {"attn_mask": bias}))):
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@both
def test_no_tensor_is_kept(kind: str) -> None:
    given, module, inputs = MASKS["bias and padding"](S), made(kind), drawn(2)
    output = attend(module, inputs, given)
    seen = [weakref.ref(each) for each in (*inputs, *given.values(), *module.parameters(), output)]
    del given, module, inputs, output
    gc.collect()
    assert [each() for each in seen] == [None] * len(seen)


@every_kind
@pytest.mark.parametrize("mask", ["none", "both"])
def test_the_output_is_contiguous(kind: str, mask: str) -> None:
    module, x = made(kind), drawn()[0].detach()
    output = attend(module, [x], MASKS[mask](L))
    assert (output.transpose(0, 1) if getattr(module, "batch_first", True) is False else output).is_contiguous()


def test_a_query_that_is_the_value_too() -> None:
    x, key = (each[:, :L].detach() for each in drawn(2))
    for kind in ("own", "drop-in", "drop-in, length first"):
        module = made(kind)
        assert torch.equal(attend(module, [x, key, x]), attend(module, [x, key, x.clone()]))
        assert (attend(module, [x, key, x]) - attend(module, [x, key, key])).abs().max() > 1e-3


@pytest.mark.parametrize("mask", ["padding", "float padding", "both", "bias and padding"])
@every_kind
def test_nan_in_padding_stays_there(kind: str, mask: str) -> None:
    module, given, (query, key) = made(kind), MASKS[mask](S), drawn(2)
    expected = attend(module, [query, key], given).detach()
    with torch.no_grad():
        key[padding(S)] = torch.nan
    output = attend(module, [query, key], given)
    assert torch.equal(output, expected)
    of_query, of_key = torch.autograd.grad(output.square().sum(), [query, key])
    assert of_query.isfinite().all()
    assert of_key.isfinite().all()
    assert not of_key[padding(S)].any()


# What is changed on a layer, or stands around it.


def by_hand(module: Any, x: Tensor) -> Tensor:
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


def optimise(module: nn.Module) -> None:
    attend(module, drawn()).square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.003).step()


def change_both(change: Callable[[nn.Linear], object]) -> Callable[[Any], object]:
    def changed(module: Any) -> None:
        with torch.no_grad():
            change(module.k_proj)
            change(module.out_proj)

    return changed


def replace_forward(projection: Any) -> None:
    inner = projection.forward
    projection.forward = lambda x: inner(x) + 1


def double_norm(normed: Any) -> None:
    normed.parametrizations.weight.original0.data.mul_(2)


def double_output(module: nn.Module) -> None:
    module.register_forward_hook(lambda _module, _args, output: output * 2)


OWN_CHANGES: dict[str, Callable[[Any], object]] = {
    "weight in place": change_both(lambda p: p.weight.mul_(1.5)),
    "weight through data": change_both(lambda p: p.weight.data.mul_(1.5)),
    "data of the weight": change_both(lambda p: setattr(p.weight, "data", p.weight.data * 2)),
    "another parameter": change_both(lambda p: setattr(p, "weight", nn.Parameter(p.weight * 2))),
    "bias taken away": change_both(lambda p: setattr(p, "bias", None)),
    "weight with other strides": change_both(lambda p: setattr(p.weight, "data", p.weight.data.t())),
    "loaded": lambda m: m.load_state_dict({name: 2 * each for name, each in m.state_dict().items()}),
    "an optimiser": optimise,
    "another projection": lambda m: setattr(m, "v_proj", nn.Linear(E, E)),
    "a subclass": lambda m: setattr(m, "v_proj", Doubled(E, E)),
    "an adapter": lambda m: setattr(m, "q_proj", Adapted(m.q_proj)),
    "an adapter at the end": lambda m: setattr(m, "out_proj", Adapted(m.out_proj)),
    "a hook": lambda m: double_output(m.q_proj),
    "a hook at the end": lambda m: double_output(m.out_proj),
    "a hook before": lambda m: m.v_proj.register_forward_pre_hook(lambda _module, args: (args[0] * 2,)),
    "forward of one": lambda m: replace_forward(m.v_proj),
    "parametrized": lambda m: parametrize.register_parametrization(m.v_proj, "weight", Twice()),
    "pruned": lambda m: prune.l1_unstructured(m.v_proj, "weight", amount=0.5),
    "normed": lambda m: double_norm(nn.utils.parametrizations.weight_norm(m.v_proj)),
}


@pytest.mark.parametrize("change", OWN_CHANGES)
@pytest.mark.parametrize("train", [False, True])
def test_a_layer_that_is_changed_between_two_calls(change: str, train: bool) -> None:
    module, (x,) = made("own"), drawn()
    with torch.set_grad_enabled(train):
        before = [attend(module, [x]).detach() for _ in range(2)][1]
        torch.testing.assert_close(before, by_hand(module, x).detach())
        with torch.enable_grad():
            OWN_CHANGES[change](module)
        after = attend(module, [x])
        torch.testing.assert_close(after, by_hand(module, x))
    assert (after - before).abs().max() > 0.01, "the change has to be seen"


def append_key(module: Any) -> None:
    module.bias_k, module.bias_v = (nn.Parameter(torch.ones(1, 1, E)) for _ in range(2))


DROP_IN_CHANGES: dict[str, Callable[[Any], object]] = {
    "weight in place": lambda m: m.in_proj_weight.data.mul_(2),
    "data of the weight": lambda m: setattr(m.in_proj_weight, "data", m.in_proj_weight.data * 2),
    "another bias": lambda m: setattr(m, "in_proj_bias", nn.Parameter(torch.ones(3 * E))),
    "an optimiser": optimise,
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
    before = [attend(module, [x]) for _ in range(2)][1].detach()
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
    attend(module, [x])
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
        attend(module, [x]).sum().backward()
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
    expected = attend(module, [x])
    with mode_class() as mode:
        assert torch.equal(attend(module, [x]), expected)
    assert mode.products == 4


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a kernel": lambda: clearhead.use_kernel("reference"),
    "a GEMM": lambda: clearhead.use_linear("pytorch"),
    "saved tensors": torch.autograd.graph.save_on_cpu,
    "forward mode": torch.autograd.forward_ad.dual_level,
    "function mode": Counting,
    "dispatch mode": Dispatched,
}


@every_kind
@pytest.mark.parametrize("around", AROUND)
def test_what_surrounds_a_layer(kind: str, around: str) -> None:
    module, inputs = made(kind), drawn()
    before = derivatives(module, inputs)
    with AROUND[around]():
        found = derivatives(module, inputs)
    largest = max(each.abs().max().item() for each in before)  # a key's bias has a gradient of 0 but for rounding
    torch.testing.assert_close(found, before, rtol=0.0, atol=1e-5 * largest)
    assert same(derivatives(module, inputs), before)


@both
def test_saved_tensor_hooks_see_what_autograd_keeps(kind: str) -> None:
    module, (x,), shapes = made(kind), drawn(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(t.shape) or t, lambda t: t):
        attend(module, [x]).sum().backward()
    assert x.shape in shapes or (B * L, E) in shapes
    assert len(shapes) >= 4


class Logged(Tensor):
    pass


def in_inference_mode(module: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return attend(module, [x])


OTHERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "another length": lambda m, x: attend(m, [x[:, :2]]),
    "not contiguous": lambda m, x: attend(m, [x.transpose(0, 1).contiguous().transpose(0, 1)]),
    "no batch": lambda m, x: attend(m, [x[0]]),
    "a subclass": lambda m, x: attend(m, [x.as_subclass(Logged)]),
    "mapped over": lambda m, x: torch.vmap(lambda one: attend(m, [one]))(x[None])[0],
    "inference mode": in_inference_mode,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_inputs_after_the_usual_ones(name: str) -> None:
    module, (x,) = made("own"), [x.detach() for x in drawn()]
    whole = attend(module, [x])
    expected = {"another length": by_hand(module, x[:, :2]), "no batch": whole[0]}
    found = OTHERS[name](module, x)
    assert type(found) is (Logged if name == "a subclass" else Tensor)
    torch.testing.assert_close(found.as_subclass(Tensor), expected.get(name, whole))


def test_functional_call_uses_the_given_parameters() -> None:
    for kind in ("own", "drop-in"):
        module, (x,) = made(kind), drawn()
        before = attend(module, [x])
        doubled = {name: (2 * each).detach().requires_grad_() for name, each in module.named_parameters()}
        arguments = (x,) if kind == "own" else (x, x, x, None, False)
        found = torch.func.functional_call(module, doubled, arguments)
        found = found if kind == "own" else found[0]
        gradients = torch.autograd.grad(found.square().sum(), list(doubled.values()))
        module.load_state_dict(doubled)
        after = attend(module, [x])
        torch.testing.assert_close(found, after)
        torch.testing.assert_close(gradients, torch.autograd.grad(after.square().sum(), list(module.parameters())))
        assert (after - before).abs().max() > 0.01


def test_parts_that_are_given_to_a_layer_between_calls() -> None:
    module, (x,) = made("own"), [x.detach() for x in drawn()]
    before = attend(module, [x])
    module.dropout = 0.5
    assert not torch.equal(attend(module, [x]), attend(module, [x]))
    assert torch.equal(attend(module.eval(), [x]), before)
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
        assert (attend(module, [x]) - before).abs().max() > 1e-3, name
        setattr(module, name, kept)
        assert torch.equal(attend(module, [x]), before)
