"""`qk_clip_`: scales down the query projections of heads whose logits exceed a threshold."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .._checks import FLOATS, is_positive, number, strided, with_values
from .._latent import MultiHeadLatentAttention
from .._layer.linear import Linear
from .._multihead import MultiHeadAttention
from ..errors import ArgumentError, DTypeError, ShapeError, shape_text


class _ProjectionRows(NamedTuple):
    """Rows of a projection. The projection starts with the rows of head 0, then head 1, and so on.

    Args:
        parameter: a weight (rows, features) or a bias (rows,).
        per_head: the number of rows of each head.
        scaled: the rows of a head that are multiplied.
        power: the exponent of the head's factor.
    """

    parameter: Tensor
    per_head: int
    scaled: slice
    power: float


def qk_clip_(module: nn.Module, max_logits: Tensor, threshold: float = 100.0) -> Tensor:
    """Scale the query projection of an attention module in place, so that no head's logits exceed a threshold.

    ::

        γ_h = min(1, threshold / max_logits_h);   Wq_h ← γ_h Wq_h,  bq_h ← γ_h bq_h

    Key projections do not change, because query heads may share them. In latent attention each head has its own keys
    without positions, and all heads share the rotary key. There, Wq_h ← √γ_h Wq_h and Wk_h ← √γ_h Wk_h for the
    features without positions, and Wq_h ← γ_h Wq_h for the rotary features (QK-Clip of MuonClip: Kimi Team, "Kimi K2:
    Open agentic intelligence", 2025, section 2.1). The scores of the head on the same inputs become γ_h times as large.
    Heads with logits within the threshold do not change.

    Call it after ``optimizer.step()``. Autograd raises if a parameter changes between a forward pass and its backward
    pass. The state of the optimizer does not change.

    Args:
        module: a `MultiHeadAttention`, a `MultiHeadLatentAttention`, `clearhead.nn.MultiheadAttention` or
            `torch.nn.MultiheadAttention`. After `clearhead.distributed.tensor_parallel`, or ``fully_shard``, every
            process calls it with the logits of all heads, and scales its shards of the parameters.
        max_logits: (H,), or (B, H), of which the maximum over B counts. It is scale · q·k before soft-cap and bias: the
            statistic ``raw_max_logit`` (``max_logit`` includes both). −∞ is for a head that sees no key.
        threshold: the upper bound of the logits, > 0. Default 100, as for Kimi K2.

    Returns:
        γ (H,), 1 for heads that did not change.

    Raises:
        DTypeError: for another module, and for a projection that is not an unmodified linear layer with its own float
            parameters, such as one with LoRA, quantisation or a parametrization.
        ArgumentError: for a module with norms after its projections (``q_norm``, ``k_norm``), which undo the scaling,
            or whose queries and keys share a projection. Also for a threshold that is not positive, and for logits that
            are NaN or +∞.
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
    if not isinstance(module, (MultiHeadAttention, MultiHeadLatentAttention, nn.MultiheadAttention)):
        expected = "a MultiHeadAttention, a MultiHeadLatentAttention or an nn.MultiheadAttention"
        fix = "Give the attention module itself, such as model.get_submodule(name)."
        raise DTypeError("module", expected=expected, got=type(module).__name__, fix=fix)
    threshold = number("threshold", threshold, "a finite logit > 0", is_positive)
    largest = _largest(max_logits, cast(int, module.num_heads))
    rows = _latent_rows(module) if isinstance(module, MultiHeadLatentAttention) else _query_rows(module)
    _require_apart(module, {id(block.parameter) for block in rows})
    factors = torch.where(largest > threshold, threshold / largest, 1.0)
    with torch.no_grad():
        if bool((factors < 1).any()):  # the version counters of unchanged parameters do not change
            for block in rows:
                _scale(block, factors)
    return factors


def _query_rows(module: MultiHeadAttention | nn.MultiheadAttention) -> list[_ProjectionRows]:
    if isinstance(module, nn.MultiheadAttention):
        weight = "q_proj_weight" if module.in_proj_weight is None else "in_proj_weight"
        names = [weight] if module.in_proj_bias is None else [weight, "in_proj_bias"]
        parameters = [_own_parameter(module, name) for name in names]
    else:
        norms = [name for name in ("q_norm", "k_norm") if getattr(module, name) is not None]
        if norms:
            got = f"one with {' and '.join(norms)}"
            fix = "They undo what scales the projection, and bound the logits themselves."
            raise ArgumentError("module", expected="projections without norms after them", got=got, fix=fix)
        parameters = _linear_parameters("q_proj", module.q_proj)
    return [_ProjectionRows(parameter, cast(int, module.head_dim), slice(None), 1) for parameter in parameters]


def _latent_rows(module: MultiHeadLatentAttention) -> list[_ProjectionRows]:
    nope = module.qk_nope_head_dim
    q_proj, name = module.q_proj, "q_proj"
    if isinstance(q_proj, nn.Sequential):
        q_proj, name = q_proj.get_submodule("up"), "q_proj.up"
    query_rows, key_rows = nope + module.qk_rope_head_dim, nope + module.v_head_dim
    queries, keys = _linear_parameters(name, q_proj), _linear_parameters("kv_up", module.kv_up)
    return [
        *(_ProjectionRows(parameter, query_rows, slice(0, nope), 0.5) for parameter in queries),
        *(_ProjectionRows(parameter, query_rows, slice(nope, None), 1) for parameter in queries),
        *(_ProjectionRows(parameter, key_rows, slice(0, nope), 0.5) for parameter in keys),
    ]


def _linear_parameters(name: str, projection: nn.Module) -> list[Tensor]:
    """Weight and bias of an unmodified linear layer."""
    unmodified = type(projection) in (Linear, nn.Linear, NonDynamicallyQuantizableLinear)
    if not unmodified or "forward" in vars(projection):
        raise _modified(name, f"a {type(projection).__name__}")
    names = ["weight"] if projection.bias is None else ["weight", "bias"]
    return [_own_parameter(projection, each, f"{name}.") for each in names]


def _own_parameter(module: nn.Module, name: str, prefix: str = "") -> Tensor:
    """A float parameter that is not computed from others, as parametrizations and pruning do."""
    parameter = dict(module.named_parameters(recurse=False)).get(name)
    if parameter is None:
        raise _modified(f"{prefix}{name}", "none of its own")
    if not (type(parameter) is nn.Parameter or _is_split(parameter)) or parameter.dtype not in FLOATS:
        raise _modified(f"{prefix}{name}", f"a {type(parameter).__name__} of {parameter.dtype}")
    return parameter


def _modified(name: str, got: str) -> DTypeError:
    expected = "a plain linear layer with float parameters of its own"
    fix = "Merge or remove LoRA, quantisation, pruning and parametrizations first."
    return DTypeError(f"module.{name}", expected=expected, got=got, fix=fix)


def _is_split(parameter: Tensor) -> bool:
    """Whether processes hold shards of a parameter."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return type(parameter) is DTensor


def _require_apart(module: nn.Module, scaled: set[int]) -> None:
    """Raise if the module uses a scaled parameter twice, because it would then be scaled more than once."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for identity, (first, *others) in names.items():
        if others and identity in scaled:
            expected, got = "a parameter that belongs to one projection", f"one that is {' and '.join(others)} as well"
            fix = "Give each its own: clone one of them, or use q_norm and k_norm to bound logits."
            raise ArgumentError(f"module.{first}", expected=expected, got=got, fix=fix)


def _largest(max_logits: Tensor, heads: int) -> Tensor:
    """Each head's largest logit, (H,), in float64."""
    expected = f"(H,) or (B, H) with H = {heads}"
    logits = strided("max_logits", max_logits, f"a float tensor {expected}", dtypes=FLOATS)
    logits = with_values("max_logits", logits)
    if logits.dim() not in (1, 2) or logits.shape[-1] != heads:
        fix = "Several calls of one module are concatenated with torch.cat."
        raise ShapeError("max_logits", expected=expected, got=shape_text(logits.shape), fix=fix)
    logits = logits.detach().double().reshape(-1, heads)
    largest = F.pad(logits, (0, 0, 0, 1), value=float("-inf")).amax(0)  # (H,), −∞ for an empty batch
    if bool((largest.isnan() | (largest == float("inf"))).any()):
        fix = "The model has diverged: go back to a checkpoint."
        raise ArgumentError("max_logits", expected="finite logits, or −∞", got="NaN or +∞", fix=fix)
    return largest


def _scale(rows: _ProjectionRows, factors: Tensor) -> None:
    """Multiply the rows of each head with its factor."""
    parameter, heads = rows.parameter, len(factors)
    row_factors = torch.ones(len(parameter), dtype=parameter.dtype, device=parameter.device)
    by_head = row_factors[: heads * rows.per_head].view(heads, rows.per_head)
    by_head[:, rows.scaled] = factors.pow(rows.power).to(row_factors)[:, None]
    row_factors = row_factors.view(-1, *(1 for _ in parameter.shape[1:]))
    if _is_split(parameter):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = cast(DTensor, parameter).device_mesh
        row_factors = DTensor.from_local(row_factors, mesh, [Replicate()] * mesh.ndim, run_check=False)
    parameter.mul_(row_factors)
