"""Whole modules with their projections: eval, training, averaged weights, padding, and inputs of a few numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

import clearhead
from benchmarks.command import Effort
from benchmarks.comparing import OURS, Contest, TimedCase, enter
from benchmarks.cpu.module import twins
from benchmarks.peers import X_TRANSFORMERS
from benchmarks.peers.work import Outputs, Unsupported, Way

__all__ = ["DROP_IN", "THEIRS", "drop_in", "module_cases"]

THEIRS = "nn.MultiheadAttention"
DROP_IN = "Clearhead drop-in"
UNPADDED_QUERIES = f"{OURS}, queries unpadded too"


@final
@dataclass(frozen=True)
class Shape:
    """A batch and the module it goes through."""

    batch: int
    length: int
    embed_dim: int
    heads: int

    def __str__(self) -> str:
        return f"B={self.batch} L={self.length} E={self.embed_dim} H={self.heads}"


def module_cases(effort: Effort) -> Iterator[TimedCase]:
    large = Shape(8, effort.size(512), effort.size(768, 48), 12)
    section, repeats = "module, B=8 L=512 E=768 H=12", effort.size(200, 1)
    for train, need_weights in ((False, False), (True, False), (False, True), (True, True)):
        name = f"{'training step' if train else 'eval'}{', averaged weights' if need_weights else ''}"
        yield TimedCase(section, name, _preparing(large, train, need_weights, effort.peers))
    yield TimedCase(section, "half the tokens padding, eval", lambda: _padded(large))
    for shape in (Shape(2, 5, 16, 4), Shape(1, 1, 64, 4)):
        for train in (False, True):
            name = f"{shape}, {'training step' if train else 'eval'}"
            prepare = _preparing(shape, train, False, effort.peers)
            yield TimedCase("tiny module", name, prepare, repeats=repeats)
            for kind in ("padding", "cross-attention"):
                prepare = _preparing_tiny(shape, train, kind == "cross-attention")
                yield TimedCase("tiny module", f"{name}, {kind}", prepare, repeats=repeats)


def _preparing(shape: Shape, train: bool, need_weights: bool, peers: bool) -> Callable[[], Contest]:
    return lambda: _contest(shape, train, need_weights, peers)


def _contest(shape: Shape, train: bool, need_weights: bool, peers: bool) -> Contest:
    torch.manual_seed(0)
    ours, theirs = twins(shape.embed_dim, shape.heads)
    x = torch.randn(shape.batch, shape.length, shape.embed_dim, requires_grad=train)
    contest = Contest(kernel=_kernel(shape, train))

    def run_ours() -> Outputs:
        output = ours(x, need_weights=need_weights)
        return output if need_weights else (output,)

    enter(contest, OURS, lambda: _way(run_ours, ours, x, train))
    for name, module in ((THEIRS, theirs), (DROP_IN, drop_in(theirs))):
        enter(
            contest, name, lambda module=module: _way(_torch_call(module, x, x, None, need_weights), module, x, train)
        )
    if peers:
        enter(contest, X_TRANSFORMERS, lambda: _x_transformers(theirs, shape, x, train, need_weights))
    return contest


def _preparing_tiny(shape: Shape, train: bool, cross: bool) -> Callable[[], Contest]:
    return lambda: _tiny(shape, train, cross)


def _tiny(shape: Shape, train: bool, cross: bool) -> Contest:
    """Self-attention whose last item ends in padding, or attention to two tokens more."""
    torch.manual_seed(0)
    ours, theirs = twins(shape.embed_dim, shape.heads)
    x = torch.randn(shape.batch, shape.length, shape.embed_dim, requires_grad=train)
    keys = torch.randn(shape.batch, shape.length + 2, shape.embed_dim) if cross else x
    hidden = None if cross else torch.zeros(shape.batch, shape.length, dtype=torch.bool)
    if hidden is not None:
        hidden[-1, (shape.length + 1) // 2 :] = True
    contest = Contest(kernel=_kernel(shape, train))

    def run_ours() -> Outputs:
        return (ours(x, keys, mask=None if hidden is None else clearhead.masks.drop(keys=hidden)),)

    enter(contest, OURS, lambda: _way(run_ours, ours, x, train))
    for name, module in ((THEIRS, theirs), (DROP_IN, drop_in(theirs))):
        enter(contest, name, lambda module=module: _way(_torch_call(module, x, keys, hidden), module, x, train))
    return contest


def _torch_call(
    module: nn.MultiheadAttention, x: Tensor, keys: Tensor, hidden: Tensor | None, need_weights: bool = False
) -> Callable[[], Outputs]:
    def run() -> Outputs:
        output, weights = module(x, keys, keys, key_padding_mask=hidden, need_weights=need_weights)
        return (output,) if weights is None else (output, weights)

    return run


def _way(run: Callable[[], Outputs], module: nn.Module, x: Tensor, train: bool) -> Way:
    """Eval: a forward pass. Training: forward, and the gradients of the input and of every parameter."""
    module.train(train)
    parameters = [x, *module.parameters()]
    output_gradient = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))

    def step() -> Outputs:
        outputs = run()
        gradients = torch.autograd.grad(outputs[0], parameters, output_gradient)
        # Of the gradients that of the input is compared: parameters are laid out differently from module to module.
        return (*outputs, gradients[0])

    def evaluate() -> Outputs:
        with torch.no_grad():
            return run()

    return step if train else evaluate


def drop_in(theirs: nn.MultiheadAttention) -> nn.MultiheadAttention:
    """Clearhead's replacement, with the same weights."""
    module = clearhead.nn.MultiheadAttention(theirs.embed_dim, theirs.num_heads, batch_first=True)
    module.load_state_dict(theirs.state_dict())
    return module


