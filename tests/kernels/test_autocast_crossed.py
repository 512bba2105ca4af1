"""Autocast on the CPU, crossed with backward passes inside and outside of it, second derivatives and other calls.

Autocast rounds what goes into attention and changes nothing else: a call under it is the call of rounded operands.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead import caches, masks
from clearhead.errors import KernelError
from tests.support.budgets import in_turn
from tests.support.randomised import randomised

B, H, KV, L, S, D = 2, 6, 3, 7, 11, 5
DTYPES = (torch.bfloat16, torch.float16)
KERNELS = (None, "native", "sdpa", "chunked", "reference")
BOUNDS = torch.tensor([0, 4, L]), torch.tensor([0, 3, S])
MARKS = torch.arange(L * S).reshape(L, S) % 3 > 0

#: Functions of query (B, H, L, D), key (B, Hkv, S, D), value and a bias (1, H, L, S).
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Any]] = {
    "plain": lambda q, k, v, bias: clearhead.attention(q, k, v),
    "causal, lse": lambda q, k, v, bias: clearhead.attention(q, k, v, masks.causal(), return_lse=True),
    "marks": lambda q, k, v, bias: clearhead.attention(q, k, v, MARKS, scale=0.7),
    "bias": lambda q, k, v, bias: clearhead.attention(q, k, v, masks.bias(bias) & masks.sliding_window(4, 4)),
    "softcap, sinks": lambda q, k, v, bias: clearhead.attention(q, k, v, softcap=2.0, sinks=bias[0, :, 0, 0]),
    "packed": lambda q, k, v, bias: clearhead.attention_varlen(
        q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), *BOUNDS, masks.causal()
    ),
    "weights": lambda q, k, v, bias: clearhead.attention_weights(q, k, masks.causal(), queries=[0, 3]),
    "no batch": lambda q, k, v, bias: clearhead.attention(q[0], k[0], v[0], masks.causal()),
}


def drawn(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = (B, H, L, D), (B, KV, S, D), (B, KV, S, D), (1, H, L, S)
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


def loss_of(results: list[Tensor]) -> Tensor:
    return torch.stack([x[x.isfinite()].float().sin().sum() for x in results]).sum()


def grads(results: list[Tensor], leaves: list[Tensor], **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss_of(results), leaves, allow_unused=True, materialize_grads=True, **options)


@in_turn({"name": CALLS, "kernel": KERNELS}, {"dtype": DTYPES})
def test_a_call_is_that_of_rounded_operands(name: str, kernel: str | None, dtype: torch.dtype) -> None:
    """Outputs, and gradients of a backward pass inside and outside of the region, to the bit."""
    leaves, call = drawn(), CALLS[name]
    autocast = torch.autocast("cpu", dtype)
    with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
        try:
            # The bias and the sinks are no operands of attention's products, and stay as they are.
            expected = listed(call(leaves[0].to(dtype), leaves[1].to(dtype), leaves[2].to(dtype), leaves[3]))
        except KernelError as error:
            pytest.skip(str(error))
        with autocast:
            found = listed(call(*leaves))
        of_expected = grads(expected, leaves)
        outside = grads(found, leaves, retain_graph=True)
        with autocast:
            inside = grads(found, leaves)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    for tensors in (outside, inside):
        for ours, theirs in zip(tensors, of_expected, strict=True):
            assert ours.dtype == theirs.dtype == torch.float32
            # Products of a backward pass by PyTorch's own operations are rounded inside of the region.
            rounds = tensors is inside and (kernel == "reference" or name == "weights")
            assert (ours - theirs).norm() <= 0.02 * theirs.norm() if rounds else torch.equal(ours, theirs)


@in_turn({"name": CALLS, "kernel": KERNELS}, {"where": ["inside", "outside", "forward alone"]})
def test_second_derivatives(name: str, kernel: str | None, where: str) -> None:
    """As exact as those of rounded operands without autocast, wherever the passes run."""
    leaves, call = drawn(), CALLS[name]
    results: list[tuple[Tensor, ...]] = []
    with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
        for under in (True, False):
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=under)
            operands = leaves if under else [*(x.bfloat16() for x in leaves[:3]), leaves[3]]
            try:
                with autocast:
                    output = listed(call(*operands))
            except KernelError as error:
                pytest.skip(str(error))
            with autocast if where == "inside" else nullcontext():
                first = grads(output, leaves, create_graph=True)
            penalty = torch.stack([x.square().sum() for x in first]).sum()
            with autocast if where != "forward alone" else nullcontext():
                second = torch.autograd.grad(penalty, leaves, allow_unused=True, materialize_grads=True)
            results.append((*first, *second))
    by_operations = kernel == "reference" or name == "weights"
    for number, (ours, theirs) in enumerate(zip(*results, strict=True)):
        assert ours.dtype == theirs.dtype == torch.float32
        # PyTorch's own operations round inside of the region: in the second pass, which only they run, and in theirs.
        rounds = where == "inside" if number < len(leaves) and by_operations else where != "forward alone"
        exactly = not rounds or (number < len(leaves) and not by_operations)
        assert (ours - theirs).norm() <= (1e-6 if exactly else 0.03) * theirs.norm() + 1e-6
    exact = [x.detach().bfloat16().double().requires_grad_() for x in leaves[:3]]
    exact.append(leaves[3].detach().double().requires_grad_())
    with clearhead.use_kernel("reference"):
        first = grads(listed(call(*exact)), exact, create_graph=True)
    penalty = torch.stack([x.square().sum() for x in first]).sum()
    second = torch.autograd.grad(penalty, exact, allow_unused=True, materialize_grads=True)
    for ours, theirs in zip(results[0], (*first, *second), strict=True):
        assert (ours - theirs).norm() <= 0.05 * theirs.norm() + 1e-2


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["plain", "causal, lse", "packed", "weights"])
def test_float64_stays_as_it_is(name: str, kernel: str | None) -> None:
    leaves = drawn(torch.float64)
    with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
        try:
            expected = listed(CALLS[name](*leaves))
            with torch.autocast("cpu", torch.bfloat16):
                found = listed(CALLS[name](*leaves))
                gradients = grads(found, leaves)
        except KernelError as error:
            pytest.skip(str(error))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert all(torch.equal(*pair) for pair in zip(gradients, grads(expected, leaves), strict=True))


# Modules, and what reads their calls.

E = 30


def module(**options: Any) -> clearhead.MultiHeadAttention:
    return randomised(clearhead.MultiHeadAttention(E, H, num_kv_heads=KV, softcap=3.0, **options), 0.4)


def under(dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype)


MODULES: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]]] = {
    "self": lambda: (module(), lambda m, x: m(x, mask=masks.causal())),
    "cross": lambda: (module(), lambda m, x: m(x[:, :3], x)),
    "norms, sinks": lambda: (module(q_norm=nn.LayerNorm(5), sinks=True), lambda m, x: m(x)),
    "rotary": lambda: (module(position=clearhead.positions.Rotary(5, fraction=0.8)), lambda m, x: m(x, positions=4)),
    "drop-in": lambda: (
        randomised(clearhead.nn.MultiheadAttention(E, H, batch_first=True), 0.4), lambda m, x: m(x, x, x)[0]
    ),
    "drop-in, weights apart": lambda: (
        randomised(clearhead.nn.MultiheadAttention(E, H, kdim=9, batch_first=True, add_bias_kv=True), 0.4),
        lambda m, x: m(x, x[..., :9], x)[0],
    ),
    "latent": lambda: (
        randomised(clearhead.MultiHeadLatentAttention(
            E, H, kv_lora_rank=7, qk_nope_head_dim=3, qk_rope_head_dim=2, v_head_dim=5,
            position=clearhead.positions.Rotary(2),
        ), 0.4),
        lambda m, x: m(x, mask=masks.causal()),
    ),
    "encoder layer": lambda: (
        randomised(clearhead.transformer.EncoderLayer(E, module(), clearhead.transformer.FeedForward(E, 11)), 0.4),
        lambda m, x: m(x, mask=masks.causal()),
    ),
}  # fmt: skip


# PyTorch says so of norms whose input autocast has rounded.
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("around", ["plain", "checkpoint", "penalty", "record", "intervene", "no_grad"])
def test_modules_under_autocast(name: str, around: str) -> None:
    """As exact as bfloat16 is, whatever reads or recomputes the call, and the same to the bit where it is only read."""
    made, call = MODULES[name]()
    exact = MODULES[name]()[0].double()
    exact.load_state_dict({key: x.double() for key, x in made.state_dict().items()})
    x = torch.randn(B, 9, E)
    results: list[list[Tensor]] = []
    for each, leaf in ((made, x), (exact, x.double())):
        leaf = leaf.clone().requires_grad_()
        autocast = under() if each is made else nullcontext()
        with autocast, torch.no_grad() if around == "no_grad" else nullcontext():
            if around == "checkpoint":
                output = checkpoint(lambda y, each=each: call(each, y), leaf, use_reentrant=False)
            elif around == "record":
                with clearhead.record(each, ("entropy",), keep="queries_keys") as rec:
                    output = call(each, leaf)
                total = rec.weights(0).sum(-1)
                assert ((total - 1).abs() < 1e-4).all() or (name == "norms, sinks" and (total < 1).all())
                assert not torch.is_autocast_enabled("cpu") or torch.equal(output, call(each, leaf))
            elif around == "intervene":
                attention = next(
                    n
                    for n, m in each.named_modules()
                    if isinstance(
                        m,
                        (
                            clearhead.MultiHeadAttention,
                            clearhead.MultiHeadLatentAttention,
                            clearhead.nn.MultiheadAttention,
                        ),
                    )
                )
                with clearhead.intervene(each, {(attention, 4): 0.5, (attention, 1): "mean"}):
                    output = call(each, leaf)
            else:
                output = call(each, leaf)
        output = output if isinstance(output, Tensor) else output[0]
        parameters = [leaf, *each.parameters()]
        if around == "no_grad":
            results.append([output])
            continue
        first = torch.autograd.grad(output.double().square().sum(), parameters, create_graph=around == "penalty")
        if around == "penalty":
            (second,) = torch.autograd.grad(first[0].square().sum(), leaf)
            first = (*first, second)
        results.append([output, *first])
    for ours, theirs in zip(*results, strict=True):
        assert (ours.double() - theirs).norm() <= 0.15 * theirs.norm() + 1e-2 * theirs.numel() ** 0.5


def test_statistics_and_importance_are_of_the_rounded_call() -> None:
    leaves = [x.detach() for x in drawn()]
    rounded = [x.bfloat16() for x in leaves]
    names = ("entropy", "received", "max_logit", "output_norm", "offset")
    expected = clearhead.attention_statistics(*rounded[:2], value=rounded[2], statistics=names, scale=0.6)
    with under():
        found = clearhead.attention_statistics(*leaves[:2], value=leaves[2], statistics=names, scale=0.6)
    for name in names:
        assert torch.equal(getattr(found, name), getattr(expected, name))
    made, x = module(), torch.randn(B, 9, E)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().square().flatten(1).sum(1).mean()

    exact = clearhead.head_importance(made, [x, x[:1]], loss, progress=False)[""]
    with under():
        rough = clearhead.head_importance(made, [x, x[:1]], loss, progress=False)[""]
    assert (rough - exact).norm() <= 0.06 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_in_steps_under_autocast(dtype: torch.dtype) -> None:
    """Keys of a text, and of a memory that is projected once: in autocast's dtype, from the first step to the last."""
    made, x, memory = (
        module(position=clearhead.positions.Rotary(5, fraction=0.8)),
        torch.randn(B, 9, E),
        torch.randn(B, 4, E),
    )
    cross = module()
    with under(dtype), torch.no_grad():
        cache, of_memory = made.make_cache(B, 9), caches.CrossKVCache()
        whole, whole_cross = made(x, mask=masks.causal()), cross(x, memory)
        for start, stop in ((0, 4), (4, 5), (5, 9)):
            part = x[:, start:stop]
            found = made(part, mask=masks.causal(), cache=cache)
            of_cross = cross(part, memory, cache=of_memory) if start == 0 else cross(part, cache=of_memory)
            assert found.dtype == of_cross.dtype == dtype
            torch.testing.assert_close(found.float(), whole[:, start:stop].float(), rtol=0.05, atol=0.1)
            torch.testing.assert_close(of_cross.float(), whole_cross[:, start:stop].float(), rtol=0.05, atol=0.1)
        assert of_memory.get() is not None
        assert all(x.dtype == dtype for x in of_memory.get()[:2])  # pyright: ignore[reportOptionalSubscript]


def test_regions_in_turn() -> None:
    """A plan that was made under autocast serves no call outside of it, and the other way round."""
    made, x = module(), torch.randn(B, 9, E)
    alone = made(x)
    with under():
        rounded = made(x)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(made(x), alone)
        assert torch.equal(made(x), rounded)
    with under(torch.float16):
        assert made(x).dtype == torch.float16
    assert torch.equal(made(x), alone)
    assert rounded.dtype == torch.bfloat16
