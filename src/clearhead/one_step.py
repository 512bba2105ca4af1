"""Self-attention layers as one step of autograd: for tiny calls, whose time goes into the number of operations.

The numbers are computed as the layer's modules compute them, product for product and in the same order, forward and
backward. So nobody can tell from the result which way it went: a hook, a recorder or checkpointing changes no bit.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore[reportPrivateUsage]

from .call import AttentionCall, build_call
from .kernels.base import FlatAttention
from .kernels.dispatch import choose, forced_kernel
from .kernels.reference import ReferenceKernel
from .kernels.second_order import asks_for_reference, gradients_of
from .known_calls import keep, recall
from .linear import forced_product, is_pytorchs_product
from .masks.positional import Causal
from .native import extension
from .observe import watched
from .tracing import is_tracing

__all__ = ["may_be_one_step", "one_step"]

Parameters = tuple["Tensor | None", ...]


class Heads(NamedTuple):
    """H, Hkv and D, and whether batches come before positions."""

    queries: int
    keys: int
    dim: int
    batch_first: bool

    @property
    def widths(self) -> list[int]:
        """Features of queries, keys and values."""
        return [self.queries * self.dim, self.keys * self.dim, self.keys * self.dim]


def may_be_one_step(x: Tensor) -> bool:
    """Whether a layer's parameters are worth looking at; to be asked before `one_step`."""
    return extension is not None and type(x) is Tensor and x.is_cpu and not is_tracing()


def one_step(
    x: Tensor, parameters: Parameters, heads: tuple[int, int, int, bool], scale: object, mask: Causal | None
) -> Tensor | None:
    """Attention of `x` to itself between its projections.

    Args:
        x: (B, L, E), or (L, B, E), of which `may_be_one_step` is true.
        parameters: weight and bias or ``None`` of query, key, value and output, or of one projection that gives the
            first three side by side, and of the output; of modules on which nothing hangs.
        heads: H, Hkv, D, and whether x is (B, L, E).
        scale: ``None``, or a float.
        mask: a causal one, or none.

    Returns:
        The output, laid out like x; ``None`` where the call is no tiny one, where something looks at single
        operations, and where an input is wrong.
    """
    if x.is_nested or not _is_ordinary(x) or not _is_undisturbed():
        return None
    if scale is not None and type(scale) is not float:
        return None
    weights: tuple[Any, ...] = parameters[::2]
    biases, shapes = parameters[1::2], []
    for weight in weights:
        if type(weight) not in _TYPES or not _is_ordinary(weight):
            return None
        shapes.append(weight.shape)
    for bias in biases:
        if type(bias) not in _OF_BIASES:
            return None
    kind = (x.shape, *shapes, heads, scale, None if mask is None else mask.align)
    step = recall(kind, _UNKNOWN)
    if step is _UNKNOWN:
        step = _prepare(x, shapes, Heads(*heads), scale, mask)
        keep(kind, step)
    if step is None:
        return None
    if torch.is_grad_enabled() and (x.requires_grad or any(p is not None and p.requires_grad for p in parameters)):
        # Last first: so autograd meets the modules' gradients, and adds up those of what they share.
        output: Any = _OneStep.apply(step, *(x,) * step.products, *parameters[::-1])
        return output
    return step.compute(x, weights, biases, None)[0]


_TYPES: Final = (nn.Parameter, Tensor)  # no subclasses: they mean something of their own by a product
_OF_BIASES: Final = (*_TYPES, type(None))
_FLOAT: Final = torch.float32
_STRIDED: Final = torch.strided
_UNKNOWN: Final = object()


def _is_ordinary(tensor: Tensor) -> bool:
    return tensor.dtype is _FLOAT and tensor.is_cpu and tensor.layout is _STRIDED and tensor.is_contiguous()


def _is_undisturbed() -> bool:
    """Whether nothing around this call sees, changes or repeats single operations."""
    inner: Any = torch._C  # pyright: ignore[reportPrivateUsage]  # nothing public asks these as cheaply
    return not (
        watched()
        or inner._are_functorch_transforms_active()
        or forward_ad._current_level >= 0  # pyright: ignore[reportPrivateUsage]
        or inner._is_any_autocast_enabled()
        or inner._len_torch_dispatch_stack()
        or inner._len_torch_function_stack()
        or inner._autograd._top_saved_tensors_default_hooks(True) is not None  # checkpointing, offloading
        or _has_any_global_hook()
        or forced_kernel() is not None
        or forced_product() is not None
    )


def _prepare(
    x: Tensor, shapes: list[torch.Size], heads: Heads, scale: float | None, mask: Causal | None
) -> _Step | None:
    """What is the same in every call of a kind; ``None`` for those that go another way."""
    if x.dim() != 3 or any(len(shape) != 2 for shape in shapes) or 0 in (*x.shape, *heads[:3], *shapes[-1]):
        return None
    inputs = [x.shape[2]] * (len(shapes) - 1) + [heads.queries * heads.dim]
    given = [shape[0] for shape in shapes[:-1]]
    if [shape[1] for shape in shapes] != inputs or given not in ([sum(heads.widths)], heads.widths):
        return None
    rows = x.shape[0] * x.shape[1]
    if not all(is_pytorchs_product(rows, shape.numel()) for shape in shapes):
        return None
    projected = tuple(x.new_empty(rows, width) for width in given)
    nothing: dict[str, Any] = dict.fromkeys(("softcap", "sinks", "query_positions", "key_positions"))
    call = build_call(*_cut(projected, x, heads), mask, scale=scale, dropout_p=0.0, return_lse=False, **nothing)
    if call.reach.queries is not None or call.reach.keys is not None:
        return None
    attention = choose(call).prepare_flat(call, projected)
    if attention is None:
        return None
    shape = (x.shape[0], x.shape[1], shapes[-1][0])
    return _Step(call.without_tensors(), attention, heads, len(given), (rows, x.shape[2]), shape)