def _x_transformers(theirs: nn.MultiheadAttention, shape: Shape, x: Tensor, train: bool, need_weights: bool) -> Way:
    """x-transformers' module; it has no biases, and those of a new `nn.MultiheadAttention` are zero."""
    from x_transformers.x_transformers import Attention

    if need_weights:
        raise Unsupported("its fast path gives no weights")
    head_dim = shape.embed_dim // shape.heads
    module = Attention(shape.embed_dim, dim_head=head_dim, heads=shape.heads, flash=True)
    with torch.no_grad():
        weights = (*theirs.in_proj_weight.chunk(3), theirs.out_proj.weight)
        for linear, weight in zip((module.to_q, module.to_k, module.to_v, module.to_out), weights, strict=True):
            linear.weight.copy_(weight)
    return _way(lambda: (_first(module(x)),), module, x, train)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _kernel(shape: Shape, train: bool) -> str:
    head = torch.zeros(shape.batch, shape.heads, shape.length, shape.embed_dim // shape.heads, requires_grad=train)
    return clearhead.explain(head, head, head).kernel or "none"


def _padded(shape: Shape) -> Contest:
    """Rows of 1/16, 3/16, … 15/16 of the length: half of all tokens. Real positions alone are compared."""
    torch.manual_seed(0)
    ours, theirs = twins(shape.embed_dim, shape.heads)
    replacement = drop_in(theirs)
    for module in (ours, theirs, replacement):
        module.eval()
    x = torch.randn(shape.batch, shape.length, shape.embed_dim)
    lengths = (2 * torch.arange(shape.batch) + 1) * shape.length // (2 * shape.batch)
    hidden = torch.arange(shape.length) >= lengths[:, None]  # (B, L)
    keys = clearhead.masks.lengths(lengths)
    both = clearhead.masks.lengths(lengths, query_lengths=lengths)

    def calling(run: Callable[[], Tensor]) -> Way:
        def way() -> Outputs:
            with torch.no_grad():
                return (run(),)

        return way

    contest = Contest(kernel=_kernel(shape, train=False), compared=lambda outputs: (outputs[0][~hidden],))
    enter(contest, OURS, lambda: calling(lambda: ours(x, mask=keys)))
    enter(contest, UNPADDED_QUERIES, lambda: calling(lambda: ours(x, mask=both)))
    for name, module in ((THEIRS, theirs), (DROP_IN, replacement)):
        enter(contest, name, lambda module=module: calling(lambda: module(x, x, x, hidden, need_weights=False)[0]))
    return contest
