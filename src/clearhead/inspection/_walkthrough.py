"""One call of a multi-head attention module, taken apart into the steps a textbook draws."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._checks import shown, strided
from .._multihead import MultiHeadAttention
from .._multihead_checks import complete
from ..errors import ArgumentError, DTypeError
from ..masks import Mask
from ._walkthrough_result import Walkthrough
from ._walkthrough_steps import Recorder, take_steps
from ._walkthrough_text import LANGUAGES

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
    """Run one call of a module step by step and explain every step and every shape.

    The steps are those of the module's own call with the `reference` kernel: projections, norms, position part, scores,
    soft-cap, the module's and the call's mask, sinks, softmax, weighted sum. The module itself is called as well, and
    the largest difference is reported. Everything runs in evaluation mode (no dropout) and without gradients; the
    module's mode is put back. All of (B, H, L, S) is held several times over, so this is for inputs of a size that one
    wants to read.

    Args:
        module: a `clearhead.MultiHeadAttention`.
        query: (B, L, qdim), or (L, qdim), which is walked through as a batch of one.
        key: (B, S, kdim). Default: the query, which makes it self-attention.
        value: (B, S, vdim). Default: the key.
        mask: as `module` takes it: a mask from `clearhead.masks`, or a bool tensor where ``True`` may attend.
        language: ``"en"`` or ``"zh"``.

    Returns:
        A `Walkthrough`: ``.steps``, ``.output``, and a readable ``str()``.

    Raises:
        DTypeError: if `module` is not a `clearhead.MultiHeadAttention`.
        ArgumentError: if the language is not one of the two, or the module is split over processes.
        And what the module itself raises for its inputs.

    Example:
        >>> import clearhead, torch
        >>> module = clearhead.MultiHeadAttention(12, 3)
        >>> walk = clearhead.walkthrough(module, torch.randn(2, 5, 12), mask=clearhead.masks.causal())
        >>> walk["scores"].symbols, walk["scores"].shape
        ('(B, H, L, S)', (2, 3, 5, 5))
    """
    _check_arguments(module, language)
    query, key, value = _with_batch(query, key, value)
    with torch.no_grad(), _evaluation_mode(module) as training:
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
    """Make a batch of one of (L, E) tensors; one tensor given twice stays one tensor."""
    batched: dict[int, Tensor] = {}
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if isinstance(tensor, Tensor) and strided(name, tensor).dim() == 2:
            batched[id(tensor)] = tensor.unsqueeze(0)  # (1, L, E)
    return batched.get(id(query), query), batched.get(id(key), key), batched.get(id(value), value)


@contextmanager
def _evaluation_mode(module: nn.Module) -> Generator[bool, None, None]:
    """Switch every submodule to evaluation, and each back to the mode it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield modes[0][1]
    finally:
        for part, training in modes:
            part.training = training


def _largest_difference(output: Tensor, returned: Tensor) -> tuple[float, float]:
    """The largest |a − b| and the largest |b|; NaN on both sides is no difference."""
    ours, theirs = output.double(), returned.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference, largest = (ours - theirs)[~same].abs(), theirs[theirs.isfinite()].abs()
    return float(F.pad(difference, (0, 1)).max()), float(F.pad(largest, (0, 1)).max())


def _check_arguments(module: object, language: object) -> None:
    if not isinstance(language, str) or language not in LANGUAGES:
        names = " or ".join(f'"{name}"' for name in LANGUAGES)
        raise ArgumentError("language", expected=names, got=shown(language))
    if not isinstance(module, MultiHeadAttention):
        raise DTypeError(
            "module",
            expected="a clearhead.MultiHeadAttention",
            got=f"{type(module).__module__}.{type(module).__qualname__}",
            fix="Pass the attention module itself, not the model around it.",
        )
    if module.head_shard is not None or module.sequence_shard is not None:
        raise ArgumentError(
            "module",
            expected="a module that one process computes",
            got="a module after clearhead.distributed.tensor_parallel or context_parallel",
            fix="Walk through the module before it is split.",
        )
