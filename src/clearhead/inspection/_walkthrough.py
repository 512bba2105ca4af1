"""`walkthrough`: one call of a multi-head attention module, step by step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import LANGUAGES, choice, strided
from .._multihead import MultiHeadAttention
from .._multihead_checks import complete
from ..errors import ArgumentError, DTypeError
from ..masks import Mask
from ._evaluation import evaluation_mode
from ._walkthrough_result import Walkthrough
from ._walkthrough_steps import Recorder, take_steps

# Relative to the largest output; for half precision, a few roundings of the last bit.
_AGREEMENT = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def walkthrough(
    module: MultiHeadAttention,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    mask: Mask | Tensor | None = None,
    language: str = "en",
) -> Walkthrough:
    """Run one call of a module step by step, and explain every step and every shape.

    The steps are those of the module's own call with the `reference` kernel: projections, norms, position part, scores,
    soft-cap, the module's mask and the call's mask, sinks, softmax, weighted sum. The module is also called as usual,
    and the result contains the largest difference. Everything runs in evaluation mode (no dropout) and without
    gradients. The module's mode is restored afterwards. Several (B, H, L, S) tensors exist at once: use small inputs.

    Args:
        module: a `clearhead.MultiHeadAttention`.
        query: (B, L, qdim), or (L, qdim), which becomes a batch of one.
        key: (B, S, kdim). Default: the query, for self-attention.
        value: (B, S, vdim). Default: the key.
        mask: a mask from `clearhead.masks`, or a bool tensor in which ``True`` may attend.
        language: ``"en"`` or ``"zh"``.

    Returns:
        A `Walkthrough` with ``.steps``, ``.output``, and a readable ``str()``.

    Raises:
        DTypeError: if `module` is not a `clearhead.MultiHeadAttention`.
        ArgumentError: for another language, or if the module is split over processes.
        ShapeError, DTypeError, DeviceError, MaskTypeError: as the module itself.

    Example:
        >>> import clearhead, torch
        >>> module = clearhead.MultiHeadAttention(12, 3)
        >>> walk = clearhead.walkthrough(module, torch.randn(2, 5, 12), mask=clearhead.masks.causal())
        >>> walk["scores"].symbols, walk["scores"].shape
        ('(B, H, L, S)', (2, 3, 5, 5))
    """
    _check_arguments(module, language)
    query, key, value = _with_batch(query, key, value)
    with torch.no_grad(), evaluation_mode(module) as training:
        returned = module(query, key, value, mask=mask)
        recorder = Recorder(language)
        output, hidden_rows = take_steps(recorder, module, (query, *complete(query, key, value)), mask)
    difference, largest = _largest_difference(output, returned)
    return Walkthrough(
        language=language,
        sizes=recorder.sizes,
        steps=tuple(recorder.steps),
        output=output,
        difference=difference,
        agrees=difference <= _AGREEMENT.get(returned.dtype, 1e-5) * max(largest, 1e-30),
        hidden_rows=hidden_rows,
        training=training,
    )


def _with_batch(query: Tensor, key: Tensor | None, value: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Make a batch of one of (L, E) tensors. A tensor that is passed twice stays one tensor."""
    batched: dict[int, Tensor] = {}
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, Tensor) and strided(name, tensor).dim() == 2:
            batched[id(tensor)] = tensor.unsqueeze(0)  # (1, L, E)
    return batched.get(id(query), query), batched.get(id(key), key), batched.get(id(value), value)


def _largest_difference(output: Tensor, returned: Tensor) -> tuple[float, float]:
    """The largest |a − b| and the largest |b|. Two NaN are equal."""
    a, b = output.double(), returned.double()
    equal = (a == b) | (a.isnan() & b.isnan())
    difference, magnitude = (a - b)[~equal].abs(), b[b.isfinite()].abs()
    return float(F.pad(difference, (0, 1)).max()), float(F.pad(magnitude, (0, 1)).max())


def _check_arguments(module: object, language: object) -> None:
    choice("language", language, LANGUAGES)
    if not isinstance(module, MultiHeadAttention):
        got = f"{type(module).__module__}.{type(module).__qualname__}"
        fix = "Pass the attention module itself, not the model around it."
        raise DTypeError("module", expected="a clearhead.MultiHeadAttention", got=got, fix=fix)
    if module.head_shard is not None or module.sequence_shard is not None:
        got = "a module after clearhead.distributed.tensor_parallel or context_parallel"
        fix = "Walk through the module before it is split."
        raise ArgumentError("module", expected="a module that one process computes", got=got, fix=fix)
