"""The contests of `benchmarks.gpu`: attention with every mask, and modules, beside the other ways of PyTorch.

The device is an argument, so that the tests can run all of it on a CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import clearhead
from benchmarks.comparing import OURS, Case, Contest, TimedCase, enter
from benchmarks.cpu.module import twins
from benchmarks.gpu.scored import scored_cases
from benchmarks.gpu.timing import device_samples
from benchmarks.peers.work import Outputs, Unsupported, Way
from clearhead import masks
from clearhead.masks import Mask

__all__ = ["BACKENDS", "FORWARD", "MASKS", "Setting", "all_cases", "attention_name", "operands", "window_of"]

HEADS, HEAD_DIM = 16, 64
HEAD_DIMS, LENGTHS = (64, 128), (8192, 16384)
FORWARD = "attention forward, bf16, B=1 H=16"
BOTH = "attention forward and backward, bf16, B=1 H=16"
BACKENDS = {
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
}
#: Half precision is compared at its own accuracy.
TOLERANCE = 5e-2
#: The kinds of masks, and whether they are timed at every length.
MASKS = {
    "none": True,
    "causal": True,
    "window": True,
    "lengths": False,
    "documents": False,
    "prefix": False,
    "bias": False,
}
WINDOW = 1024
DOCUMENTS = 64
#: Seconds of a contest; a way that is slow shortens it.
BUDGET = 2.0


@final
@dataclass(frozen=True)
class Setting:
    """One call of attention with B = 1."""

    device: str
    length: int
    head_dim: int
    mask: str = "none"
    backward: bool = False
    heads: int = HEADS

    def __str__(self) -> str:
        return attention_name(self.head_dim, self.length, self.mask)


def attention_name(head_dim: int, length: int, mask: str) -> str:
    return f"D={head_dim}, L={length:,}, {mask}"


def all_cases(
    device: str,
    lengths: tuple[int, ...] = LENGTHS,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    heads: int = HEADS,
    peers: bool = True,
) -> Iterator[Case]:
    """Every contest; ``peers`` takes in what has to be compiled or installed."""
    for head_dim in head_dims:
        for length in lengths:
            for mask, everywhere in MASKS.items():
                if everywhere or length == lengths[0]:
                    # Each compilation takes seconds.
                    compiled = peers and (
                        (length == lengths[0] and (head_dim == head_dims[-1] or mask in ("none", "causal")))
                        or (head_dim == head_dims[-1] and mask == "window")
                    )
                    yield _case(FORWARD, Setting(device, length, head_dim, mask, heads=heads), compiled)
    for head_dim in head_dims:
        for mask in ("none", "causal"):
            yield _case(
                BOTH, Setting(device, lengths[0], head_dim, mask, True, heads), peers and head_dim == head_dims[-1]
            )
    yield from scored_cases(device, lengths[0], head_dims[-1], heads, peers)
    for backward in (False, True):
        yield _packed_case(device, lengths[0] * 4, heads, backward)
    for case in (_module_case, _padded_case):
        for train in (False, True):
            yield case(device, lengths[0] // 4, heads, train)
    yield _module_case(device, lengths[0] // 4, heads, False, need_weights=True)


def _case(section: str, setting: Setting, peers: bool) -> Case:
    prepare = partial(_contest, setting, peers)
    return TimedCase(
        section, str(setting), prepare, "TFLOP/s", TOLERANCE, rate_scale=1e12, budget=BUDGET, sample=device_samples
    )


def operands(setting: Setting, heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value (1, H, L, D) in bfloat16."""
    torch.manual_seed(0)
    shape = (1, heads or setting.heads, setting.length, setting.head_dim)
    query, key, value = (torch.randn(shape, device=setting.device).bfloat16() for _ in range(3))
    for x in (query, key, value):
        x.requires_grad_(setting.backward)
    return query, key, value


