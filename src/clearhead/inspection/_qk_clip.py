"""`qk_clip_`: query projections scaled down where their heads' logits have grown beyond a threshold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .._checks import FLOATS, is_positive, kind, number, strided, with_values
from .._latent import MultiHeadLatentAttention
from .._layer.linear import Linear
from .._multihead import MultiHeadAttention
from ..errors import ArgumentError, DTypeError, ShapeError, shape_text


class _Rows(NamedTuple):
    """The first rows of a projection, which belong to the heads one after the other.

    Args:
        parameter: a weight (rows, features) or a bias (rows,).
        per_head: how many rows each head has.
        scaled: which of them are multiplied.
        power: of the head's factor.
    """

    parameter: Tensor
    per_head: int
    scaled: slice
    power: float


def qk_clip_(module: nn.Module, max_logits: Tensor, threshold: float = 100.0) -> Tensor:
    """Scale the query projection of an attention module in place, so that no head's logits exceed a threshold.

    ::

        γ_h = min(1, threshold / max_logits_h);   Wq_h ← γ_h Wq_h,  bq_h ← γ_h bq_h

    Keys are left alone: query heads may share them. In latent attention, where a head's key has a part of its own and
    the rotary part is shared, Wq_h ← √γ_h Wq_h and Wk_h ← √γ_h Wk_h for the parts without positions, and
    Wq_h ← γ_h Wq_h for the rotary one (QK-Clip of MuonClip: Kimi Team, "Kimi K2: Open agentic intelligence", 2025,
    section 2.1). Either way the head's scores on the same inputs become γ_h times what they were; heads whose logits
    are within the threshold are not touched.

    Call it after ``optimizer.step()``: a parameter that changes between a forward pass and its backward pass is an
    error of autograd's. The optimizer's state is left as it is.

    Args:
        module: a `MultiHeadAttention`, a `MultiHeadLatentAttention`, `clearhead.nn.MultiheadAttention` or
            `torch.nn.MultiheadAttention`. After `clearhead.distributed.tensor_parallel`, or ``fully_shard``, every
            process calls it with the logits of all heads, and scales what it holds of the parameters.
        max_logits: (H,), or (B, H), of which each head's largest counts: scale · q·k before soft-cap and bias, which
            the statistic ``raw_max_logit`` gives (``max_logit`` holds both). −∞ is for a head that saw nothing.
        threshold: the largest logit there may be, > 0. Default 100, as for Kimi K2.

    Returns:
        γ (H,), 1 for heads that were not touched.

    Raises:
        DTypeError: for another module; for a projection that is not a plain linear layer with float parameters of its
            own, such as one with LoRA, quantisation or a parametrization.
        ArgumentError: for a module with norms after its projections (``q_norm``, ``k_norm``), which undo the scaling,
            or whose queries and keys share a projection; for a threshold that is not positive; for logits that are NaN
            or +∞.
        ShapeError: if `max_logits` is not (H,) or (B, H).

    Example:
        >>> import torch, clearhead
        >>> attend = clearhead.MultiHeadAttention(12, 3)
        >>> x = torch.randn(2, 5, 12) * 40
        >>> with clearhead.record(attend, ("raw_max_logit",)) as before:
        ...     _ = attend(x)
        >>> factors = clearhead.qk_clip_(attend, before[""].raw_max_logit, threshold=10.0)
        >>> with clearhead.record(attend, ("raw_max_logit",)) as after:
        ...     _ = attend(x)
        >>> bool((after[""].raw_max_logit <= 10.001).all())
        True
    """
    find = next((find for kind, find in _FINDERS.items() if isinstance(module, kind)), None)
    if find is None:
        raise DTypeError(
            "module",
            expected="a MultiHeadAttention, a MultiHeadLatentAttention or an nn.MultiheadAttention",
            got=type(module).__name__,
            fix="Give the attention module itself, such as model.get_submodule(name).",
        )
    threshold = number("threshold", threshold, "a finite logit > 0", is_positive)
    largest = _largest(max_logits, cast(int, module.num_heads))
    rows = find(module)
    _require_apart(module, rows)
    factors = torch.where(largest > threshold, threshold / largest, 1.0)
    with torch.no_grad():
        if bool((factors < 1).any()):  # an untouched parameter keeps its version
            for part in rows:
                _scale(part, factors)
    return factors


def _of_multi_head(module: MultiHeadAttention) -> list[_Rows]:
    norms = [name for name in ("q_norm", "k_norm") if getattr(module, name) is not None]
    if norms:
        raise ArgumentError(
            "module",
            expected="projections without norms after them",
            got=f"one with {' and '.join(norms)}",
            fix="They undo what scales the projection, and bound the logits themselves.",
        )
    whole = slice(None)
    return [_Rows(part, module.head_dim, whole, 1) for part in _linear("q_proj", module.q_proj)]


def _of_latent(module: MultiHeadLatentAttention) -> list[_Rows]:
    nope = module.qk_nope_head_dim
    own, rotary = slice(0, nope), slice(nope, None)
    up, name = (module.q_proj, "q_proj")
    if isinstance(up, nn.Sequential):
        up, name = up.get_submodule("up"), "q_proj.up"
    found: list[_Rows] = []
    for part in _linear(name, up):
        found += [
            _Rows(part, nope + module.qk_rope_head_dim, own, 0.5),
            _Rows(part, nope + module.qk_rope_head_dim, rotary, 1),
        ]
    return found + [_Rows(part, nope + module.v_head_dim, own, 0.5) for part in _linear("kv_up", module.kv_up)]


def _of_torch(module: nn.MultiheadAttention) -> list[_Rows]:
    name = "in_proj_weight" if module.in_proj_weight is not None else "q_proj_weight"
    parts = [_own(module, name, "")]
    if module.in_proj_bias is not None:
        parts.append(_own(module, "in_proj_bias", ""))
    return [_Rows(part, cast(int, module.head_dim), slice(None), 1) for part in parts]


#: How the rows of a module are found.
_FINDERS: dict[type[nn.Module], Callable[[Any], list[_Rows]]] = {
    MultiHeadAttention: _of_multi_head,
    MultiHeadLatentAttention: _of_latent,
    nn.MultiheadAttention: _of_torch,
}

_PLAIN = (Linear, nn.Linear, NonDynamicallyQuantizableLinear)


def _linear(name: str, projection: nn.Module) -> list[Tensor]:
    """Weight and bias of a plain linear layer."""
    if type(projection) not in _PLAIN or "forward" in vars(projection):
        raise _not_plain(name, f"a {type(projection).__name__}")
    weight = _own(projection, "weight", f"{name}.")
    return [weight] if projection.bias is None else [weight, _own(projection, "bias", f"{name}.")]


def _own(module: nn.Module, name: str, prefix: str) -> Tensor:
    """A parameter that nothing computes from others, as parametrizations and pruning do."""
    parameter = dict(module.named_parameters(recurse=False)).get(name)
    plain = type(parameter) is nn.Parameter or _is_split(parameter)
    if parameter is None or not plain or parameter.dtype not in FLOATS:
        got = "none of its own" if parameter is None else f"a {type(parameter).__name__} of {parameter.dtype}"
        raise _not_plain(f"{prefix}{name}", got)
    return parameter


def _is_split(parameter: Tensor | None) -> bool:
    """Whether processes hold parts of a parameter."""
    if parameter is None or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return type(parameter) is DTensor


def _require_apart(module: nn.Module, rows: list[_Rows]) -> None:
    """Raise if the module uses what is to be scaled for something else, too: it would be scaled more than once."""
    scaled = {id(part.parameter) for part in rows}
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in scaled:
            names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        if others:
            raise ArgumentError(
                f"module.{first}",
                expected="a parameter that belongs to one projection",
                got=f"one that is {' and '.join(others)} as well",
                fix="Give each its own: clone one of them, or use q_norm and k_norm to bound logits.",
            )


def _not_plain(name: str, got: str) -> DTypeError:
    return DTypeError(
        f"module.{name}",
        expected="a plain linear layer with float parameters of its own",
        got=got,
        fix="Merge or remove LoRA, quantisation, pruning and parametrizations first.",
    )


def _largest(max_logits: Tensor, heads: int) -> Tensor:
    """Each head's largest logit, (H,), in float64."""
    expected = f"(H,) or (B, H) with H = {heads}"
    given = with_values("max_logits", strided("max_logits", max_logits, f"a float tensor {expected}"))
    if given.dtype not in FLOATS:
        raise DTypeError("max_logits", expected=f"a float tensor {expected}", got=kind(given))
    if given.dim() not in (1, 2) or given.shape[-1] != heads:
        fix = "Several calls of one module are concatenated with torch.cat."
        raise ShapeError("max_logits", expected=expected, got=shape_text(given.shape), fix=fix)
    largest = given.detach().double()
    if largest.dim() == 2:
        lowest = largest.new_full((1, heads), float("-inf"))  # of an empty batch
        largest = torch.cat((largest, lowest)).amax(0)  # (H,)
    if bool((largest.isnan() | (largest == float("inf"))).any()):
        fix = "The model has diverged: go back to a checkpoint."
        raise ArgumentError("max_logits", expected="finite logits, or −∞", got="NaN or +∞", fix=fix)
    return largest


def _scale(rows: _Rows, factors: Tensor) -> None:
    """Multiply each head's rows with its factor."""
    parameter, heads = rows.parameter, len(factors)
    each = torch.ones(len(parameter), dtype=parameter.dtype, device=parameter.device)
    power = factors.pow(rows.power).to(each)
    each[: heads * rows.per_head].view(heads, rows.per_head)[:, rows.scaled] = power[:, None]  # (H, rows of a head)
    column = each.view(-1, *(1 for _ in parameter.shape[1:]))
    parameter.mul_(_whole_of(parameter, column) if _is_split(parameter) else column)


def _whole_of(parameter: Any, factors: Tensor) -> Tensor:
    """Factors that every process holds, for a parameter of which each holds a part."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    return DTensor.from_local(factors, mesh, [Replicate()] * mesh.ndim, run_check=False)