def _cut(projected: tuple[Tensor, ...], x: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """(B·L, H·D) and (B·L, Hkv·D) twice, or one tensor of all → (B, H, L, D) and (B, Hkv, L, D) twice."""
    if len(projected) == 1:
        projected = projected[0].split(heads.widths, -1)
    order = (0, 2, 1, 3) if heads.batch_first else (1, 2, 0, 3)
    q, k, v = (each.view(*x.shape[:2], -1, heads.dim).permute(order) for each in projected)
    return q, k, v


def _merged(mixed: Tensor, heads: Heads) -> Tensor:
    """(B, H, L, D) → (B, L, H·D), or (L, B, H·D)."""
    return mixed.permute((0, 2, 1, 3) if heads.batch_first else (2, 0, 1, 3)).flatten(2)


@final
class _Step:
    """One kind of call.

    Args:
        template: the attention call in it, without its tensors.
        attention: which computes it.
        heads: how the projections are cut.
        products: how many projections there are before it, 1 or 3.
        rows: shape of x, (B·L, E).
        shape: of the output, as (B, L, E).
    """

    def __init__(
        self,
        template: AttentionCall,
        attention: FlatAttention,
        heads: Heads,
        products: int,
        rows: tuple[int, int],
        shape: tuple[int, int, int],
    ) -> None:
        self.template, self.attention, self.heads, self.products = template, attention, heads, products
        self.rows, self.shape = rows, shape

    def compute(
        self, x: Tensor, weights: Parameters, biases: Parameters, lse: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """The output like x, the projections (B·L, H·D) and the merged heads (B·L, H·D)."""
        rows = x.view(*self.rows)
        projected = tuple(map(_linear, (rows,) * self.products, weights, biases))  # the last ones are the output's
        merged = self.attention.forward(projected, lse)
        return _linear(merged, weights[-1], biases[-1]).view(*self.shape), projected, merged

    def derive(
        self, gradient: Tensor, needed: tuple[bool, ...], saved: tuple[Tensor, ...], weights: tuple[Tensor, ...]
    ) -> list[Tensor | None]:
        """Gradients of x by each projection, and of the parameters, as `_OneStep.forward` takes them."""
        x, lse, merged, *projected = saved
        wanted = iter(needed)
        inputs = [next(wanted) for _ in projected]
        rows = gradient.reshape(-1, gradient.shape[2])
        found = _parameters(rows, merged, next(wanted), next(wanted))
        if not any(inputs) and not any(needed[len(projected) + 2 :]):
            return [None] * len(projected) + found + [None] * 2 * len(projected)
        parts = self.attention.backward(tuple(projected), merged, lse, rows.mm(weights[0]))
        flat = x.view(*self.rows)
        of_x: list[Tensor | None] = []
        for part, weight, needs in zip(parts[::-1], weights[1:], inputs, strict=True):
            of_x.append(part.mm(weight).view_as(x) if needs else None)
            found += _parameters(part, flat, next(wanted), next(wanted))
        return of_x + found

    def derive_again(self, gradient: Tensor, x: Tensor, parameters: Parameters) -> list[Tensor | None]:
        """The same, of every order, from operations that PyTorch can differentiate."""
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            leaves = [None if tensor is None else tensor.view_as(tensor) for tensor in (x, *parameters)]
            own, *rest = leaves
            biases, weights = rest[::2], rest[1::2]
            own = cast(Tensor, own)
            rows = own.flatten(0, 1)
            projected = tuple(map(_linear, (rows,) * self.products, weights[:0:-1], biases[:0:-1]))
            call = self.template.with_tensors(*_cut(projected, own, self.heads))
            mixed = ReferenceKernel().run(call)[0]  # (B, H, L, D)
            output = _linear(_merged(mixed, self.heads), weights[0], biases[0])
            given = [leaf for leaf in leaves if leaf is not None]
            found = iter(gradients_of([output], given, [gradient]))
        of_x, *of_parameters = [None if leaf is None else next(found) for leaf in leaves]
        return [of_x, *[None] * (self.products - 1), *of_parameters]


_linear: Any = F.linear


def _parameters(rows: Tensor, inputs: Tensor, bias: bool, weight: bool) -> list[Tensor | None]:
    """Gradients of a projection's bias and weight, from its input and the gradient of its output, (B·L, …) each."""
    return [rows.sum(0) if bias else None, rows.t().mm(inputs) if weight else None]


class _OneStep(torch.autograd.Function):
    """Takes x once for each projection, so that its gradients are added up where the modules' would be."""

    @staticmethod
    def forward(ctx: Any, step: _Step, *tensors: Tensor | None) -> Tensor:
        x: Any = tensors[0]
        parameters = tensors[step.products :]
        lse = step.attention.empty_lse(x)
        output, projected, merged = step.compute(x, parameters[::-2], parameters[-2::-2], lse)
        ctx.step = step
        ctx.save_for_backward(x, lse, merged, *projected, *parameters)
        return output.detach()  # no view, so that it may be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        step, saved, (gradient,) = ctx.step, ctx.saved_tensors, gradients
        first = 3 + step.products
        if asks_for_reference(gradient):
            return None, *step.derive_again(gradient, saved[0], saved[first:])
        needed, weights = ctx.needs_input_grad[1:], saved[first + 1 :: 2]
        if torch._C._is_any_autocast_enabled():  # pyright: ignore
            with torch.autocast("cpu", enabled=False):
                return None, *step.derive(gradient, needed, saved[:first], weights)
        return None, *step.derive(gradient, needed, saved[:first], weights)