def window_of(length: int) -> int:
    """How many keys a query of the window sees, its own included."""
    return min(WINDOW, max(1, length // 4))


@final
@dataclass(frozen=True)
class Masked:
    """One mask as Clearhead, PyTorch's attention and FlexAttention take it."""

    ours: Mask | None = None
    additive: Tensor | None = None
    causal: bool = False
    rule: Callable[..., Any] | None = None


def _masked(setting: Setting) -> Masked:
    length, device = setting.length, setting.device
    if setting.mask == "none":
        return Masked()
    if setting.mask == "causal":
        return Masked(masks.causal(), None, True, lambda b, h, q, k: q >= k)
    if setting.mask == "bias":
        bias = torch.randn(1, 1, length, length, device=device, dtype=torch.bfloat16)
        return Masked(masks.bias(bias), bias)
    window, real, prefix = window_of(length), length * 7 // 10, length // 8
    ids = torch.arange(length, device=device) // max(1, length // 8)
    mask, rule = {
        "window": (
            masks.causal() & masks.sliding_window(window - 1, 0),
            lambda b, h, q, k: (q >= k) & (q - k < window),
        ),
        "lengths": (masks.lengths(torch.tensor([real], device=device)), lambda b, h, q, k: k < real),
        "documents": (masks.documents(ids), lambda b, h, q, k: ids[q] == ids[k]),
        "prefix": (masks.causal() | masks.prefix(prefix), lambda b, h, q, k: (q >= k) | (k < prefix)),
    }[setting.mask]
    rows = torch.arange(1 if setting.mask == "lengths" else length, device=device)[:, None]
    visible = rule(0, 0, rows, torch.arange(length, device=device)[None])
    zero = torch.zeros((), device=device, dtype=torch.bfloat16)
    return Masked(mask, torch.where(visible, zero, float("-inf"))[None, None], False, rule)


def _contest(setting: Setting, peers: bool) -> Contest:
    if setting.device != "cpu":
        torch.cuda.empty_cache()
    query, key, value = operands(setting)
    gradient = torch.randn_like(query)
    masked = _masked(setting)
    mask = masked.ours
    if mask is not None:  # as a stack of layers does it: once for all calls
        sizes: dict[str, int] = {"batch_size": 1, "num_heads": setting.heads}
        mask = mask.prepare(setting.length, setting.length, **sizes, device=torch.device(setting.device))
    step = partial(_step, setting.backward, (query, key, value), gradient)
    found = clearhead.explain(query, key, value, mask)
    contest = Contest(kernel=found.backend or found.kernel or "none")
    products = 2.0 * setting.heads * setting.length**2 * setting.head_dim * (7 if setting.backward else 2)
    flops = {"none": products, "causal": products / 2}.get(setting.mask)
    enter(contest, OURS, lambda: step(lambda: clearhead.attention(query, key, value, mask)), flops)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, masked.additive, is_causal=masked.causal)

    enter(contest, "SDPA", lambda: step(sdpa), flops)
    for name, backend in BACKENDS.items():
        enter(contest, name, lambda backend=backend: step(partial(_on_backend, backend, sdpa)), flops)
    if peers:
        builders = {
            "FlexAttention, compiled": partial(_flex, setting, masked),
            "flash-attn": partial(_flash, setting),
            "transformers, eager": partial(_eager, setting),
        }
        for name, build in builders.items():
            enter(contest, name, lambda build=build: step(_built(build, query, key, value)), flops)
    return contest


def _step(backward: bool, leaves: tuple[Tensor, ...], gradient: Tensor, forward: Callable[[], Tensor]) -> Way:
    def both() -> Outputs:
        output = forward()
        return output, *torch.autograd.grad(output, leaves, gradient)

    def alone() -> Outputs:
        with torch.no_grad():
            return (forward(),)

    return both if backward else alone


def _on_backend(backend: SDPBackend, run: Callable[[], Tensor]) -> Tensor:
    with sdpa_kernel(backend):
        return run()


def _built(build: Callable[..., Callable[[], Tensor]], *inputs: Tensor) -> Callable[[], Tensor]:
    """A peer that fails while it is built is skipped."""
    try:
        return build(*inputs)
    except (Unsupported, ModuleNotFoundError):
        raise
    except Exception as error:
        raise Unsupported(" ".join(f"{type(error).__name__}: {error}".split())[:160]) from error


def _flex(setting: Setting, masked: Masked, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    if setting.device == "cpu":
        raise Unsupported("it is compiled for GPUs here")
    if masked.additive is not None and masked.rule is None:
        raise Unsupported("a bias is another program for each tensor")
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    torch._dynamo.reset()  # pyright: ignore
    attend = torch.compile(flex.flex_attention, dynamic=False)
    block_mask = None
    if masked.rule is not None:
        sizes = (1, 1, setting.length, setting.length)
        block_mask = flex.create_block_mask(masked.rule, *sizes, device=setting.device)
    return lambda: attend(query, key, value, block_mask=block_mask)


def _flash(setting: Setting, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    library: Any = importlib.import_module("flash_attn")
    if setting.mask not in ("none", "causal", "window"):
        raise Unsupported("it takes no such mask")
    options: dict[str, Any] = {"causal": setting.mask != "none"}
    if setting.mask == "window":
        options["window_size"] = (window_of(setting.length) - 1, 0)
    rows = [x.transpose(1, 2) for x in (query, key, value)]
    return lambda: library.flash_attn_func(*rows, **options).transpose(1, 2)


def _eager(setting: Setting, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
    if setting.mask != "none" or setting.backward:
        raise Unsupported("one call shows what all weights cost")
    llama: Any = importlib.import_module("transformers.models.llama.modeling_llama")
    layer = SimpleNamespace(num_key_value_groups=1, training=False)
    scale = query.shape[-1] ** -0.5
    return lambda: llama.eager_attention_forward(layer, query, key, value, None, scale)[0].transpose(1, 2)


def _packed_case(device: str, tokens: int, heads: int, backward: bool) -> Case:
    section = f"packed, causal, bf16, {DOCUMENTS} sequences, {tokens:,} tokens in all, H={heads} D={HEAD_DIM}"
    prepare = partial(_packed_contest, device, tokens, heads, backward)
    name = "forward and backward" if backward else "forward"
    return TimedCase(section, name, prepare, tolerance=TOLERANCE, budget=BUDGET, sample=device_samples)


def _packed_contest(device: str, tokens: int, heads: int, backward: bool) -> Contest:
    """Sequences of lengths between a half and three halves of the mean."""
    torch.manual_seed(0)
    lengths = torch.linspace(0.5, 1.5, DOCUMENTS).mul(tokens / DOCUMENTS).long().clamp_min(1)
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    total, longest = int(ends[-1]), int(lengths.max())
    row = torch.arange(DOCUMENTS).repeat_interleave(lengths)
    column = (torch.arange(total) - ends[:-1].repeat_interleave(lengths)).to(device)
    row, ends = row.to(device), ends.to(device)
    query, key, value = (
        torch.randn(total, heads, HEAD_DIM, device=device).bfloat16().requires_grad_(backward) for _ in range(3)
    )
    step = partial(_step, backward, (query, key, value), torch.randn_like(query))
    options: Any = {"max_seqlen_q": longest, "max_seqlen_k": longest}

    def ours() -> Tensor:
        return clearhead.attention_varlen(query, key, value, ends, ends, masks.causal(), **options)

    def pytorch() -> Tensor:
        library: Any = importlib.import_module("torch.nn.attention.varlen")
        return library.varlen_attn(query, key, value, ends, ends, longest, longest, window_size=(-1, 0))

    def padded() -> Tensor:
        """The tokens of a batch with padding behind them, as PyTorch's causal attention takes it."""
        shape = (DOCUMENTS, longest, heads, HEAD_DIM)
        rows: Any = [x.new_zeros(shape).index_put((row, column), x).transpose(1, 2) for x in (query, key, value)]
        output = F.scaled_dot_product_attention(*rows, is_causal=True)
        return output.transpose(1, 2)[row, column]

    contest = Contest()
    for name, forward in ((OURS, ours), ("torch.nn.attention.varlen", pytorch), ("padded, SDPA", padded)):
        enter(contest, name, lambda forward=forward: step(forward))
    return contest


def _module_case(device: str, length: int, heads: int, train: bool, need_weights: bool = False) -> Case:
    what = f"{'training step' if train else 'eval'}{', averaged weights' if need_weights else ''}"
    section = f"module, bf16, B=8 L={length:,} E={heads * HEAD_DIM:,} H={heads}"
    prepare = partial(_module_contest, device, length, heads, train, need_weights)
    return TimedCase(section, what, prepare, tolerance=TOLERANCE, budget=BUDGET, sample=device_samples)


def _module_contest(device: str, length: int, heads: int, train: bool, need_weights: bool) -> Contest:
    torch.manual_seed(0)
    pair: list[Any] = [module.to(device, torch.bfloat16).train(train) for module in twins(heads * HEAD_DIM, heads)]
    ours, theirs = pair
    x = torch.randn(8, length, heads * HEAD_DIM, device=device).bfloat16().requires_grad_(train)
    gradient = torch.randn_like(x)

    def run_ours() -> Outputs:
        output = ours(x, need_weights=need_weights)
        return output if need_weights else (output,)

    def run_theirs() -> Outputs:
        output, weights = theirs(x, x, x, need_weights=need_weights)
        return (output,) if weights is None else (output, weights)

    head = x.new_zeros(8, heads, length, HEAD_DIM)
    contest = Contest(kernel=clearhead.explain(head, head, head).kernel or "none")
    enter(contest, OURS, lambda: _trained(train, run_ours, [x, *ours.parameters()], gradient))
    enter(contest, "nn.MultiheadAttention", lambda: _trained(train, run_theirs, [x, *theirs.parameters()], gradient))
    return contest


def _trained(train: bool, run: Callable[[], Outputs], leaves: list[Tensor], gradient: Tensor) -> Way:
    """A forward, and in training its gradients; the outputs, and the gradient of the input."""

    def step() -> Outputs:
        with torch.set_grad_enabled(train):
            outputs = run()
            if train:
                outputs = (*outputs, torch.autograd.grad(outputs[0], leaves, gradient)[0])
        return outputs

    return step


def _padded_case(device: str, length: int, heads: int, train: bool) -> Case:
    section = f"module, bf16, B=8 L={length:,} E={heads * HEAD_DIM:,} H={heads}"
    what = f"half the tokens padding, {'training step' if train else 'eval'}"
    prepare = partial(_padded_contest, device, length, heads, train)
    return TimedCase(section, what, prepare, tolerance=TOLERANCE, budget=BUDGET, sample=device_samples)


def _padded_contest(device: str, length: int, heads: int, train: bool) -> Contest:
    """Lengths between an eighth and seven eighths of L. Compared are the positions that no item pads."""
    torch.manual_seed(0)
    pair: list[Any] = [module.to(device, torch.bfloat16).train(train) for module in twins(heads * HEAD_DIM, heads)]
    ours, theirs = pair
    n = torch.linspace(length // 8, length * 7 // 8, 8).long()
    padding = (torch.arange(length) >= n[:, None]).to(device)
    x = torch.randn(8, length, heads * HEAD_DIM, device=device).bfloat16().requires_grad_(train)
    real = slice(0, int(n[0]))
    gradient = torch.randn_like(x[:, real])

    def run_ours(mask: Mask) -> Outputs:
        return (ours(x, mask=mask)[:, real],)

    def run_theirs() -> Outputs:
        return (theirs(x, x, x, padding, need_weights=False)[0][:, real],)

    contest = Contest()
    ways = {OURS: masks.lengths(n, n), "Clearhead, padded": masks.lengths(n.to(device), n.to(device))}
    for name, mask in ways.items():
        run = partial(run_ours, mask)
        enter(contest, name, lambda run=run: _trained(train, run, [x, *ours.parameters()], gradient))
    enter(contest, "nn.MultiheadAttention", lambda: _trained(train, run_theirs, [x, *theirs.parameters()], gradient))
    return contest
